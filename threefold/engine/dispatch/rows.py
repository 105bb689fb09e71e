"""Copies of tokens as rows sorted by expert, and summed back.

Shapes: T tokens, D model dim, K experts of a token, R rows, E experts, ... any dims behind.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


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
    flat = expert_TK.flatten()
    # Stable: equal experts keep token order, so dispatch and recompute agree bit for bit.
    slot_R = flat.argsort(stable=True)
    return Rows(slot_R, inverse(slot_R).view_as(expert_TK), padded=False), count(flat, num_experts)


def sort_kept(expert_TK: Tensor, num_experts: int) -> tuple[Rows, Tensor]:
    """The same where -1 is no expert. The rows of those copies come last; how many is known to the counts only."""
    flat = expert_TK.flatten()
    key = flat.masked_fill(flat < 0, num_experts)
    slot_R = key.argsort(stable=True)
    row = inverse(slot_R).masked_fill(flat < 0, -1)
    return Rows(slot_R, row.view_as(expert_TK), padded=True), count(key, num_experts + 1)[:-1]


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
    rows = x[index.clamp(min=0)]
    return rows.masked_fill((index < 0).unsqueeze(-1), 0)


class _Spread(torch.autograd.Function):
    """Each token to its rows. The backward sums by token in a fixed order, where autograd's own would not."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, token_R: Tensor, row_TK: Tensor, padded: bool) -> Tensor:
        ctx.save_for_backward(row_TK)
        ctx.padded = padded
        return _take(x_TD, token_R, padded)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        (row_TK,) = ctx.saved_tensors
        return _take(grad_RD, row_TK, ctx.padded).sum(dim=1), None, None, None


class _Gather(torch.autograd.Function):
    """The rows of each token, summed: the transpose of `_Spread`."""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, token_R: Tensor, row_TK: Tensor, padded: bool) -> Tensor:
        ctx.save_for_backward(token_R)
        ctx.padded = padded
        return _take(y_RD, row_TK, padded).sum(dim=1)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        (token_R,) = ctx.saved_tensors
        return _take(grad_TD, token_R, ctx.padded), None, None, None


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index_R: Tensor, back_R: Tensor) -> Tensor:
        ctx.save_for_backward(back_R)
        return x[index_R]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (back_R,) = ctx.saved_tensors
        return grad[back_R], None, None
