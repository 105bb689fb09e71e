"""The CUDA graphs of a model as its options ask for them: none, of parts of its layers, or of whole microbatches.

`schedule/microbatch_runners.py` makes one `ModelGraphs` for each model chunk and enters it around each microbatch.
"""

from contextlib import AbstractContextManager, nullcontext

from threefold.engine.batch import Batch
from threefold.engine.context import context
from threefold.engine.graphs.full_iteration import Aux, FullIterationGraph, LabelShare
from threefold.engine.graphs.graphed_part import ChunkGraphs, cuda_graphs
from threefold.engine.graphs.scopes import attach_graphs
from threefold.engine.graphs.stats import GraphStats
from threefold.engine.models.decoder import Decoder


class ModelGraphs:
    """The graphs of one model chunk. Without `graphs` everything runs eagerly."""

    def __init__(self, model: Decoder, graphs: ChunkGraphs | None = None, reduces_grads: bool = False) -> None:
        self.graphs = graphs
        self.graph_stats: GraphStats | None = None if graphs is None else graphs.graph_stats
        self._full_iteration: FullIterationGraph | None = None
        if graphs is not None:
            if "full_iteration" in model.options.graphs:
                self._full_iteration = FullIterationGraph(model, graphs, reduces_grads)
            else:
                attach_graphs(model, model.options.graphs, graphs)

    def reset(self) -> None:
        if self.graphs is not None:
            self.graphs.reset()

    def run(self, batch: Batch, label_share: LabelShare) -> Aux | None:
        """Forward and backward as one graph; None where the model has no such graph or it does not fit the batch."""
        return None if self._full_iteration is None else self._full_iteration.run(batch, label_share)

    def microbatch(self) -> AbstractContextManager[None]:
        return nullcontext() if self.graphs is None or self._full_iteration is not None else self.graphs.microbatch()


def make_model_graphs(
    model: Decoder, graph_stats: GraphStats | None = None, reduces_grads: bool = False
) -> ModelGraphs:
    """The graphs that the model's options name, on a GPU or the one that a dry run simulates; on a CPU none.

    `reduces_grads` says that hooks of the parameters accumulate gradients and reduce them over ranks.
    """
    first = next(model.parameters(), None)  # a pipeline chunk may have no parameters
    if first is None or not model.options.graphs:
        return ModelGraphs(model)
    budget = model.options.graph_memory_bytes
    if context.make_recorder is not None:  # a dry run has no kernels to choose or compile first
        graphs = ChunkGraphs(context.make_recorder, graph_stats, warmup=0, max_bytes=budget)
        return ModelGraphs(model, graphs, reduces_grads)
    if not first.is_cuda:
        return ModelGraphs(model)
    return ModelGraphs(model, cuda_graphs(first.device, graph_stats, budget), reduces_grads)
