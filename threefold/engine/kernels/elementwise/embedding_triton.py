"""The gradient of an embedding in Triton: the rows of equal tokens are summed, in fp32 and always in the same order.

`layers/embedding.py` calls it. Tokens are sorted, so that equal ones lie in runs. One program sums a run, or the part
of it that lies in one block of positions: a token that fills half of a batch would keep one program busy for long. A
second kernel sums the parts of the runs that go beyond a block. A block has at most two such parts: one of a run that
began before it (part 0), and one of a run that begins in it and goes on behind it (part 1).

Shapes: T tokens, V vocabulary, D model dim, B blocks of positions, C blocks of columns.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from threefold.engine.kernels.fast_launch import fast_launch
from threefold.engine.kernels.launch_config import cdiv, next_power_of_2

_FILL = 8192  # values that a program sets to zero


def launch_embedding_grad(
    grad_TD: Tensor,
    sorted_T: Tensor,
    order_T: Tensor,
    out_VD: Tensor,
    part_B2D: Tensor,
    squares: Tensor,
    positions: int,
) -> None:
    """Write the gradient of the embedding to `out_VD`. `sorted_T` are the tokens and `order_T` where they were before;
    `squares`, of T + B rows with a column for each block of columns, gets sums that add up to the squares of all."""
    num_tokens, dim = grad_TD.shape
    num_columns = squares.shape[1]
    columns = next_power_of_2(cdiv(dim, num_columns))
    sizes = num_tokens, dim, positions, columns
    squares_TC, squares_BC = squares.split([num_tokens, len(part_B2D)])
    _fill_zeros[(cdiv(out_VD.numel(), _FILL),)](out_VD, out_VD.numel(), _FILL, num_warps=8)
    _sum_embedding_runs[(num_tokens, num_columns)](
        grad_TD, sorted_T, order_T, out_VD, part_B2D, squares_TC, *sizes, num_warps=8
    )
    _sum_embedding_parts[(len(part_B2D), num_columns)](part_B2D, sorted_T, out_VD, squares_BC, *sizes, num_warps=8)


@fast_launch
@triton.jit
def _fill_zeros(out_ptr, count, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + n, tl.zeros((BLOCK,), out_ptr.dtype.element_ty), mask=n < count)


@fast_launch
@triton.jit
def _sum_embedding_runs(
    grad_ptr, sorted_ptr, order_ptr, out_ptr, part_ptr, squares_ptr, T, D: tl.constexpr, POSITIONS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """A run, or the part of it in this block of positions, if it begins at the position of this program."""
    position = tl.program_id(0)
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    token = tl.load(sorted_ptr + position)
    block = position // POSITIONS
    starts = tl.load(sorted_ptr + position - 1, mask=position > 0, other=-1) != token
    squares = 0.0
    if starts | (position == block * POSITIONS):
        n = block * POSITIONS + tl.arange(0, POSITIONS)
        is_same = (tl.load(sorted_ptr + n, mask=n < T, other=-1) == token) & (n >= position)
        end = position + tl.sum(is_same.to(tl.int32), 0)
        total = tl.zeros((COLUMNS,), tl.float32)
        for at in range(position, end, 4):
            few = at + tl.arange(0, 4)
            row = tl.load(order_ptr + few, mask=few < end, other=0).to(tl.int64)
            mask = (few < end)[:, None] & (d < D)[None, :]
            total += tl.sum(tl.load(grad_ptr + row[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32), 0)
        ends = tl.load(sorted_ptr + end, mask=end < T, other=-1) != token
        if starts & ends:
            squares = _store_row(out_ptr, token, total, d, D)
        else:
            slot = block * 2 + starts.to(tl.int32)
            tl.store(part_ptr + slot.to(tl.int64) * D + d, total, mask=d < D)
    tl.store(squares_ptr + position * tl.num_programs(1) + tl.program_id(1), squares)


@fast_launch
@triton.jit
def _sum_embedding_parts(
    part_ptr, sorted_ptr, out_ptr, squares_ptr, T, D: tl.constexpr, POSITIONS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """The run that begins in this block of positions and goes on behind it, if there is one."""
    block = tl.program_id(0)
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first, behind = block * POSITIONS, (block + 1) * POSITIONS
    token = tl.load(sorted_ptr + behind - 1, mask=behind <= T, other=-1)
    starts = tl.load(sorted_ptr + first - 1, mask=first > 0, other=-2) != token
    goes_on = tl.load(sorted_ptr + behind, mask=behind < T, other=-3) == token
    squares = 0.0
    if starts & goes_on:
        num_more = 0  # blocks that begin with the same token
        for begin in range(behind, T, 256 * POSITIONS):
            n = begin + tl.arange(0, 256) * POSITIONS
            num_more += tl.sum((tl.load(sorted_ptr + n, mask=n < T, other=-3) == token).to(tl.int32), 0)
        part_ptrs = part_ptr + (block.to(tl.int64) * 2 + 1) * D + d
        total = tl.load(part_ptrs, mask=d < D, other=0.0)
        part_ptrs += D  # part 0 of the next block
        for _ in range(num_more):
            total += tl.load(part_ptrs, mask=d < D, other=0.0)
            part_ptrs += 2 * D
        squares = _store_row(out_ptr, token, total, d, D)
    tl.store(squares_ptr + block * tl.num_programs(1) + tl.program_id(1), squares)


@triton.jit
def _store_row(out_ptr, token, total, d, D: tl.constexpr):
    """Store some columns of a row. -> the sum of squares of what is stored."""
    rounded = tl.where(d < D, total, 0.0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token.to(tl.int64) * D + d, rounded, mask=d < D)
    return tl.sum(rounded.to(tl.float32) * rounded.to(tl.float32), 0)
