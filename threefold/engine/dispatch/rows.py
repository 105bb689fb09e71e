"""Permutes tokens into rows sorted by expert, and sums the rows back by token (Megatron's permute and unpermute).

A token that visits K experts has K copies, and each copy becomes one row. `RowMap` is the permutation; the dispatchers
and `received_rows.py` use it. Example: two tokens with experts [[1, 0], [0, 2]] become four rows for the experts
0, 0, 1, 2: slot_R = [1, 2, 0, 3] and row_TK = [[2, 0], [1, 3]].

Shapes: T tokens, D model dim, K experts of a token, R rows, E experts, ... any dims behind.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from threefold.engine.device import is_simulated
from threefold.engine.kernels.availability import runs_fused, runs_fused_on
from threefold.engine.kernels.elementwise.permute import permute_tokens, unpermute_sum

_MIN_FUSED_WIDTH = 64  # numbers in a row; narrower rows are not worth the fused kernel


@dataclass(frozen=True)
class RowMap:
    """Which copy of which token each row is, and the inverse."""

    slot_R: Tensor  # the copy t * K + k of each row; -1: the row is padding
    row_TK: Tensor  # the row of each copy; -1: the copy is dropped
    padded: bool  # whether there may be padding or dropped copies

    @property
    def dropped_TK(self) -> Tensor | None:  # noqa: N802 - a tensor and its shape
        return self.row_TK < 0 if self.padded else None

    def truncate(self, num_rows: int) -> "RowMap":
        """The first `num_rows` rows. The rows behind them must belong to no copy."""
        return replace(self, slot_R=self.slot_R[:num_rows])

    def permute_tokens(self, x_TD: Tensor) -> Tensor:
        """The row of each copy: its token."""
        return _Permute.apply(x_TD, self.token_R, self.row_TK, self.padded)

    def permute_weights(self, weight_TK: Tensor) -> Tensor:
        """The router weight of each row."""
        rows = _Permute.apply(weight_TK.reshape(-1, 1), self.slot_R, self.row_TK.reshape(-1, 1), self.padded)
        return rows[:, 0]

    def sum_rows(self, y_RD: Tensor) -> Tensor:
        """The sum of the rows of each token, without a gradient."""
        return _sum_rows(y_RD, self.row_TK, self.padded)

    def unpermute_sum(self, y_RD: Tensor) -> Tensor:
        """The sum of the rows of each token."""
        return _UnpermuteSum.apply(y_RD, self.token_R, self.row_TK, self.padded)

    @property
    def token_R(self) -> Tensor:  # noqa: N802 - a tensor and its shape
        """The token of each row."""
        return self.slot_R.div(self.row_TK.shape[1], rounding_mode="floor")


def sort_by_expert(expert_TK: Tensor, num_experts: int) -> tuple[RowMap, Tensor]:
    """Rows by expert, and the number of rows of each expert."""
    slot_R, row_TK, count_E = _sort(expert_TK, num_experts)
    return RowMap(slot_R, row_TK, padded=False), count_E


def sort_with_drops(expert_TK: Tensor, num_experts: int) -> tuple[RowMap, Tensor]:
    """`sort_by_expert` where expert -1 marks a dropped copy.

    The rows of dropped copies come last. Their number is on the device only, so the caller truncates the map once the
    host knows the counts.
    """
    dropped_TK = expert_TK < 0
    slot_R, row_TK, count_E = _sort(expert_TK.masked_fill(dropped_TK, num_experts), num_experts + 1)
    return RowMap(slot_R, row_TK.masked_fill(dropped_TK, -1), padded=True), count_E[:-1]


def _sort(expert_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(slot_R, row_TK, count_E). The sort is stable, so that dispatch and recompute agree to the bit."""
    if expert_TK.numel() and not is_simulated() and runs_fused_on(expert_TK.device):
        from threefold.engine.kernels.experts.counting_sort import counting_sort

        rows = counting_sort(expert_TK, num_experts)
        count_E = torch.diff(rows.ends_E, prepend=rows.ends_E.new_zeros(1))
        return rows.slot_R.long(), rows.row_TK.long(), count_E.long()
    flat = expert_TK.flatten()
    slot_R = flat.argsort(stable=True)
    return slot_R, inverse_permutation(slot_R).view_as(expert_TK), count_per_expert(flat, num_experts)


def count_per_expert(expert_R: Tensor, num_experts: int) -> Tensor:
    """The number of rows of each expert. Unlike `bincount` it does not wait for the device."""
    zeros_E = torch.zeros(num_experts, dtype=torch.long, device=expert_R.device)
    return zeros_E.scatter_add_(0, expert_R, torch.ones_like(expert_R))


def inverse_permutation(index_R: Tensor) -> Tensor:
    return torch.empty_like(index_R).scatter_(0, index_R, torch.arange(len(index_R), device=index_R.device))


def permute_rows(x: Tensor, index_R: Tensor, inverse_R: Tensor) -> Tensor:
    """Rows in the order `index_R`. The backward gathers by the inverse, where autograd's own would scatter and add."""
    return _PermuteRows.apply(x, index_R, inverse_R)


def _gather_rows(x: Tensor, index: Tensor, padded: bool) -> Tensor:
    """Rows by index; zeros where the index is -1."""
    if not padded:
        return x[index]
    if not len(x):
        return x.new_zeros(*index.shape, *x.shape[1:])
    return x[index.clamp(min=0)].masked_fill_((index < 0).unsqueeze(-1), 0)


def _permute(x_TD: Tensor, token_R: Tensor, row_TK: Tensor, padded: bool) -> Tensor:
    if x_TD.dim() == 2 and x_TD.shape[1] >= _MIN_FUSED_WIDTH and len(token_R) and runs_fused(x_TD):
        return permute_tokens(x_TD, token_R, row_TK, padded)
    return _gather_rows(x_TD, token_R, padded)


def _sum_rows(y_RD: Tensor, row_TK: Tensor, padded: bool) -> Tensor:
    if y_RD.dim() == 2 and y_RD.shape[1] >= _MIN_FUSED_WIDTH and row_TK.numel() and runs_fused(y_RD):
        return unpermute_sum(y_RD, row_TK, padded)
    return _gather_rows(y_RD, row_TK, padded).sum(dim=1)


class _Permute(torch.autograd.Function):
    """Tokens to rows. The backward sums by token in a fixed order, where autograd's own would not."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, token_R: Tensor, row_TK: Tensor, padded: bool) -> Tensor:
        ctx.save_for_backward(row_TK)
        ctx.padded = padded
        return _permute(x_TD, token_R, row_TK, padded)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        (row_TK,) = ctx.saved_tensors
        return _sum_rows(grad_RD, row_TK, ctx.padded), None, None, None


class _UnpermuteSum(torch.autograd.Function):
    """Rows summed by token: the transpose of `_Permute`."""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, token_R: Tensor, row_TK: Tensor, padded: bool) -> Tensor:
        ctx.save_for_backward(token_R, row_TK)
        ctx.padded = padded
        return _sum_rows(y_RD, row_TK, padded)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        token_R, row_TK = ctx.saved_tensors
        return _permute(grad_TD, token_R, row_TK, ctx.padded), None, None, None


class _PermuteRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index_R: Tensor, inverse_R: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_R)
        return x[index_R]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse_R,) = ctx.saved_tensors
        return grad[inverse_R], None, None
