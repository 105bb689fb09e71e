"""The Triton kernels of `permute.py`. One program takes one token or one row, and a block of its columns.

Shapes: T tokens, D model dim, K experts of a token, R rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from threefold.engine.kernels.fast_launch import fast_launch
from threefold.engine.kernels.launch_config import cdiv, next_power_of_2

_BLOCK = 2048


def _column_blocks(dim: int) -> tuple[int, int]:
    """-> (columns of a block, number of blocks)."""
    block = min(_BLOCK, next_power_of_2(dim))
    return block, cdiv(dim, block)


def launch_scatter_tokens(x_TD: Tensor, row_TK: Tensor, out_RD: Tensor) -> None:
    block, num_blocks = _column_blocks(x_TD.shape[1])
    _scatter_tokens[(len(row_TK), num_blocks)](x_TD, row_TK, out_RD, x_TD.shape[1], row_TK.shape[1], block)


def launch_gather_rows(x_TD: Tensor, token_R: Tensor, out_RD: Tensor) -> None:
    block, num_blocks = _column_blocks(x_TD.shape[1])
    _gather_rows[(len(token_R), num_blocks)](x_TD, token_R, out_RD, x_TD.shape[1], block)


def launch_sum_rows(y_RD: Tensor, row_TK: Tensor, out_TD: Tensor, padded: bool) -> None:
    block, num_blocks = _column_blocks(y_RD.shape[1])
    _sum_rows[(len(row_TK), num_blocks)](y_RD, row_TK, out_TD, y_RD.shape[1], row_TK.shape[1], block, padded)


@fast_launch
@triton.jit
def _scatter_tokens(x_ptr, row_ptr, out_ptr, D: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < D
    value = tl.load(x_ptr + token * D + n, mask=mask)
    for k in tl.static_range(K):
        row = tl.load(row_ptr + token * K + k).to(tl.int64)
        tl.store(out_ptr + row * D + n, value, mask=mask)


@fast_launch
@triton.jit
def _gather_rows(x_ptr, token_ptr, out_ptr, D: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < D
    token = tl.load(token_ptr + row).to(tl.int64)
    value = tl.load(x_ptr + token * D + n, mask=mask & (token >= 0), other=0.0)
    tl.store(out_ptr + row * D + n, value, mask=mask)


@fast_launch
@triton.jit
def _sum_rows(
    y_ptr, row_ptr, out_ptr, D: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < D
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(K):
        row = tl.load(row_ptr + token * K + k).to(tl.int64)
        read = mask & (row >= 0) if PADDED else mask
        total += tl.load(y_ptr + row * D + n, mask=read, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * D + n, total.to(out_ptr.dtype.element_ty), mask=mask)
