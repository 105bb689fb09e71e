"""The way of a token's copies to their experts and back, in phases that a schedule can place apart.

    ticket = preprocess(expert_TK, weight_TK)              order and counts; starts the exchange of counts
    x_PD, weight_P = send(x_TD, weight_TK, ticket)         starts the exchange of rows
    x_RD, weight_R, count_e = postprocess(x_PD, weight_P, ticket)
    y_PD = combine_preprocess(y_RD, ticket)
    y_SD = send_back(y_PD, ticket)                         starts the exchange home
    y_TD = combine_postprocess(y_SD, ticket)

What needs a gradient is an argument or a result of a phase, never in the ticket; so graphs can be cut between phases.
The results of `send` and `send_back` may not have arrived: only the next phase looks into them.

Shapes: T tokens, D model dim, K experts of a token, P rows as they arrive, R rows by local expert, S rows as they were
sent, e experts held here.
"""

from abc import ABC, abstractmethod
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from threefold.engine.dispatch.rows import Rows


class Ticket(Protocol):
    """The way there and back of one microbatch."""

    @property
    def dropped(self) -> Tensor | None:
        """Copies of this rank's tokens that no expert takes; None where none can be dropped."""
        ...


AnyTicket = TypeVar("AnyTicket", bound=Ticket)


class Dispatcher(ABC, Generic[AnyTicket]):
    @abstractmethod
    def preprocess(self, expert_TK: Tensor, weight_TK: Tensor) -> AnyTicket:
        """Of the weights only the values matter: which copies are dropped."""

    def sort(self, expert_TK: Tensor, weight_TK: Tensor) -> tuple[Rows, Tensor] | None:
        """The part of `preprocess` that needs no other rank and no host: rows and counts; None where there is none."""
        return None

    def ticket(self, rows: Rows, count_E: Tensor) -> AnyTicket:
        """The rest of it."""
        raise NotImplementedError

    @abstractmethod
    def send(self, x_TD: Tensor, weight_TK: Tensor, ticket: AnyTicket) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def postprocess(self, x_PD: Tensor, weight_P: Tensor, ticket: AnyTicket) -> tuple[Tensor, Tensor, Tensor]: ...

    @abstractmethod
    def combine_preprocess(self, y_RD: Tensor, ticket: AnyTicket) -> Tensor: ...

    @abstractmethod
    def send_back(self, y_PD: Tensor, ticket: AnyTicket) -> Tensor: ...

    @abstractmethod
    def combine_postprocess(self, y_SD: Tensor, ticket: AnyTicket) -> Tensor: ...

    def dispatch(self, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> tuple[Tensor, Tensor, Tensor, AnyTicket]:
        """All the way there: rows by expert, the weight of each, and how many each expert held here has."""
        ticket = self.preprocess(expert_TK, weight_TK)
        x_PD, weight_P = self.send(x_TD, weight_TK, ticket)
        return *self.postprocess(x_PD, weight_P, ticket), ticket

    def combine(self, y_RD: Tensor, ticket: AnyTicket) -> Tensor:
        """All the way back. It only sums: the experts have multiplied by `weight_R`."""
        y_PD = self.combine_preprocess(y_RD, ticket)
        return self.combine_postprocess(self.send_back(y_PD, ticket), ticket)


AnyDispatcher = Dispatcher[Any]
