"""Triton kernels of rows that travel in FP8: tokens quantized and copied to their rows, and received rows dequantized.

Each is one pass over memory. `dispatch/fp8_rows.py` calls them and says how a row is packed.

Shapes: T tokens, K experts of a token, D model dim, B = D + D / 128 bytes of a packed row, S rows sent, P received.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from threefold.engine.kernels.fast_launch import fast_launch
from threefold.engine.kernels.fp8.blockwise_quantize import power_of_two_scale
from threefold.engine.kernels.fp8.quantized_tensors import BLOCK, E4M3
from threefold.engine.kernels.launch_config import cdiv

_BLOCKS = 8  # blocks of a row that one program takes


def pack_tokens(x_TD: Tensor, row_TK: Tensor, packed_SB: Tensor) -> None:
    """Quantize every token once, and store it in each of its rows; a row of -1 is not stored."""
    num_tokens, dim = x_TD.shape
    _pack_tokens[(num_tokens, cdiv(dim // BLOCK, _BLOCKS))](
        x_TD, row_TK, packed_SB.view(E4M3), packed_SB, dim, row_TK.shape[1], BLOCK, _BLOCKS
    )


def unpack_rows(packed_PB: Tensor, x_PD: Tensor) -> None:
    """Dequantize received rows into `x_PD`."""
    num_rows, dim = x_PD.shape
    _unpack_rows[(num_rows, cdiv(dim // BLOCK, _BLOCKS))](packed_PB.view(E4M3), packed_PB, x_PD, dim, BLOCK, _BLOCKS)


@triton.jit
def _offsets(D: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """-> (blocks of a row that this program takes, which of them exist, their columns, which of these exist)."""
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    live = block < D // BLOCK
    return block, live, block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :], live[:, None]


@fast_launch
@triton.jit
def _pack_tokens(
    x_ptr, row_ptr, value_ptr, byte_ptr, D: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    block, live, n, mask = _offsets(D, BLOCK, BLOCKS)
    value = tl.load(x_ptr + token * D + n, mask=mask, other=0.0).to(tl.float32)
    scale, inverse = power_of_two_scale(tl.max(tl.abs(value), 1))
    fp8 = (value * inverse[:, None]).to(tl.float8e4nv)
    exponent = (scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)
    for k in tl.static_range(K):
        row = tl.load(row_ptr + token * K + k).to(tl.int64)
        at = row * (D + D // BLOCK)
        tl.store(value_ptr + at + n, fp8, mask=mask & (row >= 0))
        tl.store(byte_ptr + at + D + block, exponent, mask=live & (row >= 0))


@fast_launch
@triton.jit
def _unpack_rows(value_ptr, byte_ptr, x_ptr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block, live, n, mask = _offsets(D, BLOCK, BLOCKS)
    at = row * (D + D // BLOCK)
    value = tl.load(value_ptr + at + n, mask=mask, other=0.0).to(tl.float32)
    exponent = tl.load(byte_ptr + at + D + block, mask=live, other=0).to(tl.int32)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    tl.store(x_ptr + row * D + n, (value * scale[:, None]).to(x_ptr.dtype.element_ty), mask=mask)
