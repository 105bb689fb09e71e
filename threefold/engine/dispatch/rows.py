"""Copies of tokens as rows sorted by expert, and summed back.

Shapes: T tokens, D model dim, K experts of a token, R rows, E experts, ... any dims behind.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from threefold.engine.kernels.around import fused, fused_on
from threefold.engine.kernels.permute import spread_rows, sum_by_token
from threefold.engine.ways import stood_for

_LEAST_WIDTH = 64  # of a row that is worth a pass of ours


@dataclass(frozen=True)
class Rows:
    """-1 where a row is padding, and where a copy of a token was dropped; `padded` says that there may be such."""

    slot_R: Tensor  # t * K + k that each row came from
    row_TK: Tensor  # row that each copy of a token went to
    padded: bool

    @property
    def dropped(self) -> Tensor | None:
        return (self.row_TK < 0).sum() if self.padded else None

    def first(self, num_rows: int) -> "Rows":
        """Without the rows behind, which no copy went to."""
        return replace(self, slot_R=self.slot_R[:num_rows])

    def of_tokens(self, x_TD: Tensor) -> Tensor:
        return _Spread.apply(x_TD, self._tokens, self.row_TK, self.padded)

    def of_copies(self, weight_TK: Tensor) -> Tensor:
        rows = _Spread.apply(weight_TK.reshape(-1, 1), self.slot_R, self.row_TK.reshape(-1, 1), self.padded)
        return rows[:, 0]

    def sum_by_token(self, y_RD: Tensor) -> Tensor:
        return _Gather.apply(y_RD, self._tokens, self.row_TK, self.padded)

    @property
    def _tokens(self) -> Tensor:
        """That each row came from."""
        return self.slot_R.div(self.row_TK.shape[1], rounding_mode="floor")


def sort_by_expert(expert_TK: Tensor, num_experts: int) -> tuple[Rows, Tensor]:
    slot_R, row_TK, count_E = _sorted(expert_TK, num_experts)
    return Rows(slot_R, row_TK, padded=False), count_E


def sort_kept(expert_TK: Tensor, num_experts: int) -> tuple[Rows, Tensor]:
    """The same where -1 is no expert. The rows of those copies come last; how many is known to the counts only."""
    dropped_TK = expert_TK < 0
    slot_R, row_TK, count_E = _sorted(expert_TK.masked_fill(dropped_TK, num_experts), num_experts + 1)
    return Rows(slot_R, row_TK.masked_fill(dropped_TK, -1), padded=True), count_E[:-1]


def _sorted(expert_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """-> (slot_R, row_TK, count_E). Stable: equal experts keep token order, so dispatch and recompute agree bit for
    bit."""
    if expert_TK.numel() and not stood_for() and fused_on(expert_TK.device):
        from threefold.engine.kernels.counting import counting_sort

        rows = counting_sort(expert_TK, num_experts)
        count_E = torch.diff(rows.ends_E, prepend=rows.ends_E.new_zeros(1))
        return rows.slot_R.long(), rows.row_TK.long(), count_E.long()
    flat = expert_TK.flatten()
    slot_R = flat.argsort(stable=True)
    return slot_R, inverse(slot_R).view_as(expert_TK), count(flat, num_experts)


def count(expert_R: Tensor, num_experts: int) -> Tensor:
    """How many rows each expert gets; no wait for the device, unlike bincount."""
    zeros_E = torch.zeros(num_experts, dtype=torch.long, device=expert_R.device)
    return zeros_E.scatter_add_(0, expert_R, torch.ones_like(expert_R))


def inverse(index_R: Tensor) -> Tensor:
    return torch.empty_like(index_R).scatter_(0, index_R, torch.arange(len(index_R), device=index_R.device))


def reorder(x: Tensor, index_R: Tensor, back_R: Tensor) -> Tensor:
    """Rows in another order; the backward takes `back_R`, the inverse, where autograd's own would add."""
    return _Reorder.apply(x, index_R, back_R)


def _take(x: Tensor, index: Tensor, padded: bool) -> Tensor:
    """Rows by index, zeros for -1."""
    if not padded:
        return x[index]
    if not len(x):
        return x.new_zeros(*index.shape, *x.shape[1:])
    return x[index.clamp(min=0)].masked_fill_((index < 0).unsqueeze(-1), 0)


def _spread(x_TD: Tensor, token_R: Tensor, row_TK: Tensor, padded: bool) -> Tensor:
    if x_TD.dim() == 2 and x_TD.shape[1] >= _LEAST_WIDTH and len(token_R) and fused(x_TD):
        return spread_rows(x_TD, token_R, row_TK, padded)
    return _take(x_TD, token_R, padded)


def _sum(y_RD: Tensor, row_TK: Tensor, padded: bool) -> Tensor:
    if y_RD.dim() == 2 and y_RD.shape[1] >= _LEAST_WIDTH and row_TK.numel() and fused(y_RD):
        return sum_by_token(y_RD, row_TK, padded)
    return _take(y_RD, row_TK, padded).sum(dim=1)


class _Spread(torch.autograd.Function):
    """Each token to its rows. The backward sums by token in a fixed order, where autograd's own would not."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, token_R: Tensor, row_TK: Tensor, padded: bool) -> Tensor:
        ctx.save_for_backward(row_TK)
        ctx.padded = padded
        return _spread(x_TD, token_R, row_TK, padded)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        (row_TK,) = ctx.saved_tensors
        return _sum(grad_RD, row_TK, ctx.padded), None, None, None


class _Gather(torch.autograd.Function):
    """The rows of each token, summed: the transpose of `_Spread`."""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, token_R: Tensor, row_TK: Tensor, padded: bool) -> Tensor:
        ctx.save_for_backward(token_R, row_TK)
        ctx.padded = padded
        return _sum(y_RD, row_TK, padded)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        token_R, row_TK = ctx.saved_tensors
        return _spread(grad_TD, token_R, row_TK, ctx.padded), None, None, None


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index_R: Tensor, back_R: Tensor) -> Tensor:
        ctx.save_for_backward(back_R)
        return x[index_R]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (back_R,) = ctx.saved_tensors
        return grad[back_R], None, None
