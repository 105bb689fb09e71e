"""Rows and weights to FP8 in one pass over memory, in every form that a later product wants.

Shapes: R rows sorted by expert, K columns, C blocks of columns, B blocks of rows, P = B * BLOCK rows with each expert's
filled up, E experts, O rows of a weight, I its columns.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from threefold.engine.kernels.fp8.format import (
    BLOCK,
    E4M3,
    LARGEST,
    SMALLEST_SCALE,
    Blocks,
    Columns8,
    Rows8,
    Weight8,
    num_blocks,
)

_LARGEST: tl.constexpr = tl.constexpr(LARGEST)
_SMALLEST_SCALE: tl.constexpr = tl.constexpr(SMALLEST_SCALE)


def empty_rows(num_rows: int, width: int, device: torch.device) -> Rows8:
    value_RK = torch.empty(num_rows, width, dtype=E4M3, device=device)
    return Rows8(value_RK, torch.empty(num_blocks(width), num_rows, device=device))


def empty_columns(num: int, width: int, square: bool, device: torch.device) -> Columns8:
    value_KP = torch.empty(width, num * BLOCK, dtype=E4M3, device=device)
    return Columns8(value_KP, torch.empty(num, num_blocks(width) if square else width, device=device))


def block_ends(ends_E: Tensor) -> Tensor:
    """Of each expert's blocks of rows."""
    block_ends_E = torch.empty_like(ends_E)
    _block_ends[(1,)](ends_E, block_ends_E, len(ends_E), triton.next_power_of_2(len(ends_E)), BLOCK)
    return block_ends_E


def quantize(
    x_XK: Tensor, token_R: Tensor | None, blocks: Blocks, rows: bool, columns: bool, square: bool
) -> tuple[Rows8 | None, Columns8 | None]:
    """A row reads token_R[row] of x, or without tokens its own row. `square`: what the columns share scales in."""
    num_rows, width = len(x_XK) if token_R is None else len(token_R), x_XK.shape[1]
    rows8 = empty_rows(num_rows, width, x_XK.device) if rows else None
    columns8 = empty_columns(blocks.num, width, square, x_XK.device) if columns else None
    _quantize[(num_blocks(width) * blocks.num,)](
        x_XK, token_R, blocks.table, blocks.total, blocks.num, *parts_of(rows8), *parts_of(columns8), num_rows, width,
        token_R is not None, rows, columns, square, BLOCK, num_warps=4,
    )  # fmt: skip
    return rows8, columns8


def quantize_weight(weight_EOI: Tensor) -> Weight8:
    num_experts, outer, inner = weight_EOI.shape
    device = weight_EOI.device
    value = torch.empty(num_experts, outer, inner, dtype=E4M3, device=device)
    turned = torch.empty(num_experts, inner, outer, dtype=E4M3, device=device)
    scale = torch.empty(num_experts, num_blocks(outer), num_blocks(inner), device=device)
    _quantize_weight[(num_blocks(inner), num_blocks(outer), num_experts)](
        weight_EOI.contiguous(), value, turned, scale, outer, inner, BLOCK, num_warps=8
    )
    return Weight8(value, turned, scale, scale.mT)


def parts_of(made: Rows8 | Columns8 | None) -> tuple[Tensor | None, ...]:
    """As arguments of a kernel, columns by four."""
    if made is None:
        return None, None
    if isinstance(made, Rows8):
        return made.value_RK, made.scale_CR
    return made.value_KP.view(torch.int32), made.scale


@triton.jit
def _block_ends(ends_ptr, out_ptr, num_experts, E: tl.constexpr, BLOCK: tl.constexpr):
    expert = tl.arange(0, E)
    known = expert < num_experts
    end = tl.load(ends_ptr + expert, mask=known, other=0)
    start = tl.load(ends_ptr + expert - 1, mask=known & (expert > 0), other=0)
    num = tl.where(known, (end - start + BLOCK - 1) // BLOCK, 0)
    tl.store(out_ptr + expert, tl.cumsum(num, 0), mask=known)


@triton.jit
def tile_of(width, SIZE: tl.constexpr):
    """Of a program: which `SIZE` of the columns, and which of the rows. Both from one axis of the grid: the others end
    at 65,535, which rows by 32 pass at two million of them."""
    across = tl.cdiv(width, SIZE)
    return tl.program_id(0) % across, tl.program_id(0) // across


@triton.jit
def scales(largest):
    """Of blocks with these magnitudes -> (the smallest power of two by which they fit under 448 = 1.75 * 2 ** 8, by
    what to multiply to quantise); made of bits, so exact."""
    bits = largest.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.where(bits == 0, 127, tl.maximum(exponent, 1))
    # A block with an infinity gets an infinite scale: what it is part of must not look sound.
    scale = tl.where(bits < 0x7F800000, exponent << 23, 0x7F800000)
    return scale.to(tl.float32, bitcast=True), ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def any_scale(largest):
    """Of blocks with these magnitudes, no power of two."""
    scale = tl.div_rn(largest, _LARGEST + tl.zeros_like(largest))
    return tl.where(largest == 0.0, 1.0, tl.where(scale < _SMALLEST_SCALE, _SMALLEST_SCALE, scale))


@triton.jit
def divided(value, scale, inverse):
    """value / scale, rounded as a division is, with three operations in place of ten: Markstein's correction."""
    near = value * inverse
    return tl.fma(tl.fma(-near, scale, value), inverse, near)


@triton.jit
def by_one(value, scale):
    """Divided by one number."""
    inverse = tl.div_rn(tl.zeros_like(scale) + 1.0, scale)
    return divided(value, scale + tl.zeros_like(value), inverse + tl.zeros_like(value))


@triton.jit
def put_rows(value, value_ptr, scale_ptr, row, live, block, shift, num_rows, width, BLOCK: tl.constexpr):
    """A block of each of some rows; `shift` says where its columns begin."""
    col = tl.arange(0, BLOCK)
    scale, inverse = scales(tl.max(tl.abs(value), 1))
    narrow = (value * inverse[:, None]).to(tl.float8e4nv)
    kept = live[:, None] & (shift + col < width)[None, :]
    tl.store(value_ptr + row.to(tl.int64)[:, None] * width + shift + col[None, :], narrow, mask=kept)
    tl.store(scale_ptr + block * num_rows + row, scale, mask=live)


@triton.jit
def largest_of(x0, x1, x2, x3):
    """Of every fourth row, four times: the largest magnitude of each column."""
    return tl.max(tl.maximum(tl.maximum(tl.abs(x0), tl.abs(x1)), tl.maximum(tl.abs(x2), tl.abs(x3))), 0)


@triton.jit
def put_column_scales(largest, scale_ptr, block, col, width):
    """-> by what to multiply the columns to quantise them."""
    scale, inverse = scales(largest)
    tl.store(scale_ptr + block * width + col, scale, mask=col < width)
    return inverse


@triton.jit
def put_square_scale(largest, scale_ptr):
    """One for all that `largest` tells of -> by what to multiply, for each of the columns."""
    scale, inverse = scales(tl.max(largest, 0))
    tl.store(scale_ptr, scale)
    return inverse + tl.zeros_like(largest)


@triton.jit
def pack(x0, x1, x2, x3, inverse):
    """Four rows of columns in one number: turned by bytes, a block would take four times as long."""
    return _byte(x0, inverse) | _byte(x1, inverse) << 8 | _byte(x2, inverse) << 16 | _byte(x3, inverse) << 24


@triton.jit
def _byte(x, inverse):
    return (x * inverse[None, :]).to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit
def _quantize(
    x_ptr, token_ptr, table_ptr, total_ptr, num, row_value_ptr, row_scale_ptr, column_value_ptr, column_scale_ptr,
    num_rows, width, GATHER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SQUARE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    c, block = tile_of(width, BLOCK)
    shift = c * BLOCK
    if block < tl.load(total_ptr):
        # Every fourth row, four times: see `pack`.
        quad = tl.arange(0, BLOCK // 4)
        row = tl.load(table_ptr + num + block) + 4 * quad
        end = tl.load(table_ptr + 2 * num + block)
        x0 = _read(x_ptr, token_ptr, row, end, shift, width, GATHER, BLOCK)
        x1 = _read(x_ptr, token_ptr, row + 1, end, shift, width, GATHER, BLOCK)
        x2 = _read(x_ptr, token_ptr, row + 2, end, shift, width, GATHER, BLOCK)
        x3 = _read(x_ptr, token_ptr, row + 3, end, shift, width, GATHER, BLOCK)
        if ROWS:
            put_rows(x0, row_value_ptr, row_scale_ptr, row, row < end, c, shift, num_rows, width, BLOCK)
            put_rows(x1, row_value_ptr, row_scale_ptr, row + 1, row + 1 < end, c, shift, num_rows, width, BLOCK)
            put_rows(x2, row_value_ptr, row_scale_ptr, row + 2, row + 2 < end, c, shift, num_rows, width, BLOCK)
            put_rows(x3, row_value_ptr, row_scale_ptr, row + 3, row + 3 < end, c, shift, num_rows, width, BLOCK)
        if COLUMNS:
            col = shift + tl.arange(0, BLOCK)
            largest = largest_of(x0, x1, x2, x3)
            if SQUARE:
                inverse = put_square_scale(largest, column_scale_ptr + block * tl.cdiv(width, BLOCK) + c)
            else:
                inverse = put_column_scales(largest, column_scale_ptr, block, col, width)
            place = block * (BLOCK // 4) + quad
            at = column_value_ptr + col.to(tl.int64)[:, None] * (num * (BLOCK // 4)) + place[None, :]
            tl.store(at, pack(x0, x1, x2, x3, inverse).T, mask=(col < width)[:, None])


@triton.jit
def _read(x_ptr, token_ptr, row, end, shift, width, GATHER: tl.constexpr, BLOCK: tl.constexpr):
    live, col = row < end, shift + tl.arange(0, BLOCK)
    kept = live[:, None] & (col < width)[None, :]
    source = tl.load(token_ptr + row, mask=live, other=0) if GATHER else row
    at = source.to(tl.int64)[:, None] * width + col[None, :]
    return tl.load(x_ptr + at, mask=kept, other=0.0).to(tl.float32)


@triton.jit
def _quantize_weight(weight_ptr, value_ptr, turned_ptr, scale_ptr, outer, inner, BLOCK: tl.constexpr):
    block_i, block_o = tl.program_id(0), tl.program_id(1)
    expert = tl.program_id(2).to(tl.int64)
    o, i = block_o * BLOCK + tl.arange(0, BLOCK), block_i * BLOCK + tl.arange(0, BLOCK)
    whole = expert * outer * inner
    kept = (o < outer)[:, None] & (i < inner)[None, :]
    at = whole + o[:, None] * inner + i[None, :]
    weight = tl.load(weight_ptr + at, mask=kept, other=0.0).to(tl.float32)
    scale = any_scale(tl.max(tl.max(tl.abs(weight), 1), 0))
    narrow = by_one(weight, scale).to(tl.float8e4nv)
    tl.store(value_ptr + at, narrow, mask=kept)
    turned = whole + i[:, None] * outer + o[None, :]
    tl.store(turned_ptr + turned, narrow.T, mask=(i < inner)[:, None] & (o < outer)[None, :])
    tl.store(scale_ptr + (expert * tl.num_programs(1) + block_o) * tl.num_programs(0) + block_i, scale)
