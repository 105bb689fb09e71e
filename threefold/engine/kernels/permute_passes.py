"""The passes of `permute.py`: a program a token, or a row, and some of its columns.

Shapes: T tokens, D model dim, K experts of a token, R rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

_BLOCK = 2048


def _tiles(dim: int) -> tuple[int, int]:
    block = min(_BLOCK, triton.next_power_of_2(dim))
    return block, triton.cdiv(dim, block)


def launch_from_tokens(x_TD: Tensor, row_TK: Tensor, out_RD: Tensor) -> None:
    block, parts = _tiles(x_TD.shape[1])
    _from_tokens[(len(row_TK), parts)](x_TD, row_TK, out_RD, x_TD.shape[1], row_TK.shape[1], block)


def launch_to_rows(x_TD: Tensor, token_R: Tensor, out_RD: Tensor) -> None:
    block, parts = _tiles(x_TD.shape[1])
    _to_rows[(len(token_R), parts)](x_TD, token_R, out_RD, x_TD.shape[1], block)


def launch_sum(y_RD: Tensor, row_TK: Tensor, out_TD: Tensor, padded: bool) -> None:
    block, parts = _tiles(y_RD.shape[1])
    _sum[(len(row_TK), parts)](y_RD, row_TK, out_TD, y_RD.shape[1], row_TK.shape[1], block, padded)


@triton.jit
def _from_tokens(x_ptr, row_ptr, out_ptr, D: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = n < D
    value = tl.load(x_ptr + token * D + n, mask=kept)
    for k in tl.static_range(K):
        row = tl.load(row_ptr + token * K + k).to(tl.int64)
        tl.store(out_ptr + row * D + n, value, mask=kept)


@triton.jit
def _to_rows(x_ptr, token_ptr, out_ptr, D: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = n < D
    token = tl.load(token_ptr + row).to(tl.int64)
    value = tl.load(x_ptr + token * D + n, mask=kept & (token >= 0), other=0.0)
    tl.store(out_ptr + row * D + n, value, mask=kept)


@triton.jit
def _sum(
    y_ptr, row_ptr, out_ptr, D: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = n < D
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(K):
        row = tl.load(row_ptr + token * K + k).to(tl.int64)
        read = kept & (row >= 0) if PADDED else kept
        total += tl.load(y_ptr + row * D + n, mask=read, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * D + n, total.to(out_ptr.dtype.element_ty), mask=kept)
