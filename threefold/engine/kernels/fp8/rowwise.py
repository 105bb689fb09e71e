"""FP8 with one scale a row: the passes that make it.

Shapes: R rows sorted by expert, K columns, H expert dim, X = 2 H.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from threefold.engine.kernels.activation import activate, activate_grad
from threefold.engine.kernels.fp8.format import BLOCK, E4M3, Rows8, Weight8, num_blocks
from threefold.engine.kernels.fp8.quantize import any_scale, by_one, divided


def quantize_rows(x_XK: Tensor, token_R: Tensor | None) -> Rows8:
    """A row reads token_R[row] of x, or without tokens its own row."""
    rows8 = _empty(len(x_XK) if token_R is None else len(token_R), x_XK.shape[1], x_XK.device)
    width = x_XK.shape[1]
    _quantize_rows[(len(rows8.value_RK),)](
        x_XK, token_R, rows8.value_RK, rows8.scale_CR, width, token_R is not None, triton.next_power_of_2(width),
        num_warps=_warps(width),
    )  # fmt: skip
    return rows8


def quantize_weight(weight_EOI: Tensor) -> Weight8:
    """Its rows, and the rows of its transpose; read twice, first for their largest magnitudes."""
    num, outer, inner = weight_EOI.shape
    weight_EOI, device = weight_EOI.contiguous(), weight_EOI.device
    value = torch.empty(num, outer, inner, dtype=E4M3, device=device)
    turned = torch.empty(num, inner, outer, dtype=E4M3, device=device)
    largest_EO, largest_EI = (torch.zeros(num, size, dtype=torch.int32, device=device) for size in (outer, inner))
    scale_EO, scale_EI = (torch.empty(num, size, device=device) for size in (outer, inner))
    grid = num_blocks(inner), num_blocks(outer), num
    _largest[grid](weight_EOI, largest_EO, largest_EI, outer, inner, BLOCK, num_warps=8)
    _quantize_weight[grid](
        weight_EOI, largest_EO, largest_EI, value, turned, scale_EO, scale_EI, outer, inner, BLOCK, num_warps=8
    )
    return Weight8(value, turned, scale_EO, scale_EI)


def activated(gate_up_RX: Tensor, weight_R: Tensor, clamped: bool) -> Rows8:
    num_rows, half = len(gate_up_RX), gate_up_RX.shape[1] // 2
    rows8 = _empty(num_rows, half, gate_up_RX.device)
    whole = triton.next_power_of_2(half)
    _activated[(num_rows,)](
        gate_up_RX, weight_R, rows8.value_RK, rows8.scale_CR, half, clamped, whole, num_warps=_warps(half)
    )
    return rows8


def activated_grad(
    grad_RH: Tensor, gate_up_RX: Tensor, weight_R: Tensor, clamped: bool
) -> tuple[Rows8, Tensor, Tensor]:
    """As `activation.activated_grad`."""
    num_rows, half = grad_RH.shape
    rows8, weight_grad_R = _empty(num_rows, 2 * half, grad_RH.device), torch.empty_like(weight_R)
    largest_CR = torch.empty(num_blocks(half), num_rows, device=grad_RH.device)
    _activated_grad[(num_rows,)](
        grad_RH, gate_up_RX, weight_R, rows8.value_RK, rows8.scale_CR, weight_grad_R, largest_CR, num_rows, half,
        clamped, triton.next_power_of_2(half), BLOCK, num_warps=_warps(half),
    )  # fmt: skip
    return rows8, largest_CR, weight_grad_R


def _warps(width: int) -> int:
    """So that a thread has sixteen numbers or more."""
    return min(max(triton.next_power_of_2(width) // 512, 1), 8)


def _empty(num_rows: int, width: int, device: torch.device) -> Rows8:
    value_RK = torch.empty(num_rows, width, dtype=E4M3, device=device)
    return Rows8(value_RK, torch.empty(1, num_rows, device=device))


@triton.jit
def _put(value, scale, ptr, n, kept):
    tl.store(ptr + n, by_one(value, scale).to(tl.float8e4nv), mask=kept)


@triton.jit
def _quantize_rows(x_ptr, token_ptr, value_ptr, scale_ptr, width, GATHER: tl.constexpr, WHOLE: tl.constexpr):
    row, n = tl.program_id(0).to(tl.int64), tl.arange(0, WHOLE)
    kept = n < width
    source = tl.load(token_ptr + row).to(tl.int64) if GATHER else row
    x = tl.load(x_ptr + source * width + n, mask=kept, other=0.0).to(tl.float32)
    scale = any_scale(tl.max(tl.abs(x), 0))
    _put(x, scale, value_ptr + row * width, n, kept)
    tl.store(scale_ptr + row, scale)


@triton.jit
def _largest(weight_ptr, row_ptr, column_ptr, outer, inner, BLOCK: tl.constexpr):
    """Magnitudes as their bits: those of whole numbers are in the same order."""
    weight, o, i = _square(weight_ptr, outer, inner, BLOCK)
    expert, weight = tl.program_id(2), tl.abs(weight)
    tl.atomic_max(row_ptr + expert * outer + o, tl.max(weight, 1).to(tl.int32, bitcast=True), mask=o < outer)
    tl.atomic_max(column_ptr + expert * inner + i, tl.max(weight, 0).to(tl.int32, bitcast=True), mask=i < inner)


@triton.jit
def _quantize_weight(
    weight_ptr, row_ptr, column_ptr, value_ptr, turned_ptr, row_scale_ptr, column_scale_ptr, outer, inner,
    BLOCK: tl.constexpr,
):  # fmt: skip
    weight, o, i = _square(weight_ptr, outer, inner, BLOCK)
    expert = tl.program_id(2).to(tl.int64)
    kept = (o < outer)[:, None] & (i < inner)[None, :]
    by_row = _scales_of(row_ptr + expert * outer + o, row_scale_ptr + expert * outer + o, o < outer)
    inverse = tl.div_rn(tl.zeros_like(by_row) + 1.0, by_row)
    narrow = divided(weight, by_row[:, None] + tl.zeros_like(weight), inverse[:, None]).to(tl.float8e4nv)
    tl.store(value_ptr + (expert * outer + o)[:, None] * inner + i[None, :], narrow, mask=kept)
    by_column = _scales_of(column_ptr + expert * inner + i, column_scale_ptr + expert * inner + i, i < inner)
    inverse = tl.div_rn(tl.zeros_like(by_column) + 1.0, by_column)
    narrow = divided(weight, by_column[None, :] + tl.zeros_like(weight), inverse[None, :]).to(tl.float8e4nv)
    tl.store(turned_ptr + (expert * inner + i)[:, None] * outer + o[None, :], narrow.T, mask=kept.T)


@triton.jit
def _square(weight_ptr, outer, inner, BLOCK: tl.constexpr):
    o, i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = (tl.program_id(2).to(tl.int64) * outer + o)[:, None] * inner + i[None, :]
    return tl.load(weight_ptr + at, mask=(o < outer)[:, None] & (i < inner)[None, :], other=0.0).to(tl.float32), o, i


@triton.jit
def _scales_of(largest_ptr, scale_ptr, kept):
    """Stored by all programs of a row or column alike."""
    scale = any_scale(tl.load(largest_ptr, mask=kept, other=0).to(tl.float32, bitcast=True))
    tl.store(scale_ptr, scale, mask=kept)
    return scale


@triton.jit
def _activated(gate_up_ptr, weight_ptr, value_ptr, scale_ptr, half, CLAMPED: tl.constexpr, WHOLE: tl.constexpr):
    row, n = tl.program_id(0).to(tl.int64), tl.arange(0, WHOLE)
    kept = n < half
    gate = tl.load(gate_up_ptr + row * 2 * half + n, mask=kept, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + (row * 2 + 1) * half + n, mask=kept, other=0.0).to(tl.float32)
    act = activate(gate, up, CLAMPED) * tl.load(weight_ptr + row)
    scale = any_scale(tl.max(tl.abs(tl.where(kept, act, 0.0)), 0))
    _put(act, scale, value_ptr + row * half, n, kept)
    tl.store(scale_ptr + row, scale)


@triton.jit
def _activated_grad(
    grad_ptr, gate_up_ptr, weight_ptr, value_ptr, scale_ptr, weight_grad_ptr, largest_ptr, num_rows, half,
    CLAMPED: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, n = tl.program_id(0).to(tl.int64), tl.arange(0, WHOLE)
    kept = n < half
    gate = tl.load(gate_up_ptr + row * 2 * half + n, mask=kept, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + (row * 2 + 1) * half + n, mask=kept, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * half + n, mask=kept, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + row)
    act, gate_grad, up_grad = activate_grad(grad * weight, gate, up, CLAMPED)
    tl.store(weight_grad_ptr + row, tl.sum(act * grad, 0))
    c = tl.arange(0, WHOLE // BLOCK)
    largest = tl.max(tl.abs(act * weight).reshape(WHOLE // BLOCK, BLOCK), 1)
    tl.store(largest_ptr + c * num_rows + row, largest, mask=c < half // BLOCK)
    scale = any_scale(tl.max(tl.maximum(tl.abs(gate_grad), tl.abs(up_grad)), 0))
    _put(gate_grad, scale, value_ptr + row * 2 * half, n, kept)
    _put(up_grad, scale, value_ptr + (row * 2 + 1) * half, n, kept)
    tl.store(scale_ptr + row, scale)
