"""The graphs of a model, as its options ask for them: none, of parts of its layers, or of whole microbatches."""

from contextlib import AbstractContextManager, nullcontext

from threefold.engine.data.loader import Batch
from threefold.engine.graphs.iteration import Aux, Iteration, Share
from threefold.engine.graphs.piece import Graphs, cuda_graphs
from threefold.engine.graphs.scopes import attach
from threefold.engine.graphs.tally import Tally
from threefold.engine.models.decoder import Decoder


class Graphed:
    def __init__(self, model: Decoder, graphs: Graphs | None = None) -> None:
        self.graphs = graphs
        self.tally: Tally | None = None if graphs is None else graphs.tally
        self._whole: Iteration | None = None
        if graphs is not None:
            if "full_iteration" in model.options.graphs:
                self._whole = Iteration(model, graphs)
            else:
                attach(model, model.options.graphs, graphs)

    def reset(self) -> None:
        if self.graphs is not None:
            self.graphs.reset()

    def run(self, batch: Batch, share: Share) -> Aux | None:
        """Forward and backward in one, if the model has such a graph and it holds."""
        return None if self._whole is None else self._whole.run(batch, share)

    def microbatch(self) -> AbstractContextManager[None]:
        return nullcontext() if self.graphs is None or self._whole is not None else self.graphs.microbatch()


def graphed_of(model: Decoder, tally: Tally | None = None) -> Graphed:
    """On a GPU only: elsewhere nothing is launched."""
    first = next(model.parameters(), None)  # a chunk of a pipeline may be empty
    if first is None or not first.is_cuda or not model.options.graphs:
        return Graphed(model)
    return Graphed(model, cuda_graphs(first.device, tally))
