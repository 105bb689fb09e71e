"""The all-to-all dispatcher: token copies are sorted by expert and sent to the ranks that hold the experts.

It needs nothing but `torch.distributed` and is the reference for the other transports. `select.py` makes it.

Shapes: T tokens, D model dim, K experts of a token, P rows received, R rows of the etp group, S rows as they were sent,
B blocks of received rows (one a source rank), E experts, e experts held here.
"""

from dataclasses import dataclass

from torch import Tensor

from threefold.engine.context import context
from threefold.engine.dispatch.async_exchange import AsyncExchange, all_to_all_exchange, finish_exchange, start_exchange
from threefold.engine.dispatch.capacity import Capacity
from threefold.engine.dispatch.fp8_rows import fp8_all_to_all_exchange, pack_fp8
from threefold.engine.dispatch.protocol import Dispatcher, ExpertSlots
from threefold.engine.dispatch.received_rows import ReceivedRows
from threefold.engine.dispatch.rows import RowMap, sort_by_expert, sort_with_drops
from threefold.engine.dispatch.split_sizes import RowCounts
from threefold.engine.dispatch.static_blocks import BlockCounts
from threefold.engine.dist.mesh import TRIVIAL_GROUP, Group
from threefold.engine.kernels.experts.sorted_rows import SortedRows


@dataclass
class AllToAllState:
    """The state of one microbatch's dispatch; the phases fill it in one after another."""

    rows: RowMap
    counts: RowCounts | BlockCounts
    received_rows: ReceivedRows | None = None  # set by `dispatch_postprocess`
    dispatch_exchange: AsyncExchange | None = None  # set by `token_dispatch`
    combine_exchange: AsyncExchange | None = None  # set by `token_combine`

    @property
    def dropped_TK(self) -> Tensor | None:  # noqa: N802 - a tensor and its shape
        return self.rows.dropped_TK

    @property
    def num_own_rows(self) -> int:
        """The rows of experts that this rank owns, which come before those of copies of other ranks' experts."""
        return self.counts.split_sizes().own_rows


@dataclass(frozen=True)
class AllToAllDispatcher(Dispatcher[AllToAllState]):
    """Sends one row for each copy of a token."""

    num_experts: int
    ep: Group
    etp: Group = TRIVIAL_GROUP
    capacity: Capacity | None = None  # None: dropless
    fp8_rows: bool = False  # rows travel in FP8 on the way to the experts
    count_group: Group | None = None  # a second EP communicator, so that counts do not queue behind rows
    slots: ExpertSlots | None = None  # of the layer, where hot experts are copied to other ranks

    def dispatch_preprocess(self, expert_TK: Tensor, weight_TK: Tensor) -> AllToAllState:
        return self.make_state(*self.sort_rows(expert_TK, weight_TK))

    def sort_rows(self, expert_TK: Tensor, weight_TK: Tensor) -> tuple[RowMap, Tensor]:
        num_experts, slots = self.num_experts, self.slots
        if self.capacity is not None:
            expert_TK = self.capacity.mark_dropped(expert_TK, weight_TK)
        if slots is not None:
            num_experts, expert_TK = slots.num_slots, slots.slots_of(expert_TK)
        return (sort_by_expert if self.capacity is None else sort_with_drops)(expert_TK, num_experts)

    def make_state(self, rows: RowMap, count_E: Tensor) -> AllToAllState:
        if context.static_rows is not None:
            rows, count_E, block_rows = context.static_rows.place(rows, count_E, self.ep.size)
            return AllToAllState(rows, BlockCounts(count_E, block_rows, self.ep, self.etp))
        num_own = None if self.slots is None else self.slots.num_own
        counts = RowCounts(count_E, rows.row_TK.numel(), self.count_group or self.ep, self.etp, num_own)
        if self.slots is not None:
            self.slots.start_filling()
        return AllToAllState(rows, counts)

    def token_dispatch(self, x_TD: Tensor, weight_TK: Tensor, state: AllToAllState) -> tuple[Tensor, Tensor]:
        if state.rows.padded:
            state.rows = state.rows.truncate(sum(state.counts.split_sizes().sent))
        # The rows are made before the host waits for the counts, so that the device has work meanwhile.
        rows, weight_S = state.rows, state.rows.permute_weights(weight_TK)
        if self.fp8_rows and not self.ep.is_trivial:
            packed_SB, splits = pack_fp8(x_TD, rows), state.counts.split_sizes()
            state.dispatch_exchange = fp8_all_to_all_exchange(self.ep, splits.sent, splits.received, rows, packed_SB)
            x_PD, weight_P = start_exchange(state.dispatch_exchange, x_TD, weight_S)
        else:
            x_SD, splits = rows.permute_tokens(x_TD), state.counts.split_sizes()
            state.dispatch_exchange = all_to_all_exchange(self.ep, splits.sent, splits.received)
            x_PD, weight_P = start_exchange(state.dispatch_exchange, x_SD, weight_S)
        return x_PD, weight_P

    def dispatch_postprocess(
        self, x_PD: Tensor, weight_P: Tensor, state: AllToAllState
    ) -> tuple[Tensor, Tensor, Tensor, SortedRows | None]:
        x_PD, weight_P = finish_exchange(state.dispatch_exchange, x_PD, weight_P)
        count_Be = state.counts.count_YXe.view(self.etp.size * self.ep.size, -1)
        block_rows = state.counts.block_rows if isinstance(state.counts, BlockCounts) else None
        etp_rows = state.counts.split_sizes().etp_rows
        state.received_rows = received = ReceivedRows(self.etp, etp_rows, count_Be, block_rows)
        return received.gather(x_PD), received.gather(weight_P), received.count_e, received.order

    def combine_preprocess(self, y_RD: Tensor, state: AllToAllState) -> Tensor:
        assert state.received_rows is not None
        return state.received_rows.reduce(y_RD)

    def token_combine(self, y_PD: Tensor, state: AllToAllState) -> Tensor:
        splits = state.counts.split_sizes()
        state.combine_exchange = all_to_all_exchange(self.ep, splits.received, splits.sent)
        (y_SD,) = start_exchange(state.combine_exchange, y_PD)
        return y_SD

    def combine_postprocess(self, y_SD: Tensor, state: AllToAllState) -> Tensor:
        (y_SD,) = finish_exchange(state.combine_exchange, y_SD)
        return state.rows.unpermute_sum(y_SD)
