"""Triton kernels that quantize matrices to FP8 in blocks of 128, in one pass, in the layout that cuBLAS reads.

They quantize by rows, transposed for a sum over rows, or weights in 128x128 blocks. cuBLAS wants the dim that is summed
over contiguous and padded to whole blocks, and the scales of neighbors contiguous too. Several matrices can be
quantized into one, side by side: the output gradients of layers that share an input, and their transposed weights. The
results are bit for bit those of `quantize`. `scaled_mm_backends` calls them.

Shapes: M rows, K columns, of all matrices that are side by side; m, k blocks of 128 of them; O rows and I columns of a
weight, o and i blocks of them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from collections.abc import Sequence

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from threefold.engine.kernels.fast_launch import fast_launch
from threefold.engine.kernels.fp8.blockwise_quantize import (
    column_amax,
    divide_square,
    pack_fp8,
    pack_rows,
    program_tile,
    store_column_scales,
    store_rows,
    store_square_scale,
)
from threefold.engine.kernels.launch_config import cdiv

BLOCK = 128
_FP8 = torch.float8_e4m3fn
_SCALE_ROW_MULTIPLE = 4  # the scales of 128x128 blocks have rows of a multiple of four
ScaledValues = tuple[Tensor, Tensor]  # values, and the scale of each of their blocks


def quantize_blocks(
    x_MK: Tensor | Sequence[Tensor], rows: bool, columns: bool, square: bool
) -> tuple[ScaledValues, ScaledValues]:
    """Values and scales by rows, (M, K') and (M, k), and those of the transpose, (K, M') and (K, m).

    With `square` the transpose has 128x128 blocks, laid out as by `quantize_square_blocks`. Several matrices of as many
    rows are quantized side by side; the widths of all but the last are multiples of 128.
    """
    parts = [x_MK] if isinstance(x_MK, Tensor) else list(x_MK)
    M, K, new = len(parts[0]), sum(part.shape[1] for part in parts), parts[0].new_empty
    m, k = cdiv(M, BLOCK), cdiv(K, BLOCK)
    value, scale = new(M if rows else 0, k * BLOCK, dtype=_FP8), new(k, M if rows else 0, dtype=torch.float32)
    if square:
        transposed, transposed_scale = new(k * BLOCK, m * BLOCK, dtype=_FP8), _empty_square_scales(parts[0], k, m)
    else:
        num_columns = K if columns else 0
        transposed, transposed_scale = (
            new(num_columns, m * BLOCK, dtype=_FP8),
            new(m, num_columns, dtype=torch.float32).T,
        )
    first = 0
    for part_MK in parts:
        _quantize_1x128[(m * cdiv(part_MK.shape[1], BLOCK),)](
            part_MK, value, scale, transposed.view(torch.int32), transposed_scale, M, part_MK.shape[1],
            part_MK.stride(0), first, K, m * (BLOCK // 4), k * BLOCK, transposed_scale.stride(0), rows, columns, square,
            BLOCK, num_warps=4,
        )  # fmt: skip
        first += part_MK.shape[1]
    return (value, scale.T), (transposed, transposed_scale)


def quantize_square_blocks(weights_OI: Sequence[Tensor]) -> tuple[list[ScaledValues], ScaledValues]:
    """-> (values and scales of each weight, values and scales of all transposes). Values are padded to whole blocks,
    and the numbers of scales to multiples of four.

    The transposes are side by side; the heights of all weights but the last are multiples of 128.
    """
    like, outer = weights_OI[0], sum(cdiv(len(weight), BLOCK) for weight in weights_OI)
    i = cdiv(like.shape[1], BLOCK)
    transposed = like.new_empty(i * BLOCK, outer * BLOCK, dtype=_FP8)
    transposed_scale = _empty_square_scales(like, i, outer)
    forward, first = [], 0
    for weight_OI in weights_OI:
        o = cdiv(len(weight_OI), BLOCK)
        value, scale = like.new_empty(o * BLOCK, i * BLOCK, dtype=_FP8), _empty_square_scales(like, o, i)
        _quantize_128x128[(o * i,)](
            weight_OI, value, scale, transposed.view(torch.int32), transposed_scale, *weight_OI.shape,
            weight_OI.stride(0), first, i * BLOCK, outer * (BLOCK // 4), scale.shape[1], transposed_scale.shape[1],
            BLOCK, num_warps=4,
        )  # fmt: skip
        forward.append((value, scale))
        first += o
    return forward, (transposed, transposed_scale)


def _empty_square_scales(like: Tensor, num_rows: int, num_summed: int) -> Tensor:
    """Scales that the kernels fill, with zeros behind the end of each row where it is padded."""
    width = cdiv(num_summed, _SCALE_ROW_MULTIPLE) * _SCALE_ROW_MULTIPLE
    new = like.new_empty if width == num_summed else like.new_zeros
    return new(num_rows, width, dtype=torch.float32)


@triton.jit
def _load_rows(x_ptr, m, k, M, K, stride):
    mask = (m < M)[:, None] & (k < K)[None, :]
    return tl.load(x_ptr + m.to(tl.int64)[:, None] * stride + k[None, :], mask=mask, other=0.0).to(tl.float32)


@fast_launch
@triton.jit
def _quantize_1x128(
    x_ptr, value_ptr, scale_ptr, transposed_ptr, transposed_scale_ptr, M, K, stride, first, all_k, quads_m, padded_k,
    scales_m, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SQUARE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block_k, block_m = program_tile(K, BLOCK)
    quad = tl.arange(0, BLOCK // 4)
    # Each x holds every fourth row: see `pack_rows`.
    m, k = block_m * BLOCK + 4 * quad, block_k * BLOCK + tl.arange(0, BLOCK)
    x0 = _load_rows(x_ptr, m, k, M, K, stride)
    x1 = _load_rows(x_ptr, m + 1, k, M, K, stride)
    x2 = _load_rows(x_ptr, m + 2, k, M, K, stride)
    x3 = _load_rows(x_ptr, m + 3, k, M, K, stride)
    block_k += first // BLOCK
    k += first
    if ROWS:
        shift = block_k * BLOCK
        store_rows(x0, value_ptr, scale_ptr, m, m < M, block_k, shift, M, padded_k, BLOCK)
        store_rows(x1, value_ptr, scale_ptr, m + 1, m + 1 < M, block_k, shift, M, padded_k, BLOCK)
        store_rows(x2, value_ptr, scale_ptr, m + 2, m + 2 < M, block_k, shift, M, padded_k, BLOCK)
        store_rows(x3, value_ptr, scale_ptr, m + 3, m + 3 < M, block_k, shift, M, padded_k, BLOCK)
    if COLUMNS:
        amax = column_amax(x0, x1, x2, x3)
        if SQUARE:
            inverse = store_square_scale(amax, transposed_scale_ptr + block_k * scales_m + block_m)
        else:
            inverse = store_column_scales(amax, transposed_scale_ptr, block_m, k, all_k)
        at = transposed_ptr + k.to(tl.int64)[:, None] * quads_m + (block_m * (BLOCK // 4) + quad)[None, :]
        packed = pack_rows(x0, x1, x2, x3, inverse).T
        if SQUARE:
            tl.store(at, packed)
        else:
            tl.store(at, packed, mask=(k < all_k)[:, None])


@fast_launch
@triton.jit
def _quantize_128x128(
    x_ptr, value_ptr, scale_ptr, transposed_ptr, transposed_scale_ptr, M, K, stride, first, padded_k, quads_m, scales_k,
    scales_m, BLOCK: tl.constexpr,
):  # fmt: skip
    block_k, block_m = program_tile(K, BLOCK)
    quad = tl.arange(0, BLOCK // 4)
    m, k = block_m * BLOCK + 4 * quad, block_k * BLOCK + tl.arange(0, BLOCK)
    x0, x1, x2, x3, scale = divide_square(
        _load_rows(x_ptr, m, k, M, K, stride),
        _load_rows(x_ptr, m + 1, k, M, K, stride),
        _load_rows(x_ptr, m + 2, k, M, K, stride),
        _load_rows(x_ptr, m + 3, k, M, K, stride),
    )
    at = value_ptr + m.to(tl.int64)[:, None] * padded_k + k[None, :]
    tl.store(at, x0.to(tl.float8e4nv))
    tl.store(at + padded_k, x1.to(tl.float8e4nv))
    tl.store(at + 2 * padded_k, x2.to(tl.float8e4nv))
    tl.store(at + 3 * padded_k, x3.to(tl.float8e4nv))
    tl.store(scale_ptr + block_m * scales_k + block_k, scale)
    block_m += first
    at = transposed_ptr + k.to(tl.int64)[:, None] * quads_m + (block_m * (BLOCK // 4) + quad)[None, :]
    tl.store(at, pack_fp8(x0, x1, x2, x3).T)
    tl.store(transposed_scale_ptr + block_k * scales_m + block_m, scale)
