"""Triton kernels that quantize rows and weights to FP8 in blocks of 128, in one pass over memory.

One pass writes all layouts that the later GEMMs read: by rows, by columns, and for weights also the transpose.
`gpu_steps` and `fused_experts` call the launch functions; the other kernels of this folder and
`precision/quantize_for_cublas.py` use the scale and division functions.

Shapes: R rows sorted by expert, K columns, C blocks of columns, B blocks of rows, P = B * BLOCK rows with each expert's
padded to whole blocks, E experts, O rows of a weight, I its columns.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import os

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from threefold.engine.kernels.fast_launch import fast_launch
from threefold.engine.kernels.fp8.quantized_tensors import (
    BLOCK,
    E4M3,
    E4M3_MAX,
    SMALLEST_SCALE,
    Fp8Columns,
    Fp8Rows,
    Fp8Weight,
    RowBlocks,
    num_blocks,
)
from threefold.engine.kernels.launch_config import next_power_of_2

_IS_INTERPRETED: tl.constexpr = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
_E4M3_MAX: tl.constexpr = tl.constexpr(E4M3_MAX)
_SMALLEST_SCALE: tl.constexpr = tl.constexpr(SMALLEST_SCALE)


def empty_rows(num_rows: int, width: int, device: torch.device) -> Fp8Rows:
    value_RK = torch.empty(num_rows, width, dtype=E4M3, device=device)
    return Fp8Rows(value_RK, torch.empty(num_blocks(width), num_rows, device=device))


def empty_columns(max_blocks: int, width: int, square: bool, device: torch.device) -> Fp8Columns:
    value_KP = torch.empty(width, max_blocks * BLOCK, dtype=E4M3, device=device)
    return Fp8Columns(value_KP, torch.empty(max_blocks, num_blocks(width) if square else width, device=device))


def block_ends(ends_E: Tensor) -> Tensor:
    """The end of each expert's blocks of rows."""
    block_ends_E = torch.empty_like(ends_E)
    _block_ends[(1,)](ends_E, block_ends_E, len(ends_E), next_power_of_2(len(ends_E)), BLOCK)
    return block_ends_E


def quantize_rows_and_columns(
    x_XK: Tensor, token_R: Tensor | None, blocks: RowBlocks, rows: bool, columns: bool, square: bool
) -> tuple[Fp8Rows | None, Fp8Columns | None]:
    """Quantize by rows if `rows`, and by columns if `columns`, which then have 128x128 blocks if `square`, else 128x1.

    A row reads token_R[row] of x, or its own row without `token_R`.
    """
    num_rows, width = len(x_XK) if token_R is None else len(token_R), x_XK.shape[1]
    fp8_rows = empty_rows(num_rows, width, x_XK.device) if rows else None
    fp8_columns = empty_columns(blocks.max_blocks, width, square, x_XK.device) if columns else None
    _quantize_rows_and_columns[(num_blocks(width) * blocks.max_blocks,)](
        x_XK, token_R, blocks.table, blocks.total, blocks.max_blocks, *kernel_arguments(fp8_rows),
        *kernel_arguments(fp8_columns), num_rows, width, token_R is not None, rows, columns, square, BLOCK, num_warps=4,
    )  # fmt: skip
    return fp8_rows, fp8_columns


def quantize_weight(weight_EOI: Tensor) -> Fp8Weight:
    """Quantize a weight in 128x128 blocks with fp32 scales, and store it transposed as well."""
    num_experts, outer, inner = weight_EOI.shape
    device = weight_EOI.device
    value = torch.empty(num_experts, outer, inner, dtype=E4M3, device=device)
    transposed = torch.empty(num_experts, inner, outer, dtype=E4M3, device=device)
    scale = torch.empty(num_experts, num_blocks(outer), num_blocks(inner), device=device)
    # So few registers let three programs run on a multiprocessor at a time.
    _quantize_weight[(num_blocks(inner), num_blocks(outer), num_experts)](
        weight_EOI.contiguous(), value, transposed.view(torch.int32), scale, outer, inner, BLOCK, num_warps=4,
        maxnreg=168,
    )  # fmt: skip
    return Fp8Weight(value, transposed, scale, scale.mT)


def kernel_arguments(tensor: Fp8Rows | Fp8Columns | None) -> tuple[Tensor | None, ...]:
    """Values and scales as kernel arguments; columns are stored as int32, four rows in one number."""
    if tensor is None:
        return None, None
    if isinstance(tensor, Fp8Rows):
        return tensor.value_RK, tensor.scale_CR
    return tensor.value_KP.view(torch.int32), tensor.scale


@fast_launch
@triton.jit
def _block_ends(ends_ptr, out_ptr, num_experts, E: tl.constexpr, BLOCK: tl.constexpr):
    expert = tl.arange(0, E)
    mask = expert < num_experts
    end = tl.load(ends_ptr + expert, mask=mask, other=0)
    start = tl.load(ends_ptr + expert - 1, mask=mask & (expert > 0), other=0)
    count = tl.where(mask, (end - start + BLOCK - 1) // BLOCK, 0)
    tl.store(out_ptr + expert, tl.cumsum(count, 0), mask=mask)


@triton.jit
def program_tile(width, SIZE: tl.constexpr):
    """The tile of a program: its index among the tiles of `SIZE` columns, and among the tiles of rows.

    Both come from one axis of the grid, because the others end at 65,535, too few tiles for two million rows by 32.
    """
    across = tl.cdiv(width, SIZE)
    return tl.program_id(0) % across, tl.program_id(0) // across


@triton.jit
def power_of_two_scale(amax):
    """The smallest power of two by which blocks with this amax fit under 448 = 1.75 * 2 ** 8, and its inverse.

    Both are built from exponent bits, so they are exact.
    """
    bits = amax.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.where(bits == 0, 127, tl.maximum(exponent, 1))
    # A block with an infinity gets an infinite scale, so that results it enters are not finite either.
    scale = tl.where(bits < 0x7F800000, exponent << 23, 0x7F800000)
    return scale.to(tl.float32, bitcast=True), ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def fp32_scale(amax):
    """The fp32 scale by which `amax` becomes 448; SMALLEST_SCALE at least, 1 for zeros."""
    scale = tl.div_rn(amax, _E4M3_MAX + tl.zeros_like(amax))
    return tl.where(amax == 0.0, 1.0, tl.where(scale < _SMALLEST_SCALE, _SMALLEST_SCALE, scale))


@triton.jit
def divide_rn(value, scale, inverse):
    """value / scale, correctly rounded, by three operations in place of ten: Markstein's correction of `inverse`."""
    near = value * inverse
    return tl.fma(tl.fma(-near, scale, value), inverse, near)


@triton.jit
def divide_by_scalar(value, scale):
    """Divide all values by one scale."""
    inverse = tl.div_rn(tl.zeros_like(scale) + 1.0, scale)
    return divide_rn(value, scale + tl.zeros_like(value), inverse + tl.zeros_like(value))


@triton.jit
def divide_square(x0, x1, x2, x3):
    """Divide a 128x128 block by its fp32 scale, which is the last result. x0 to x3 hold every fourth row."""
    scale = fp32_scale(tl.max(column_amax(x0, x1, x2, x3), 0))
    return (
        divide_by_scalar(x0, scale),
        divide_by_scalar(x1, scale),
        divide_by_scalar(x2, scale),
        divide_by_scalar(x3, scale),
        scale,
    )


@triton.jit
def store_rows(value, value_ptr, scale_ptr, row, row_mask, block, shift, num_rows, width, BLOCK: tl.constexpr):
    """Quantize and store one 1x128 block of each of some rows; its columns begin at `shift`."""
    col = tl.arange(0, BLOCK)
    scale, inverse = power_of_two_scale(tl.max(tl.abs(value), 1))
    fp8 = (value * inverse[:, None]).to(tl.float8e4nv)
    mask = row_mask[:, None] & (shift + col < width)[None, :]
    tl.store(value_ptr + row.to(tl.int64)[:, None] * width + shift + col[None, :], fp8, mask=mask)
    tl.store(scale_ptr + block * num_rows + row, scale, mask=row_mask)


@triton.jit
def column_amax(x0, x1, x2, x3):
    """The largest magnitude of each column. x0 to x3 hold every fourth row, see `pack_rows`."""
    return tl.max(tl.maximum(tl.maximum(tl.abs(x0), tl.abs(x1)), tl.maximum(tl.abs(x2), tl.abs(x3))), 0)


@triton.jit
def store_column_scales(amax, scale_ptr, block, col, width):
    """Store the scales of 128x1 blocks; return the inverses, by which the columns are multiplied."""
    scale, inverse = power_of_two_scale(amax)
    tl.store(scale_ptr + block * width + col, scale, mask=col < width)
    return inverse


@triton.jit
def store_square_scale(amax, scale_ptr):
    """Store one scale for all columns of `amax`; return its inverse for each of them."""
    scale, inverse = power_of_two_scale(tl.max(amax, 0))
    tl.store(scale_ptr, scale)
    return inverse + tl.zeros_like(amax)


@triton.jit
def pack_rows(x0, x1, x2, x3, inverse):
    """Quantize four rows and pack each column of them into one int32: transposing bytes takes four times as long."""
    inverse = inverse[None, :]
    return pack_fp8(x0 * inverse, x1 * inverse, x2 * inverse, x3 * inverse)


@triton.jit
def pack_fp8(x0, x1, x2, x3):
    """Round four rows to e4m3 and pack each column of them into one int32, the first row in the lowest byte.

    In PTX, because ptxas of CUDA 12.8 miscompiles the same in Triton where the bytes are stored by rows as well: it
    keeps two pairs in one register, and shifts bytes of the wrong pair into the result.
    """
    if _IS_INTERPRETED:
        return _byte(x0) | _byte(x1) << 8 | _byte(x2) << 16 | _byte(x3) << 24
    else:  # noqa: RET505 - Triton compiles what follows a return under a constant condition
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }
            """,
            "=r,f,f,f,f",
            [x0, x1, x2, x3],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def _byte(x):
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)


@fast_launch
@triton.jit
def _quantize_rows_and_columns(
    x_ptr, token_ptr, table_ptr, total_ptr, max_blocks, row_value_ptr, row_scale_ptr, column_value_ptr,
    column_scale_ptr, num_rows, width, GATHER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SQUARE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    c, block = program_tile(width, BLOCK)
    shift = c * BLOCK
    if block < tl.load(total_ptr):
        # Each x holds every fourth row: see `pack_rows`.
        quad = tl.arange(0, BLOCK // 4)
        row = tl.load(table_ptr + max_blocks + block) + 4 * quad
        end = tl.load(table_ptr + 2 * max_blocks + block)
        x0 = _load_rows(x_ptr, token_ptr, row, end, shift, width, GATHER, BLOCK)
        x1 = _load_rows(x_ptr, token_ptr, row + 1, end, shift, width, GATHER, BLOCK)
        x2 = _load_rows(x_ptr, token_ptr, row + 2, end, shift, width, GATHER, BLOCK)
        x3 = _load_rows(x_ptr, token_ptr, row + 3, end, shift, width, GATHER, BLOCK)
        if ROWS:
            store_rows(x0, row_value_ptr, row_scale_ptr, row, row < end, c, shift, num_rows, width, BLOCK)
            store_rows(x1, row_value_ptr, row_scale_ptr, row + 1, row + 1 < end, c, shift, num_rows, width, BLOCK)
            store_rows(x2, row_value_ptr, row_scale_ptr, row + 2, row + 2 < end, c, shift, num_rows, width, BLOCK)
            store_rows(x3, row_value_ptr, row_scale_ptr, row + 3, row + 3 < end, c, shift, num_rows, width, BLOCK)
        if COLUMNS:
            col = shift + tl.arange(0, BLOCK)
            amax = column_amax(x0, x1, x2, x3)
            if SQUARE:
                inverse = store_square_scale(amax, column_scale_ptr + block * tl.cdiv(width, BLOCK) + c)
            else:
                inverse = store_column_scales(amax, column_scale_ptr, block, col, width)
            packed_row = block * (BLOCK // 4) + quad
            at = column_value_ptr + col.to(tl.int64)[:, None] * (max_blocks * (BLOCK // 4)) + packed_row[None, :]
            tl.store(at, pack_rows(x0, x1, x2, x3, inverse).T, mask=(col < width)[:, None])


@triton.jit
def _load_rows(x_ptr, token_ptr, row, end, shift, width, GATHER: tl.constexpr, BLOCK: tl.constexpr):
    row_mask, col = row < end, shift + tl.arange(0, BLOCK)
    mask = row_mask[:, None] & (col < width)[None, :]
    source = tl.load(token_ptr + row, mask=row_mask, other=0) if GATHER else row
    at = source.to(tl.int64)[:, None] * width + col[None, :]
    return tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)


@fast_launch
@triton.jit
def _quantize_weight(weight_ptr, value_ptr, transposed_ptr, scale_ptr, outer, inner, BLOCK: tl.constexpr):
    block_i, block_o = tl.program_id(0), tl.program_id(1)
    expert = tl.program_id(2).to(tl.int64)
    # Each x holds every fourth row: see `pack_rows`. `outer` is a multiple of 16.
    quad = tl.arange(0, BLOCK // 4)
    o, i = block_o * BLOCK + 4 * quad, block_i * BLOCK + tl.arange(0, BLOCK)
    start = expert * outer * inner
    mask = (o < outer)[:, None] & (i < inner)[None, :]
    at = start + o[:, None] * inner + i[None, :]
    x0 = tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32)
    x1 = tl.load(weight_ptr + at + inner, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(weight_ptr + at + 2 * inner, mask=mask, other=0.0).to(tl.float32)
    x3 = tl.load(weight_ptr + at + 3 * inner, mask=mask, other=0.0).to(tl.float32)
    x0, x1, x2, x3, scale = divide_square(x0, x1, x2, x3)
    tl.store(value_ptr + at, x0.to(tl.float8e4nv), mask=mask)
    tl.store(value_ptr + at + inner, x1.to(tl.float8e4nv), mask=mask)
    tl.store(value_ptr + at + 2 * inner, x2.to(tl.float8e4nv), mask=mask)
    tl.store(value_ptr + at + 3 * inner, x3.to(tl.float8e4nv), mask=mask)
    packed_row = block_o * (BLOCK // 4) + quad
    at = transposed_ptr + start // 4 + i.to(tl.int64)[:, None] * (outer // 4) + packed_row[None, :]
    # Written so that four neighbors have one condition, which lets a thread store them at once.
    back_mask = (i < inner)[:, None] & (packed_row < outer // 4)[None, :]
    tl.store(at, pack_fp8(x0, x1, x2, x3).T, mask=back_mask)
    tl.store(scale_ptr + (expert * tl.num_programs(1) + block_o) * tl.num_programs(0) + block_i, scale)
