"""Forward and backward of a whole microbatch as one graph.

There are two: the first of a step writes the gradients, those after it add to them. Both leave them at the same
addresses, and the parameters' `.grad` points there.

Shapes: B batch, S sequence.
"""

from functools import partial

import torch
from torch import Tensor

from threefold.engine.data.loader import Batch
from threefold.engine.graphs.lane import Lane
from threefold.engine.graphs.piece import Graphs
from threefold.engine.graphs.record import Graph
from threefold.engine.graphs.recorded import aliases_of, swapped
from threefold.engine.models.decoder import Decoder
from threefold.engine.norm import wide

Aux = dict[str, Tensor]
Share = float | Tensor  # of the labels of the step
_SCOPE = "full_iteration"


class Iteration:
    def __init__(self, model: Decoder, graphs: Graphs) -> None:
        self.model, self.graphs = model, graphs
        self._lane: Lane | None = None
        self._known: dict[bool, tuple[Aux, Graph]] = {}

    def run(self, batch: Batch, share: Share) -> Aux | None:
        """What the microbatch said; None where it must run eagerly."""
        with self.graphs.microbatch():
            lane, tally = self.graphs.lane, self.graphs.tally
            if lane is None or (self._lane is None and any(p.grad is not None for p in self.model.parameters())):
                return None  # still warming up: the first to be recorded is the first of a step
            if batch.documents_BS is not None or batch.positions_BS is not None:
                tally.fall_back(_SCOPE, "packed documents")
                return None
            if self._lane is None:
                self._open(lane, batch, share)
            if differs := self._differs(batch):
                tally.fall_back(_SCOPE, *differs)
                return None
            self._tokens_BS.copy_(batch.tokens_BS)
            self._labels_BS.copy_(batch.labels_BS)
            self._share.copy_(share) if isinstance(share, Tensor) else self._share.fill_(share)
            return self._replay(lane)

    def _open(self, lane: Lane, batch: Batch, share: Share) -> None:
        self._lane, self._aliases = lane, aliases_of([self.model])
        self._addresses = [p.data_ptr() for p in self._aliases]
        self._tokens_BS, self._labels_BS = lane.copied(batch.tokens_BS), lane.copied(batch.labels_BS)
        first = next(self.model.parameters())
        dtype = share.dtype if isinstance(share, Tensor) else wide(first.dtype)
        self._share = torch.zeros((), dtype=dtype, device=first.device)

    def _differs(self, batch: Batch) -> tuple[str, str] | None:
        shape = self._tokens_BS.shape
        if batch.tokens_BS.shape != shape or batch.labels_BS.shape != shape:
            return "another shape", f"{tuple(batch.tokens_BS.shape)}, recorded with {tuple(shape)}"
        if [p.data_ptr() for p in self._aliases] != self._addresses:
            return "a parameter moved", ""
        strangers = [p for p, alias in self._aliases.items() if p.grad is not None and p.grad is not alias.grad]
        return ("gradients of another microbatch that ran eagerly", "") if strangers else None

    def _replay(self, lane: Lane) -> Aux | None:
        more = any(p.grad is not None for p in self._aliases)
        if more not in self._known:
            lane.recorder.prepare()
            try:
                self._known[more] = lane.recorder.record(partial(self._work, more))
            except RuntimeError as error:
                self.graphs.give_up(_SCOPE, error)
                return None
            self.graphs.tally.recorded += 1
        aux, graph = self._known[more]
        graph.replay()
        self.graphs.tally.replays += 1
        for p, alias in self._aliases.items():
            p.grad = alias.grad
        return {name: value.clone() for name, value in aux.items()}

    def _work(self, more: bool) -> Aux:
        if not more:
            for alias in self._aliases.values():
                alias.grad = None
        with swapped([self.model], self._aliases):
            out = self.model(self._tokens_BS, self._labels_BS)
        assert out.loss is not None
        (out.loss * self._share).backward()
        return out.aux
