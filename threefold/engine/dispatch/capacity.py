"""Capacity: an expert takes no more than its share of a microbatch, the heaviest copies of tokens first.

On one rank every expert gets exactly its capacity, filled up with padding. Where the tokens of a microbatch are spread
over ranks, the ranks look at all of them, decide alike, and send only what is kept.

Shapes: T tokens of this rank, N tokens of the microbatch, K experts of a token, R rows, E experts.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from threefold.engine.dispatch.rows import Rows, count
from threefold.engine.mesh import ALONE, Group
from threefold.engine.shard.collectives import all_gather

# Number of tokens -> the natural place of each token that lies as [rank][sequence][token]: the earlier of equals wins.
Order = Callable[[int], Tensor]


@dataclass
class Capacity:
    """`tokens`: the ranks that share a microbatch. `order`: None where their tokens lie in natural order."""

    factor: float
    num_experts: int
    tokens: Group = ALONE
    order: Order | None = None

    def of(self, num_copies: int) -> int:
        """Rows of one expert for so many copies of tokens."""
        return max(1, math.ceil(num_copies / self.num_experts * self.factor))

    def fill(self, expert_TK: Tensor, weight_TK: Tensor) -> tuple[Rows, Tensor]:
        return drop_and_pad(expert_TK, weight_TK, self.num_experts, self.of(expert_TK.numel()))

    @torch.no_grad()
    def drop(self, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
        """The experts of this rank's tokens, -1 where a copy is dropped: as one rank with all tokens would."""
        expert_NK, weight_NK = self._whole(expert_TK), self._whole(weight_TK)
        if self.order is None:
            rows, _ = self.fill(expert_NK, weight_NK)
            row_NK = rows.row_TK
        else:
            place_N = self.order(len(expert_NK)).to(expert_NK.device)
            first_N = place_N.argsort()
            rows, _ = self.fill(expert_NK[first_N], weight_NK[first_N])
            row_NK = rows.row_TK[place_N]
        start = self.tokens.rank * len(expert_TK)
        return expert_TK.masked_fill(row_NK[start : start + len(expert_TK)] < 0, -1)

    def _whole(self, x_TK: Tensor) -> Tensor:
        whole_NK = x_TK.new_empty(self.tokens.size * len(x_TK), x_TK.shape[1])
        all_gather(whole_NK, x_TK.detach(), self.tokens).wait()
        return whole_NK


def by_position(position_XS: Tensor) -> Order:
    """The order of ranks X that hold the tokens at these positions of every sequence."""

    def order(num_tokens: int) -> Tensor:
        starts_B = torch.arange(0, num_tokens, position_XS.numel())
        return (position_XS[:, None, :] + starts_B[None, :, None]).flatten()

    return order


def drop_and_pad(expert_TK: Tensor, weight_TK: Tensor, num_experts: int, capacity: int) -> tuple[Rows, Tensor]:
    """Exactly `capacity` rows an expert: its heaviest tokens (the earlier of equals), then padding."""
    flat, device = expert_TK.flatten(), expert_TK.device
    heaviest = weight_TK.detach().flatten().argsort(descending=True, stable=True)
    order = heaviest[flat[heaviest].argsort(stable=True)]
    count_E = count(flat, num_experts)
    first_E = count_E.cumsum(0) - count_E
    rank = torch.arange(len(order), device=device) - first_E[flat[order]]
    row = torch.where(rank < capacity, flat[order] * capacity + rank, -1)
    row_TK = torch.empty_like(row).scatter_(0, order, row).view_as(expert_TK)
    # One place more than rows: where what was dropped is written and forgotten.
    slot_R = torch.full((num_experts * capacity + 1,), -1, device=device)
    slot_R = slot_R.scatter_(0, torch.where(row < 0, len(slot_R) - 1, row), order)[:-1]
    return Rows(slot_R, row_TK, padded=True), torch.full_like(count_E, capacity)
