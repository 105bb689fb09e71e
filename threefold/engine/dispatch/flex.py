"""What the dispatchers of foreign packages share: they bring rows by expert to this rank; ETP and capacity are ours.

Shapes: T tokens, K experts of a token, P rows that came, R rows by local expert, e experts held here, D model dim.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from threefold.engine.dispatch.arrival import Arrival
from threefold.engine.dispatch.capacity import Capacity
from threefold.engine.dispatch.flight import Flight, begin, end
from threefold.engine.dispatch.protocol import Dispatcher
from threefold.engine.dispatch.splits import host_sizes
from threefold.engine.mesh import Group
from threefold.engine.shard.collectives import all_gather


@dataclass
class FlexTicket:
    """Filled in phase by phase. The package's `handle` knows the way of the rows."""

    expert_TK: Tensor  # -1: dropped
    dropped: Tensor | None
    handle: Any = None
    came: Any = None
    there: Flight | None = None
    back: Flight | None = None
    arrival: Arrival | None = None


class FlexDispatcher(Dispatcher[FlexTicket]):
    def __init__(self, num_experts: int, ep: Group, etp: Group, capacity: Capacity | None) -> None:
        self.num_experts, self.ep, self.etp, self.capacity = num_experts, ep, etp, capacity

    def preprocess(self, expert_TK: Tensor, weight_TK: Tensor) -> FlexTicket:
        if self.capacity is None:
            return FlexTicket(expert_TK, None)
        kept_TK = self.capacity.drop(expert_TK, weight_TK)
        return FlexTicket(kept_TK, (kept_TK < 0).sum())

    @abstractmethod
    def unpack(self, x: Tensor, weight: Tensor, ticket: FlexTicket) -> tuple[Tensor, Tensor, Tensor]:
        """What came, as rows by local expert, their weights and counts."""

    def postprocess(self, x_PD: Tensor, weight_P: Tensor, ticket: FlexTicket) -> tuple[Tensor, Tensor, Tensor]:
        x_PD, weight_P = end(ticket.there, x_PD, weight_P)
        x_PD, weight_P, count_e = self.unpack(x_PD, weight_P, ticket)
        if self.etp.alone:
            return x_PD, weight_P, count_e
        count_Ye = count_e.new_empty(self.etp.size, len(count_e))
        all_gather(count_Ye.flatten(), count_e, self.etp).wait()
        ticket.arrival = Arrival(self.etp, host_sizes(count_Ye.sum(dim=1), self.etp.size * len(x_PD)), count_Ye)
        return ticket.arrival.enter(x_PD), ticket.arrival.enter(weight_P), ticket.arrival.count_e

    @abstractmethod
    def pack(self, y_PD: Tensor, ticket: FlexTicket) -> Tensor:
        """The inverse of `unpack`."""

    def combine_preprocess(self, y_RD: Tensor, ticket: FlexTicket) -> Tensor:
        return self.pack(y_RD if ticket.arrival is None else ticket.arrival.leave(y_RD), ticket)

    @abstractmethod
    def way_back(self, ticket: FlexTicket) -> Flight: ...

    def send_back(self, y_PD: Tensor, ticket: FlexTicket) -> Tensor:
        ticket.back = self.way_back(ticket)
        (y_TD,) = begin(ticket.back, y_PD)
        return y_TD

    def combine_postprocess(self, y_SD: Tensor, ticket: FlexTicket) -> Tensor:
        (y_TD,) = end(ticket.back, y_SD)
        return y_TD


def narrow(weight: Tensor) -> Tensor:
    """The packages carry weights in fp32 only; the router's are."""
    return weight.to(torch.float32)
