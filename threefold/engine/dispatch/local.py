"""Dispatch on one rank, which holds all experts: nothing travels.

Shapes: T tokens, D model dim, K experts of a token, R rows, E experts.
"""

from dataclasses import dataclass

from torch import Tensor

from threefold.engine.dispatch.capacity import Capacity
from threefold.engine.dispatch.protocol import Dispatcher
from threefold.engine.dispatch.rows import Rows, sort_by_expert


@dataclass(frozen=True)
class LocalTicket:
    rows: Rows
    count_E: Tensor

    @property
    def dropped(self) -> Tensor | None:
        return self.rows.dropped


@dataclass(frozen=True)
class LocalDispatcher(Dispatcher[LocalTicket]):
    num_experts: int
    capacity_factor: float | None = None  # None: dropless

    def preprocess(self, expert_TK: Tensor, weight_TK: Tensor) -> LocalTicket:
        return self.ticket(*self.sort(expert_TK, weight_TK))

    def sort(self, expert_TK: Tensor, weight_TK: Tensor) -> tuple[Rows, Tensor]:
        if self.capacity_factor is None:
            return sort_by_expert(expert_TK, self.num_experts)
        return Capacity(self.capacity_factor, self.num_experts).fill(expert_TK, weight_TK)

    def ticket(self, rows: Rows, count_E: Tensor) -> LocalTicket:
        return LocalTicket(rows, count_E)

    def send(self, x_TD: Tensor, weight_TK: Tensor, ticket: LocalTicket) -> tuple[Tensor, Tensor]:
        return ticket.rows.of_tokens(x_TD), ticket.rows.of_copies(weight_TK)

    def postprocess(self, x_PD: Tensor, weight_P: Tensor, ticket: LocalTicket) -> tuple[Tensor, Tensor, Tensor]:
        return x_PD, weight_P, ticket.count_E

    def combine_preprocess(self, y_RD: Tensor, ticket: LocalTicket) -> Tensor:
        return y_RD

    def send_back(self, y_PD: Tensor, ticket: LocalTicket) -> Tensor:
        return y_PD

    def combine_postprocess(self, y_SD: Tensor, ticket: LocalTicket) -> Tensor:
        return ticket.rows.sum_by_token(y_SD)
