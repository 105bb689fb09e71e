"""Expert capacity (`job.capacity_factor`): an expert takes a limited number of token copies, those of largest weight.

On one rank every expert gets exactly its capacity of rows, filled up with padding (drop and pad). Where the tokens of a
microbatch are spread over ranks, every rank gathers all choices, comes to the same decision, and sends only the copies
that are not dropped. The dispatchers call this in `dispatch_preprocess`.

Shapes: T tokens of this rank, N tokens of the microbatch, K experts of a token, R rows, E experts.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from threefold.engine.dispatch.rows import RowMap, count_per_expert
from threefold.engine.dist.collectives import all_gather
from threefold.engine.dist.mesh import TRIVIAL_GROUP, Group

# Number of tokens -> the index in the microbatch of each token gathered as [rank][sequence][token]. Ties between equal
# weights go to the earlier token of the microbatch.
TokenOrder = Callable[[int], Tensor]


@dataclass
class Capacity:
    """The capacity of the experts of a layer."""

    factor: float
    num_experts: int
    token_group: Group = TRIVIAL_GROUP  # the ranks over which the tokens of a microbatch are spread
    order: TokenOrder | None = None  # None: the gathered tokens lie in the order of the microbatch

    def rows_per_expert(self, num_tokens: int, top_k: int) -> int:
        """The capacity of one expert when each token is copied to `top_k` different experts.

        An expert gets at most one copy of every token, so that a larger capacity would be padding alone.
        """
        return min(num_tokens, max(1, math.ceil(num_tokens * top_k / self.num_experts * self.factor)))

    def sort_and_pad(self, expert_TK: Tensor, weight_TK: Tensor) -> tuple[RowMap, Tensor]:
        """Rows by expert, padded to the capacity, and rows of each expert, on one rank with all tokens."""
        return drop_and_pad(expert_TK, weight_TK, self.num_experts, self.rows_per_expert(*expert_TK.shape))

    @torch.no_grad()
    def mark_dropped(self, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
        """The experts of this rank's tokens, -1 where a copy is dropped: the same decision as on one rank."""
        expert_NK, weight_NK = self._gather_over_ranks(expert_TK), self._gather_over_ranks(weight_TK)
        if self.order is None:
            rows, _ = self.sort_and_pad(expert_NK, weight_NK)
            row_NK = rows.row_TK
        else:
            position_N = self.order(len(expert_NK)).to(expert_NK.device)
            order_N = position_N.argsort()
            rows, _ = self.sort_and_pad(expert_NK[order_N], weight_NK[order_N])
            row_NK = rows.row_TK[position_N]
        start = self.token_group.rank * len(expert_TK)
        return expert_TK.masked_fill(row_NK[start : start + len(expert_TK)] < 0, -1)

    def _gather_over_ranks(self, x_TK: Tensor) -> Tensor:
        whole_NK = x_TK.new_empty(self.token_group.size * len(x_TK), x_TK.shape[1])
        all_gather(whole_NK, x_TK.detach(), self.token_group).wait()
        return whole_NK


def order_by_position(position_XS: Tensor) -> TokenOrder:
    """The token order where each rank X holds the tokens at these positions of every sequence."""

    def order(num_tokens: int) -> Tensor:
        starts_B = torch.arange(0, num_tokens, position_XS.numel())
        return (position_XS[:, None, :] + starts_B[None, :, None]).flatten()

    return order


def drop_and_pad(expert_TK: Tensor, weight_TK: Tensor, num_experts: int, capacity: int) -> tuple[RowMap, Tensor]:
    """Exactly `capacity` rows per expert: its tokens of largest weight (the earlier of equals), then padding."""
    expert_X, device = expert_TK.flatten(), expert_TK.device
    heaviest = weight_TK.detach().flatten().argsort(descending=True, stable=True)
    order = heaviest[expert_X[heaviest].argsort(stable=True)]
    count_E = count_per_expert(expert_X, num_experts)
    first_E = count_E.cumsum(0) - count_E
    rank = torch.arange(len(order), device=device) - first_E[expert_X[order]]
    row = torch.where(rank < capacity, expert_X[order] * capacity + rank, -1)
    row_TK = torch.empty_like(row).scatter_(0, order, row).view_as(expert_TK)
    # The buffer has one element more than rows: dropped copies are written there and cut off.
    slot_R = torch.full((num_experts * capacity + 1,), -1, device=device)
    slot_R = slot_R.scatter_(0, torch.where(row < 0, len(slot_R) - 1, row), order)[:-1]
    return RowMap(slot_R, row_TK, padded=True), torch.full_like(count_E, capacity)
