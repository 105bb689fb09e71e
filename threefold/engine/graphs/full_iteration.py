"""The scope `full_iteration`: forward and backward of a whole microbatch as one CUDA graph.

There are two graphs: the one for the first microbatch of a step writes the gradients, the one for later microbatches
adds to them. Both use the same gradient addresses, and the parameters' `.grad` points there.

Shapes: B batch, S sequence.
"""

from functools import partial

import torch
from torch import Tensor

from threefold.engine.batch import Batch
from threefold.engine.graphs.graph_slot import GraphSlot
from threefold.engine.graphs.graphed_function import make_aliases, use_aliases
from threefold.engine.graphs.graphed_part import ChunkGraphs
from threefold.engine.graphs.recorder import Graph
from threefold.engine.models.decoder import Decoder
from threefold.engine.sum_dtype import fp32_or_wider

Aux = dict[str, Tensor]
LabelShare = float | Tensor  # the fraction of the step's labels that a microbatch has
_SCOPE = "full_iteration"


class FullIterationGraph:
    """The graphs of a whole model. `ModelGraphs.run` calls it for every microbatch."""

    def __init__(self, model: Decoder, graphs: ChunkGraphs) -> None:
        self.model, self.graphs = model, graphs
        self._slot: GraphSlot | None = None
        self._graphs: dict[bool, tuple[Aux, Graph]] = {}

    def run(self, batch: Batch, label_share: LabelShare) -> Aux | None:
        """Losses and statistics of the microbatch; None where the caller must run it eagerly."""
        with self.graphs.microbatch():
            slot, graph_stats = self.graphs.slot, self.graphs.graph_stats
            if slot is None or (self._slot is None and any(p.grad is not None for p in self.model.parameters())):
                return None  # still warming up, or not the first microbatch of a step, with which recording starts
            if batch.documents_BS is not None or batch.positions_BS is not None:
                graph_stats.count_fallback(_SCOPE, "packed documents")
                return None
            if self.model.vision is not None:
                graph_stats.count_fallback(_SCOPE, "pictures")
                return None
            if self._slot is None:
                self._allocate_inputs(slot, batch, label_share)
            if mismatch := self._mismatch(batch):
                graph_stats.count_fallback(_SCOPE, *mismatch)
                return None
            self._tokens_BS.copy_(batch.tokens_BS)
            self._labels_BS.copy_(batch.labels_BS)
            if isinstance(label_share, Tensor):
                self._label_share.copy_(label_share)
            else:
                self._label_share.fill_(label_share)
            return self._replay(slot)

    def _allocate_inputs(self, slot: GraphSlot, batch: Batch, label_share: LabelShare) -> None:
        self._slot, self._aliases = slot, make_aliases([self.model])
        self._addresses = [p.data_ptr() for p in self._aliases]
        self._tokens_BS, self._labels_BS = slot.copy_static(batch.tokens_BS), slot.copy_static(batch.labels_BS)
        first = next(self.model.parameters())
        dtype = label_share.dtype if isinstance(label_share, Tensor) else fp32_or_wider(first.dtype)
        self._label_share = torch.zeros((), dtype=dtype, device=first.device)

    def _mismatch(self, batch: Batch) -> tuple[str, str] | None:
        shape = self._tokens_BS.shape
        if batch.tokens_BS.shape != shape or batch.labels_BS.shape != shape:
            return "another shape", f"{tuple(batch.tokens_BS.shape)}, recorded with {tuple(shape)}"
        if [p.data_ptr() for p in self._aliases] != self._addresses:
            return "a parameter moved", ""
        foreign_grads = [p for p, alias in self._aliases.items() if p.grad is not None and p.grad is not alias.grad]
        return ("gradients of another microbatch that ran eagerly", "") if foreign_grads else None

    def _replay(self, slot: GraphSlot) -> Aux | None:
        accumulates = any(p.grad is not None for p in self._aliases)
        if accumulates not in self._graphs:
            slot.recorder.prepare()
            try:
                self._graphs[accumulates] = slot.recorder.record(partial(self._forward_backward, accumulates))
            except RuntimeError as error:
                self.graphs.disable(_SCOPE, error)
                return None
            self.graphs.graph_stats.recorded += 1
        aux, graph = self._graphs[accumulates]
        graph.replay()
        self.graphs.graph_stats.replays += 1
        for p, alias in self._aliases.items():
            p.grad = alias.grad
        return {name: value.clone() for name, value in aux.items()}

    def _forward_backward(self, accumulates: bool) -> Aux:
        if not accumulates:
            for alias in self._aliases.values():
                alias.grad = None
        with use_aliases([self.model], self._aliases):
            out = self.model(self._tokens_BS, self._labels_BS)
        assert out.loss is not None
        (out.loss * self._label_share).backward()
        return out.aux
