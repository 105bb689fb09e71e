"""The scope `full_iteration`: forward and backward of a whole microbatch as one CUDA graph.

On one rank there are two graphs: the one for the first microbatch of a step writes the gradients, the one for later
microbatches adds to them. Both use the same gradient addresses, and the parameters' `.grad` points there. On several
ranks, or where gradients are summed in a wider dtype, one graph writes the gradients of each microbatch, and they are
handed to autograd, whose hooks accumulate and reduce them as ever. The collectives of the forward and the backward are
inside the graph; the reduction of gradients is not.

With EP, rows travel in blocks of a fixed size (`dispatch/static_blocks.py`). Where a block is too small on any rank,
the graph's gradients are zeros, and every rank runs the microbatch again without the graph: no row is ever dropped.

Shapes: B batch, S sequence.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from threefold.engine.autograd.grad_squares import GradSquares, request_grad_squares, requested_squares
from threefold.engine.autograd.main_grad import main_grad_of
from threefold.engine.batch import Batch
from threefold.engine.context import override
from threefold.engine.device import is_simulated
from threefold.engine.dispatch.static_blocks import StaticRows
from threefold.engine.dist.collectives import all_reduce
from threefold.engine.graphs.graph_slot import GraphSlot
from threefold.engine.graphs.graphed_function import make_aliases, refresh_weights, use_aliases
from threefold.engine.graphs.graphed_part import ChunkGraphs
from threefold.engine.graphs.recorder import Graph, memory_address, record_work
from threefold.engine.models.decoder import Decoder
from threefold.engine.sum_dtype import fp32_or_wider

Aux = dict[str, Tensor]
LabelShare = float | Tensor  # the fraction of the step's labels that a microbatch has
_SCOPE = "full_iteration"
_OVERFLOW = "overflow"  # in what a graph makes: rows of all ranks that found no room in their block


class FullIterationGraph:
    """The graphs of a whole model. `ModelGraphs.run` calls it for every microbatch."""

    def __init__(self, model: Decoder, graphs: ChunkGraphs, reduces_grads: bool = False) -> None:
        self.model, self.graphs = model, graphs
        self.reduces_grads = reduces_grads  # whether gradients go through hooks of the parameters (`Zero1`)
        self._slot: GraphSlot | None = None
        self._graphs: dict[bool, tuple[Aux, Graph]] = {}
        self._squares: dict[nn.Parameter, GradSquares] = {}  # of gradients that the first graph writes

    def run(self, batch: Batch, label_share: LabelShare) -> Aux | None:
        """Losses and statistics of the microbatch; None where the caller must run it eagerly."""
        with self.graphs.microbatch():
            slot, graph_stats = self.graphs.slot, self.graphs.graph_stats
            if slot is None or (self._slot is None and self._accumulates):
                return None  # still warming up, or not the first microbatch of a step, with which recording starts
            if batch.documents_BS is not None or batch.positions_BS is not None:
                graph_stats.count_fallback(_SCOPE, "packed documents")
                return None
            if batch.cp_degree is not None:
                graph_stats.count_fallback(_SCOPE, "another CP degree")
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
            if self._num_useful_B is not None and batch.num_useful_B is not None:
                self._num_useful_B.copy_(batch.num_useful_B)
            if self._label_ratios is not None and self.model.depth_label_ratios is not None:
                self._label_ratios.copy_(self.model.depth_label_ratios)
            if isinstance(label_share, Tensor):
                self._label_share.copy_(label_share)
            else:
                self._label_share.fill_(label_share)
            return self._replay(slot)

    def _allocate_inputs(self, slot: GraphSlot, batch: Batch, label_share: LabelShare) -> None:
        self._slot, self._aliases = slot, make_aliases([self.model])
        self._addresses = [p.data_ptr() for p in self._aliases]
        self._tokens_BS, self._labels_BS = slot.copy_static(batch.tokens_BS), slot.copy_static(batch.labels_BS)
        self._num_useful_B = None if batch.num_useful_B is None else slot.copy_static(batch.num_useful_B)
        ratios = self.model.depth_label_ratios  # the step makes new ones each time
        self._label_ratios = None if ratios is None else slot.copy_static(ratios)
        first = next(self.model.parameters())
        dtype = label_share.dtype if isinstance(label_share, Tensor) else fp32_or_wider(first.dtype)
        self._label_share = torch.zeros((), dtype=dtype, device=first.device)

    def _mismatch(self, batch: Batch) -> tuple[str, str] | None:
        shape = self._tokens_BS.shape
        if batch.tokens_BS.shape != shape or batch.labels_BS.shape != shape:
            return "another shape", f"{tuple(batch.tokens_BS.shape)}, recorded with {tuple(shape)}"
        # Asking a pending parameter for its address waits for its update, which a replay could not do.
        if [p.data_ptr() for p in self._aliases] != self._addresses:
            return "a parameter moved", ""
        if (self.model.depth_label_ratios is None) != (self._label_ratios is None):
            return "another way to count labels", ""
        if (batch.num_useful_B is None) != (self._num_useful_B is None):
            return "padding in some microbatches only", ""
        if self.reduces_grads:
            return None
        foreign_grads = [p for p, alias in self._aliases.items() if p.grad is not None and p.grad is not alias.grad]
        return ("gradients of another microbatch that ran eagerly", "") if foreign_grads else None

    @property
    def _accumulates(self) -> bool:
        """Whether the gradients of the microbatch are added to those of an earlier one inside the graph."""
        return not self.reduces_grads and any(p.grad is not None for p in self.model.parameters())

    def _replay(self, slot: GraphSlot) -> Aux | None:
        accumulates = self._accumulates
        refresh_weights([self.model])
        if accumulates not in self._graphs:
            slot.recorder.prepare()
            try:
                work = partial(self._forward_backward, accumulates)
                self._graphs[accumulates] = record_work(slot.recorder, work)
            except RuntimeError as error:
                self.graphs.disable(_SCOPE, error)
                return None
            self.graphs.graph_stats.recorded += 1
        aux, graph = self._graphs[accumulates]
        if self.reduces_grads:
            self._copy_grads_out()
        graph.replay()
        graph_stats = self.graphs.graph_stats
        # The host waits for the device here. What the graph added to gradients where rows found no room was zero. In a
        # dry run the second microbatch finds none, so that the memory of both ways is seen.
        simulates = is_simulated() and graph_stats.replays[_SCOPE] == 1 and not graph_stats.fallbacks
        if _OVERFLOW in aux and (simulates if is_simulated() else aux[_OVERFLOW].item()):
            graph_stats.count_fallback(_SCOPE, "more rows than job.capacity_factor has room for")
            return None
        graph_stats.replays[_SCOPE] += 1
        if self.reduces_grads:
            self._hand_to_autograd()
        else:
            for p, alias in self._aliases.items():
                p.grad = alias.grad
            if not accumulates:
                self._note_squares()
        return {name: value.clone() for name, value in aux.items() if name != _OVERFLOW}

    def _forward_backward(self, accumulates: bool) -> Aux:
        if not accumulates:
            for p, alias in self._aliases.items():
                alias.grad = None
                request_grad_squares(alias, requested_squares(p) is not None)
        of_step, self.model.depth_label_ratios = self.model.depth_label_ratios, self._label_ratios
        self.model.expected_loss_grad = self._label_share
        factor, aux = self.model.options.block_factor, {}
        blocks = None if factor is None else StaticRows(factor, self._tokens_BS.new_zeros(()))
        with override("static_rows", blocks):  # a recompute in the backward sends blocks, too
            with use_aliases([self.model], self._aliases):
                out = self.model(self._tokens_BS, self._labels_BS, num_useful_B=self._num_useful_B)
            self.model.depth_label_ratios = of_step
            assert out.loss is not None
            share = self._label_share
            if blocks is not None:
                aux[_OVERFLOW] = blocks.overflow.clone()
                all_reduce(aux[_OVERFLOW], self.model.all_ranks).wait()
                share = share * (aux[_OVERFLOW] == 0)
            (out.loss * share).backward()
        for p, alias in self._aliases.items():
            if not accumulates and (squares := requested_squares(alias)) is not None:
                self._squares[p] = squares
            request_grad_squares(alias, False)
        return out.aux | aux

    def _note_squares(self) -> None:
        """The graph has written gradients, and with them the sums of their squares."""
        for p, squares in self._squares.items():
            if (wanted := requested_squares(p)) is not None:
                wanted.copy_from(squares)

    def _hand_to_autograd(self) -> None:
        """Let autograd bring each parameter its gradient, and call its hooks, from the last layer to the first."""
        aliases = [(p, alias) for p, alias in reversed(self._aliases.items()) if self._has_grad(alias)]
        # Nothing else may refer to these tensors, or autograd copies them. Where a gradient was added to a `main_grad`
        # inside the graph, there is none.
        grads = [None if alias.grad is None else alias.grad.detach() for _, alias in aliases]
        scalar = _Grads.apply(grads, *(p for p, _ in aliases))
        del grads
        scalar.backward()

    @staticmethod
    def _has_grad(alias: nn.Parameter) -> bool:
        return alias.grad is not None or main_grad_of(alias) is not None

    def _copy_grads_out(self) -> None:
        """Copy gradients of the last microbatch that still lie where the graph writes those of the next one."""
        for p, alias in self._aliases.items():
            if p.grad is not None and alias.grad is not None and memory_address(p.grad) == memory_address(alias.grad):
                p.grad = p.grad.clone()


class _Grads(torch.autograd.Function):
    """A scalar whose backward brings parameters gradients that are there already."""

    @staticmethod
    def forward(ctx: Any, grads: list[Tensor | None], *parameters: Tensor) -> Tensor:
        ctx.grads = grads
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        grads = tuple(ctx.grads)
        ctx.grads.clear()
        return None, *grads
