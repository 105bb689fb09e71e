"""The local dispatcher: this rank holds all experts, so token copies are only permuted and nothing travels.

`MoeLayer` has it by default, and `select.py` makes it for a plan.

Shapes: T tokens, D model dim, K experts of a token, R rows, E experts.
"""

from dataclasses import dataclass

from torch import Tensor

from threefold.engine.dispatch.capacity import Capacity
from threefold.engine.dispatch.protocol import Dispatcher
from threefold.engine.dispatch.rows import RowMap, sort_by_expert


@dataclass(frozen=True)
class LocalState:
    """The row order of one microbatch."""

    rows: RowMap
    count_E: Tensor

    @property
    def dropped_TK(self) -> Tensor | None:  # noqa: N802 - a tensor and its shape
        return self.rows.dropped_TK


@dataclass(frozen=True)
class LocalDispatcher(Dispatcher[LocalState]):
    """The dispatcher of a model on one rank, and of every layer with EP 1 and ETP 1."""

    num_experts: int
    capacity_factor: float | None = None  # None: dropless

    def dispatch_preprocess(self, expert_TK: Tensor, weight_TK: Tensor) -> LocalState:
        return self.make_state(*self.sort_rows(expert_TK, weight_TK))

    def sort_rows(self, expert_TK: Tensor, weight_TK: Tensor) -> tuple[RowMap, Tensor]:
        if self.capacity_factor is None:
            return sort_by_expert(expert_TK, self.num_experts)
        return Capacity(self.capacity_factor, self.num_experts).sort_and_pad(expert_TK, weight_TK)

    def make_state(self, rows: RowMap, count_E: Tensor) -> LocalState:
        return LocalState(rows, count_E)

    def token_dispatch(self, x_TD: Tensor, weight_TK: Tensor, state: LocalState) -> tuple[Tensor, Tensor]:
        return state.rows.permute_tokens(x_TD), state.rows.permute_weights(weight_TK)

    def dispatch_postprocess(
        self, x_PD: Tensor, weight_P: Tensor, state: LocalState
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        return x_PD, weight_P, state.count_E, None

    def combine_preprocess(self, y_RD: Tensor, state: LocalState) -> Tensor:
        return y_RD

    def token_combine(self, y_PD: Tensor, state: LocalState) -> Tensor:
        return y_PD

    def combine_postprocess(self, y_SD: Tensor, state: LocalState) -> Tensor:
        return state.rows.unpermute_sum(y_SD)
