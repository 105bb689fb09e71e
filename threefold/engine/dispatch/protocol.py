"""The token dispatcher protocol: the phases in which tokens travel to the ranks of their experts and back.

This is the contract between a layer of experts (`moe/layer.py`), which does mathematics, and a transport (`local.py`,
`alltoall.py`, `deepep.py`, `hybridep.py`), which moves rows. The phases carry the names of Megatron's token dispatcher.
A layer is cut at the two exchanges, so that a schedule can compute something else while rows travel.

    phase                 takes -> gives                       what it does and what travels
    --------------------  -----------------------------------  ------------------------------------------------------
    dispatch_preprocess   expert_TK, weight_TK -> state        sorts copies by expert; starts the exchange of counts
    token_dispatch        x_TD, weight_TK -> x_PD, weight_P    starts sending rows to the ranks of their experts
    dispatch_postprocess  x_PD, weight_P                       waits for the rows and says how they are sorted by local
                            -> x_RD, weight_R, count_e, order  expert; with ETP, gathers rows over the etp group
    (the experts)         x_RD, weight_R, count_e, order       two grouped GEMMs; nothing travels
                            -> y_RD
    combine_preprocess    y_RD -> y_PD                         with ETP, reduces the partial sums
    token_combine         y_PD -> y_SD                         starts sending rows back to the ranks of their tokens
    combine_postprocess   y_SD -> y_TD                         waits for the rows and sums the K rows of each token

`MoeLayer` calls the phases one after another. `schedule/overlappable_pass.py` calls the same phases, and runs a part of
the other microbatch between `token_dispatch` and `dispatch_postprocess`, and between `token_combine` and
`combine_postprocess`. In the backward the phases run in reverse, and the exchanges of gradients are started and awaited
in the same way (`async_exchange.py`).

Every phase also takes the state of its microbatch (`DispatchState`). A tensor that needs a gradient is an argument or a
result of a phase and never part of the state, so that the autograd graph can be cut between any two phases. The results
of `token_dispatch` and `token_combine` may not have arrived yet: only the next phase may read them.

Shapes: T tokens, D model dim, K experts of a token, P rows as they arrive, R rows of the etp group, S rows as they were
sent, E experts, e experts held here.
"""

from abc import ABC, abstractmethod
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from threefold.engine.dispatch.rows import RowMap
from threefold.engine.kernels.experts.sorted_rows import SortedRows


class DispatchState(Protocol):
    """The bookkeeping of one microbatch's dispatch and combine: row order, counts, exchanges under way."""

    @property
    def dropped_TK(self) -> Tensor | None:  # noqa: N802 - a tensor and its shape
        """The copies of this rank's tokens that no expert takes; None where none can be dropped."""
        ...


class ExpertSlots(Protocol):
    """The places where rows are computed, where hot experts are copied to other ranks (`moe/copies.py`)."""

    @property
    def num_slots(self) -> int:
        """Slots of all ranks."""

    @property
    def num_own(self) -> int:
        """The first slots of this rank, of the experts that it owns."""

    def slots_of(self, expert_TK: Tensor) -> Tensor:
        """The slot for each copy of a token; -1 stays."""

    def start_filling(self) -> None:
        """Start to copy weights, once a step."""


AnyState = TypeVar("AnyState", bound=DispatchState)


class Dispatcher(ABC, Generic[AnyState]):
    """A transport. It is shared by the layers of a model and holds nothing of a microbatch."""

    @abstractmethod
    def dispatch_preprocess(self, expert_TK: Tensor, weight_TK: Tensor) -> AnyState:
        """Sort the token copies by expert, count them, and start the exchange of the counts.

        The weights decide which copies are dropped under a capacity; their gradient is not needed here.
        """

    def sort_rows(self, expert_TK: Tensor, weight_TK: Tensor) -> tuple[RowMap, Tensor] | None:
        """Rows by expert and rows of each expert: the part of `dispatch_preprocess` that a CUDA graph can record.

        It needs neither another rank nor the host. None where the transport has no such part.
        """
        return None

    def make_state(self, rows: RowMap, count_E: Tensor) -> AnyState:
        """The rest of `dispatch_preprocess`, given the result of `sort_rows`."""
        raise NotImplementedError

    @abstractmethod
    def token_dispatch(self, x_TD: Tensor, weight_TK: Tensor, state: AnyState) -> tuple[Tensor, Tensor]:
        """Start sending every token and its router weights to the ranks of its experts."""

    @abstractmethod
    def dispatch_postprocess(
        self, x_PD: Tensor, weight_P: Tensor, state: AnyState
    ) -> tuple[Tensor, Tensor, Tensor, SortedRows | None]:
        """Wait for the rows; give them with their weights, the number of rows of each expert, and their order by
        expert. The order is None where they are sorted already."""

    @abstractmethod
    def combine_preprocess(self, y_RD: Tensor, state: AnyState) -> Tensor:
        """Make the experts' output rows what is sent back, one for each row that arrived."""

    @abstractmethod
    def token_combine(self, y_PD: Tensor, state: AnyState) -> Tensor:
        """Start sending the output rows back to the ranks of their tokens."""

    @abstractmethod
    def combine_postprocess(self, y_SD: Tensor, state: AnyState) -> Tensor:
        """Wait for the output rows and sum those of each token."""

    def dispatch(
        self, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, SortedRows | None, AnyState]:
        """The three dispatch phases in a row: rows, the weight of each, rows of each local expert, order, state."""
        state = self.dispatch_preprocess(expert_TK, weight_TK)
        x_PD, weight_P = self.token_dispatch(x_TD, weight_TK, state)
        return *self.dispatch_postprocess(x_PD, weight_P, state), state

    def combine(self, y_RD: Tensor, state: AnyState) -> Tensor:
        """The three combine phases in a row. They only sum: the experts have multiplied by `weight_R`."""
        y_PD = self.combine_preprocess(y_RD, state)
        return self.combine_postprocess(self.token_combine(y_PD, state), state)


AnyDispatcher = Dispatcher[Any]
