"""Dispatch by all-to-all: rows sorted by expert go to the ranks that hold them.

Shapes: T tokens, D model dim, K experts of a token, P rows that came, R rows by local expert, S rows as they were sent,
E experts, e experts held here.
"""

from dataclasses import dataclass

from torch import Tensor

from threefold.engine.dispatch.arrival import Arrival
from threefold.engine.dispatch.capacity import Capacity
from threefold.engine.dispatch.flight import Flight, begin, end, swap
from threefold.engine.dispatch.narrow import swap_narrow
from threefold.engine.dispatch.protocol import Dispatcher
from threefold.engine.dispatch.rows import Rows, sort_by_expert, sort_kept
from threefold.engine.dispatch.splits import Counts
from threefold.engine.mesh import ALONE, Group


@dataclass
class AllToAllTicket:
    """Filled in phase by phase."""

    rows: Rows
    counts: Counts
    arrival: Arrival | None = None
    there: Flight | None = None
    back: Flight | None = None
    dropped: Tensor | None = None


@dataclass(frozen=True)
class AllToAllDispatcher(Dispatcher[AllToAllTicket]):
    num_experts: int
    ep: Group
    etp: Group = ALONE
    capacity: Capacity | None = None
    narrow: bool = False  # rows travel in FP8
    news: Group | None = None  # `ep` once more for the counts, where rows of another microbatch may be under way

    def preprocess(self, expert_TK: Tensor, weight_TK: Tensor) -> AllToAllTicket:
        return self.ticket(*self.sort(expert_TK, weight_TK))

    def sort(self, expert_TK: Tensor, weight_TK: Tensor) -> tuple[Rows, Tensor]:
        if self.capacity is None:
            return sort_by_expert(expert_TK, self.num_experts)
        return sort_kept(self.capacity.drop(expert_TK, weight_TK), self.num_experts)

    def ticket(self, rows: Rows, count_E: Tensor) -> AllToAllTicket:
        counts = Counts(count_E, rows.row_TK.numel(), self.news or self.ep, self.etp)
        return AllToAllTicket(rows, counts, dropped=rows.dropped)

    def send(self, x_TD: Tensor, weight_TK: Tensor, ticket: AllToAllTicket) -> tuple[Tensor, Tensor]:
        if ticket.rows.padded:
            ticket.rows = ticket.rows.first(sum(ticket.counts.read().to))
        # Before the host waits for the counts: the device has something to do meanwhile.
        rows = ticket.rows.of_tokens(x_TD), ticket.rows.of_copies(weight_TK)
        splits = ticket.counts.read()
        ticket.there = (swap_narrow if self.narrow else swap)(self.ep, splits.to, splits.came)
        x_PD, weight_P = begin(ticket.there, *rows)
        return x_PD, weight_P

    def postprocess(self, x_PD: Tensor, weight_P: Tensor, ticket: AllToAllTicket) -> tuple[Tensor, Tensor, Tensor]:
        x_PD, weight_P = end(ticket.there, x_PD, weight_P)
        count_Be = ticket.counts.count_YXe.view(self.etp.size * self.ep.size, -1)
        ticket.arrival = Arrival(self.etp, ticket.counts.read().slices, count_Be)
        return ticket.arrival.enter(x_PD), ticket.arrival.enter(weight_P), ticket.arrival.count_e

    def combine_preprocess(self, y_RD: Tensor, ticket: AllToAllTicket) -> Tensor:
        assert ticket.arrival is not None
        return ticket.arrival.leave(y_RD)

    def send_back(self, y_PD: Tensor, ticket: AllToAllTicket) -> Tensor:
        splits = ticket.counts.read()
        ticket.back = swap(self.ep, splits.came, splits.to)
        (y_SD,) = begin(ticket.back, y_PD)
        return y_SD

    def combine_postprocess(self, y_SD: Tensor, ticket: AllToAllTicket) -> Tensor:
        (y_SD,) = end(ticket.back, y_SD)
        return ticket.rows.sum_by_token(y_SD)
