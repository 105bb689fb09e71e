"""The base class of the dispatchers that use a package for the exchange (DeepEP, HybridEP; Megatron calls them flex).

The package brings rows to the ranks of their experts and sums them on the way back. Capacity and expert tensor
parallelism are not in the packages and are done here.

Shapes: T tokens, K experts of a token, P rows received, R rows by local expert, Y ranks of etp, e experts held here,
D model dim.
"""

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from threefold.engine.dispatch.async_exchange import AsyncExchange, finish_exchange, start_exchange
from threefold.engine.dispatch.capacity import Capacity
from threefold.engine.dispatch.protocol import Dispatcher
from threefold.engine.dispatch.received_rows import ReceivedRows
from threefold.engine.dist.collectives import all_gather
from threefold.engine.dist.host_sizes import host_sizes
from threefold.engine.dist.mesh import Group
from threefold.engine.kernels.experts.sorted_rows import SortedRows
from threefold.engine.sum_dtype import fp32_or_wider


@dataclass
class Arrival:
    """What the package told of the rows that arrived.

    The functions of an exchange hold this and not the state. The state holds the exchange, and a cycle would keep the
    tensors of both until Python's garbage collector runs.
    """

    handle: Any = None  # the package's own record of which row went where
    received: Any = None  # what the subclass needs to know of the rows received


@dataclass
class FlexState:
    """The state of one microbatch's dispatch; the phases fill it in one after another."""

    expert_TK: Tensor  # -1: this copy of the token is dropped
    may_drop: bool
    arrival: Arrival = field(default_factory=Arrival)
    sorted_rows: Any = None  # how the subclass sorted the rows by local expert, if it did
    dispatch_exchange: AsyncExchange | None = None
    combine_exchange: AsyncExchange | None = None
    received_rows: ReceivedRows | None = None  # with ETP: rows of the other slices

    @property
    def dropped_TK(self) -> Tensor | None:  # noqa: N802 - a tensor and its shape
        return self.expert_TK < 0 if self.may_drop else None


class FlexDispatcher(Dispatcher[FlexState]):
    """A subclass sends the rows (`token_dispatch`, `make_combine_exchange`) and permutes what it received."""

    def __init__(self, num_experts: int, ep: Group, etp: Group, capacity: Capacity | None) -> None:
        self.num_experts, self.ep, self.etp, self.capacity = num_experts, ep, etp, capacity
        self.num_dispatches = 0  # for the oracle: no observer of collectives sees the package's exchanges

    def dispatch_preprocess(self, expert_TK: Tensor, weight_TK: Tensor) -> FlexState:
        if self.capacity is None:
            return FlexState(expert_TK, False)
        kept_TK = self.capacity.mark_dropped(expert_TK, weight_TK)
        return FlexState(kept_TK, True)

    @abstractmethod
    def permute(self, x: Tensor, weight: Tensor, state: FlexState) -> tuple[Tensor, Tensor, Tensor]:
        """The received rows by local expert, their weights, and the number of rows of each expert."""

    def dispatch_postprocess(
        self, x_PD: Tensor, weight_P: Tensor, state: FlexState
    ) -> tuple[Tensor, Tensor, Tensor, SortedRows | None]:
        x_PD, weight_P = finish_exchange(state.dispatch_exchange, x_PD, weight_P)
        self.num_dispatches += 1
        x_PD, weight_P, count_e = self.permute(x_PD, weight_P, state)
        if self.etp.is_trivial:
            return x_PD, weight_P, count_e, None
        count_Ye = count_e.new_empty(self.etp.size, len(count_e))
        all_gather(count_Ye.flatten(), count_e, self.etp).wait()
        state.received_rows = ReceivedRows(
            self.etp, host_sizes(count_Ye.sum(dim=1), self.etp.size * len(x_PD)), count_Ye
        )
        received = state.received_rows
        return received.gather(x_PD), received.gather(weight_P), received.count_e, received.order

    @abstractmethod
    def unpermute(self, y_PD: Tensor, state: FlexState) -> Tensor:
        """The inverse of `permute` for the experts' output."""

    def combine_preprocess(self, y_RD: Tensor, state: FlexState) -> Tensor:
        return self.unpermute(y_RD if state.received_rows is None else state.received_rows.reduce(y_RD), state)

    @abstractmethod
    def make_combine_exchange(self, state: FlexState) -> AsyncExchange:
        """The exchange that carries output rows back to their tokens."""

    def token_combine(self, y_PD: Tensor, state: FlexState) -> Tensor:
        state.combine_exchange = self.make_combine_exchange(state)
        (y_TD,) = start_exchange(state.combine_exchange, y_PD)
        return y_TD

    def combine_postprocess(self, y_SD: Tensor, state: FlexState) -> Tensor:
        (y_TD,) = finish_exchange(state.combine_exchange, y_SD)
        return y_TD


def to_fp32(weight: Tensor) -> Tensor:
    """Router weights in fp32, the only dtype in which the packages carry them; in fp64 for a model in fp64, which the
    oracle compares over a stand-in of the packages."""
    return weight.to(fp32_or_wider(weight.dtype))
