"""FP8 with one scale a row: the passes that make it. Torch has the product.

Shapes: R rows sorted by expert, K columns, H expert dim, X = 2 H.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from threefold.engine.kernels.activation import activate, activate_grad
from threefold.engine.kernels.fp8.format import E4M3, LARGEST, Rows8, Weight8, num_blocks

_LARGEST: tl.constexpr = tl.constexpr(LARGEST)
_COLUMNS, _STRIP = 128, 64  # that one program turns, and how many rows at a time


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
    """Its rows, and the rows of its transpose."""
    num, outer, inner = weight_EOI.shape
    rows8 = quantize_rows(weight_EOI.contiguous().flatten(0, 1), None)
    turned = torch.empty(num, inner, outer, dtype=E4M3, device=weight_EOI.device)
    turned_scale = torch.empty(num, inner, device=weight_EOI.device)
    _quantize_turned[(num_blocks(inner), num)](
        weight_EOI.contiguous(), turned, turned_scale, outer, inner, _COLUMNS, _STRIP, num_warps=8
    )
    return Weight8(rows8.value_RK.view_as(weight_EOI), turned, rows8.scale_CR.view(num, outer), turned_scale)


def activated(gate_up_RX: Tensor, weight_R: Tensor, clamped: bool) -> Rows8:
    num_rows, half = len(gate_up_RX), gate_up_RX.shape[1] // 2
    rows8 = _empty(num_rows, half, gate_up_RX.device)
    whole = triton.next_power_of_2(half)
    _activated[(num_rows,)](
        gate_up_RX, weight_R, rows8.value_RK, rows8.scale_CR, half, clamped, whole, num_warps=_warps(half)
    )
    return rows8


def activated_grad(grad_RH: Tensor, gate_up_RX: Tensor, weight_R: Tensor, clamped: bool) -> tuple[Rows8, Tensor]:
    """`grad_RH` of the weighted activation -> (gradient of gate_up_RX, gradient of weight_R)."""
    num_rows, half = grad_RH.shape
    rows8, weight_grad_R = _empty(num_rows, 2 * half, grad_RH.device), torch.empty_like(weight_R)
    _activated_grad[(num_rows,)](
        grad_RH, gate_up_RX, weight_R, rows8.value_RK, rows8.scale_CR, weight_grad_R, half, clamped,
        triton.next_power_of_2(half), num_warps=_warps(half),
    )  # fmt: skip
    return rows8, weight_grad_R


def _warps(width: int) -> int:
    """So that a thread has eight numbers or more."""
    return min(max(triton.next_power_of_2(width) // 256, 1), 8)


def _empty(num_rows: int, width: int, device: torch.device) -> Rows8:
    value_RK = torch.empty(num_rows, width, dtype=E4M3, device=device)
    return Rows8(value_RK, torch.empty(1, num_rows, device=device))


@triton.jit
def _scale(largest):
    return tl.where(largest == 0.0, 1.0, tl.div_rn(largest, _LARGEST + tl.zeros_like(largest)))


@triton.jit
def _divided(value, scale, inverse):
    """value / scale, rounded as a division is, with three operations in place of ten: Markstein's correction."""
    near = value * inverse
    return tl.fma(tl.fma(-near, scale, value), inverse, near)


@triton.jit
def _put(value, scale, ptr, n, kept):
    scale = scale + tl.zeros_like(value)
    inverse = tl.div_rn(tl.zeros_like(value) + 1.0, scale)
    tl.store(ptr + n, _divided(value, scale, inverse).to(tl.float8e4nv), mask=kept)


@triton.jit
def _quantize_rows(x_ptr, token_ptr, value_ptr, scale_ptr, width, GATHER: tl.constexpr, WHOLE: tl.constexpr):
    row, n = tl.program_id(0).to(tl.int64), tl.arange(0, WHOLE)
    kept = n < width
    source = tl.load(token_ptr + row).to(tl.int64) if GATHER else row
    x = tl.load(x_ptr + source * width + n, mask=kept, other=0.0).to(tl.float32)
    scale = _scale(tl.max(tl.abs(x), 0))
    _put(x, scale, value_ptr + row * width, n, kept)
    tl.store(scale_ptr + row, scale)


@triton.jit
def _quantize_turned(
    weight_ptr, value_ptr, scale_ptr, outer, inner, COLUMNS: tl.constexpr, STRIP: tl.constexpr
):  # fmt: skip
    expert, i = tl.program_id(1).to(tl.int64), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    known = i < inner
    most = tl.zeros((COLUMNS,), tl.float32)
    for begin in tl.range(0, outer, STRIP):
        weight = _strip(weight_ptr + expert * outer * inner, begin, i, known, outer, inner, STRIP)
        most = tl.maximum(most, tl.max(tl.abs(weight), 0))
    scale = _scale(most)
    inverse = tl.div_rn(tl.zeros_like(scale) + 1.0, scale)
    tl.store(scale_ptr + expert * inner + i, scale, mask=known)
    for begin in tl.range(0, outer, STRIP):
        weight = _strip(weight_ptr + expert * outer * inner, begin, i, known, outer, inner, STRIP)
        narrow = _divided(weight, scale[None, :] + tl.zeros_like(weight), inverse[None, :]).to(tl.float8e4nv)
        o = begin + tl.arange(0, STRIP)
        at = (expert * inner + i)[:, None] * outer + o[None, :]
        tl.store(value_ptr + at, narrow.T, mask=known[:, None] & (o < outer)[None, :])


@triton.jit
def _strip(weight_ptr, begin, i, known, outer, inner, STRIP: tl.constexpr):
    o = begin + tl.arange(0, STRIP)
    kept = (o < outer)[:, None] & known[None, :]
    return tl.load(weight_ptr + o[:, None] * inner + i[None, :], mask=kept, other=0.0).to(tl.float32)


@triton.jit
def _activated(gate_up_ptr, weight_ptr, value_ptr, scale_ptr, half, CLAMPED: tl.constexpr, WHOLE: tl.constexpr):
    row, n = tl.program_id(0).to(tl.int64), tl.arange(0, WHOLE)
    kept = n < half
    gate = tl.load(gate_up_ptr + row * 2 * half + n, mask=kept, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + (row * 2 + 1) * half + n, mask=kept, other=0.0).to(tl.float32)
    act = activate(gate, up, CLAMPED) * tl.load(weight_ptr + row)
    scale = _scale(tl.max(tl.abs(tl.where(kept, act, 0.0)), 0))
    _put(act, scale, value_ptr + row * half, n, kept)
    tl.store(scale_ptr + row, scale)


@triton.jit
def _activated_grad(
    grad_ptr, gate_up_ptr, weight_ptr, value_ptr, scale_ptr, weight_grad_ptr, half, CLAMPED: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    row, n = tl.program_id(0).to(tl.int64), tl.arange(0, WHOLE)
    kept = n < half
    gate = tl.load(gate_up_ptr + row * 2 * half + n, mask=kept, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + (row * 2 + 1) * half + n, mask=kept, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * half + n, mask=kept, other=0.0).to(tl.float32)
    act, gate_grad, up_grad = activate_grad(grad * tl.load(weight_ptr + row), gate, up, CLAMPED)
    tl.store(weight_grad_ptr + row, tl.sum(act * grad, 0))
    scale = _scale(tl.max(tl.maximum(tl.abs(gate_grad), tl.abs(up_grad)), 0))
    _put(gate_grad, scale, value_ptr + row * 2 * half, n, kept)
    _put(up_grad, scale, value_ptr + (row * 2 + 1) * half, n, kept)
    tl.store(scale_ptr + row, scale)
