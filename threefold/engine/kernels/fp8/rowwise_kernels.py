"""Triton kernels of the rowwise FP8 recipe: one fp32 scale for each row, computed in the pass that writes the values.

They quantize rows, weights, and the SwiGLU activation with its gradient. `gpu_steps.RowwiseGpuSteps` calls them, and
`precision/scaled_mm_backends.py` calls `quantize_rows`.

Shapes: R rows sorted by expert, K columns, H expert dim, X = 2 H; the first dim of x_XK is the number of tokens with
`token_R` and R without it.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from threefold.engine.kernels.elementwise.swiglu_triton import swiglu, swiglu_grad
from threefold.engine.kernels.fp8.blockwise_quantize import divide_by_scalar, divide_rn, fp32_scale
from threefold.engine.kernels.fp8.quantized_tensors import BLOCK, E4M3, Fp8Rows, Fp8Weight, num_blocks


def quantize_rows(x_XK: Tensor, token_R: Tensor | None) -> Fp8Rows:
    """Quantize rows. A row reads token_R[row] of x, or its own row without `token_R`."""
    fp8_rows = _empty_rows(len(x_XK) if token_R is None else len(token_R), x_XK.shape[1], x_XK.device)
    width = x_XK.shape[1]
    _quantize_rows[(len(fp8_rows.value_RK),)](
        x_XK, token_R, fp8_rows.value_RK, fp8_rows.scale_CR, width, token_R is not None, triton.next_power_of_2(width),
        num_warps=_num_warps(width),
    )  # fmt: skip
    return fp8_rows


def quantize_weight(weight_EOI: Tensor) -> Fp8Weight:
    """Quantize the rows of a weight and of its transpose. The weight is read twice, first for amax."""
    num, outer, inner = weight_EOI.shape
    weight_EOI, device = weight_EOI.contiguous(), weight_EOI.device
    value = torch.empty(num, outer, inner, dtype=E4M3, device=device)
    transposed = torch.empty(num, inner, outer, dtype=E4M3, device=device)
    amax_EO, amax_EI = (torch.zeros(num, size, dtype=torch.int32, device=device) for size in (outer, inner))
    scale_EO, scale_EI = (torch.empty(num, size, device=device) for size in (outer, inner))
    grid = num_blocks(inner), num_blocks(outer), num
    _weight_amax[grid](weight_EOI, amax_EO, amax_EI, outer, inner, BLOCK, num_warps=8)
    _quantize_weight[grid](
        weight_EOI, amax_EO, amax_EI, value, transposed, scale_EO, scale_EI, outer, inner, BLOCK, num_warps=8
    )
    return Fp8Weight(value, transposed, scale_EO, scale_EI)


def swiglu_fp8(gate_up_RX: Tensor, weight_R: Tensor, clamped: bool) -> Fp8Rows:
    """The activation times the router weight, quantized."""
    num_rows, expert_dim = len(gate_up_RX), gate_up_RX.shape[1] // 2
    fp8_rows = _empty_rows(num_rows, expert_dim, gate_up_RX.device)
    padded = triton.next_power_of_2(expert_dim)
    _swiglu_fp8[(num_rows,)](
        gate_up_RX,
        weight_R,
        fp8_rows.value_RK,
        fp8_rows.scale_CR,
        expert_dim,
        clamped,
        padded,
        num_warps=_num_warps(expert_dim),
    )
    return fp8_rows


def swiglu_grad_rows(
    grad_RH: Tensor, gate_up_RX: Tensor, weight_R: Tensor, clamped: bool
) -> tuple[Fp8Rows, Tensor, Tensor]:
    """Return the same as `blockwise_swiglu.swiglu_grad_rows`, with one scale per row."""
    num_rows, expert_dim = grad_RH.shape
    fp8_rows, weight_grad_R = _empty_rows(num_rows, 2 * expert_dim, grad_RH.device), torch.empty_like(weight_R)
    amax_CR = torch.empty(num_blocks(expert_dim), num_rows, device=grad_RH.device)
    _swiglu_grad_rows[(num_rows,)](
        grad_RH, gate_up_RX, weight_R, fp8_rows.value_RK, fp8_rows.scale_CR, weight_grad_R, amax_CR, num_rows,
        expert_dim, clamped, triton.next_power_of_2(expert_dim), BLOCK, num_warps=_num_warps(expert_dim),
    )  # fmt: skip
    return fp8_rows, amax_CR, weight_grad_R


def _num_warps(width: int) -> int:
    """Enough warps that each thread has sixteen numbers or more, up to eight."""
    return min(max(triton.next_power_of_2(width) // 512, 1), 8)


def _empty_rows(num_rows: int, width: int, device: torch.device) -> Fp8Rows:
    value_RK = torch.empty(num_rows, width, dtype=E4M3, device=device)
    return Fp8Rows(value_RK, torch.empty(1, num_rows, device=device))


@triton.jit
def _store_row(value, scale, ptr, n, mask):
    tl.store(ptr + n, divide_by_scalar(value, scale).to(tl.float8e4nv), mask=mask)


@triton.jit
def _quantize_rows(x_ptr, token_ptr, value_ptr, scale_ptr, width, GATHER: tl.constexpr, PADDED: tl.constexpr):
    row, n = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    mask = n < width
    source = tl.load(token_ptr + row).to(tl.int64) if GATHER else row
    x = tl.load(x_ptr + source * width + n, mask=mask, other=0.0).to(tl.float32)
    scale = fp32_scale(tl.max(tl.abs(x), 0))
    _store_row(x, scale, value_ptr + row * width, n, mask)
    tl.store(scale_ptr + row, scale)


@triton.jit
def _weight_amax(weight_ptr, row_ptr, column_ptr, outer, inner, BLOCK: tl.constexpr):
    """The amax of each row and column by atomics on float bits, whose order as int32 is that of the magnitudes."""
    weight, o, i = _load_weight_block(weight_ptr, outer, inner, BLOCK)
    expert, weight = tl.program_id(2), tl.abs(weight)
    tl.atomic_max(row_ptr + expert * outer + o, tl.max(weight, 1).to(tl.int32, bitcast=True), mask=o < outer)
    tl.atomic_max(column_ptr + expert * inner + i, tl.max(weight, 0).to(tl.int32, bitcast=True), mask=i < inner)


@triton.jit
def _quantize_weight(
    weight_ptr, row_ptr, column_ptr, value_ptr, transposed_ptr, row_scale_ptr, column_scale_ptr, outer, inner,
    BLOCK: tl.constexpr,
):  # fmt: skip
    weight, o, i = _load_weight_block(weight_ptr, outer, inner, BLOCK)
    expert = tl.program_id(2).to(tl.int64)
    mask = (o < outer)[:, None] & (i < inner)[None, :]
    by_row = _store_scales(row_ptr + expert * outer + o, row_scale_ptr + expert * outer + o, o < outer)
    inverse = tl.div_rn(tl.zeros_like(by_row) + 1.0, by_row)
    fp8 = divide_rn(weight, by_row[:, None] + tl.zeros_like(weight), inverse[:, None]).to(tl.float8e4nv)
    tl.store(value_ptr + (expert * outer + o)[:, None] * inner + i[None, :], fp8, mask=mask)
    by_column = _store_scales(column_ptr + expert * inner + i, column_scale_ptr + expert * inner + i, i < inner)
    inverse = tl.div_rn(tl.zeros_like(by_column) + 1.0, by_column)
    fp8 = divide_rn(weight, by_column[None, :] + tl.zeros_like(weight), inverse[None, :]).to(tl.float8e4nv)
    tl.store(transposed_ptr + (expert * inner + i)[:, None] * outer + o[None, :], fp8.T, mask=mask.T)


@triton.jit
def _load_weight_block(weight_ptr, outer, inner, BLOCK: tl.constexpr):
    o, i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = (tl.program_id(2).to(tl.int64) * outer + o)[:, None] * inner + i[None, :]
    return tl.load(weight_ptr + at, mask=(o < outer)[:, None] & (i < inner)[None, :], other=0.0).to(tl.float32), o, i


@triton.jit
def _store_scales(amax_ptr, scale_ptr, mask):
    """Compute and store scales. All programs of a row or column store the same numbers."""
    scale = fp32_scale(tl.load(amax_ptr, mask=mask, other=0).to(tl.float32, bitcast=True))
    tl.store(scale_ptr, scale, mask=mask)
    return scale


@triton.jit
def _swiglu_fp8(gate_up_ptr, weight_ptr, value_ptr, scale_ptr, expert_dim, CLAMPED: tl.constexpr, PADDED: tl.constexpr):
    row, n = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    mask = n < expert_dim
    gate = tl.load(gate_up_ptr + row * 2 * expert_dim + n, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + (row * 2 + 1) * expert_dim + n, mask=mask, other=0.0).to(tl.float32)
    act = swiglu(gate, up, CLAMPED) * tl.load(weight_ptr + row)
    scale = fp32_scale(tl.max(tl.abs(tl.where(mask, act, 0.0)), 0))
    _store_row(act, scale, value_ptr + row * expert_dim, n, mask)
    tl.store(scale_ptr + row, scale)


@triton.jit
def _swiglu_grad_rows(
    grad_ptr, gate_up_ptr, weight_ptr, value_ptr, scale_ptr, weight_grad_ptr, amax_ptr, num_rows, expert_dim,
    CLAMPED: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, n = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    mask = n < expert_dim
    gate = tl.load(gate_up_ptr + row * 2 * expert_dim + n, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + (row * 2 + 1) * expert_dim + n, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * expert_dim + n, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + row)
    act, gate_grad, up_grad = swiglu_grad(grad * weight, gate, up, CLAMPED)
    tl.store(weight_grad_ptr + row, tl.sum(act * grad, 0))
    c = tl.arange(0, PADDED // BLOCK)
    amax = tl.max(tl.abs(act * weight).reshape(PADDED // BLOCK, BLOCK), 1)
    tl.store(amax_ptr + c * num_rows + row, amax, mask=c < expert_dim // BLOCK)
    scale = fp32_scale(tl.max(tl.maximum(tl.abs(gate_grad), tl.abs(up_grad)), 0))
    _store_row(gate_grad, scale, value_ptr + row * 2 * expert_dim, n, mask)
    _store_row(up_grad, scale, value_ptr + (row * 2 + 1) * expert_dim, n, mask)
    tl.store(scale_ptr + row, scale)
