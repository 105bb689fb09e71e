"""The Triton kernels of `gated_norm.py`.

A program takes a tile of heads. In the backward it goes on from tile to tile and sums its part of the weight gradient.

Shapes: N rows of tokens, H heads, d head dim, K groups of heads, R heads of a group, P programs.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from threefold.engine.kernels.elementwise.rms_norm_triton import load_weight
from threefold.engine.kernels.fast_launch import fast_launch
from threefold.engine.kernels.launch_config import cdiv, next_power_of_2

_VALUES_PER_TILE = 4096


def launch_gated_norm(x: Tensor, gate_NKx: Tensor, weight_d: Tensor, out: Tensor, eps: float) -> None:
    sizes = _sizes(x, gate_NKx)
    num_heads = x.numel() // x.shape[-1]
    _gated_norm[(cdiv(num_heads, sizes["ROWS"]),)](
        x, gate_NKx, weight_d, out, num_heads, gate_NKx.stride(0), gate_NKx.stride(1), EPS=eps, num_warps=4, **sizes
    )


def launch_gated_norm_grad(
    grad: Tensor,
    x: Tensor,
    gate_NKx: Tensor,
    weight_d: Tensor,
    x_grad: Tensor,
    gate_grad: Tensor,
    part_Pd: Tensor,
    eps: float,
) -> None:
    sizes = _sizes(x, gate_NKx)
    _gated_norm_grad[(len(part_Pd),)](
        grad, x, gate_NKx, weight_d, x_grad, gate_grad, part_Pd, x.numel() // x.shape[-1], gate_NKx.stride(0),
        gate_NKx.stride(1), EPS=eps, num_warps=4, **sizes,
    )  # fmt: skip


def _sizes(x: Tensor, gate_NKx: Tensor) -> dict[str, int]:
    heads, dim = x.shape[-2:]
    block = next_power_of_2(dim)
    group = heads // gate_NKx.shape[1]
    return {"H": heads, "R": group, "DIM": dim, "BLOCK": block, "ROWS": max(1, _VALUES_PER_TILE // block)}


@triton.jit
def _gate_offset(row, token_stride, group_stride, H: tl.constexpr, R: tl.constexpr, DIM: tl.constexpr):
    head = row % H
    return (row // H).to(tl.int64) * token_stride + (head // R).to(tl.int64) * group_stride + (head % R) * DIM


@fast_launch
@triton.jit
def _gated_norm(
    x_ptr, gate_ptr, weight_ptr, out_ptr, num_heads, token_stride, group_stride, EPS: tl.constexpr, H: tl.constexpr,
    R: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    n = tl.arange(0, BLOCK)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = (row < num_heads)[:, None] & (n < DIM)[None, :]
    at = row.to(tl.int64)[:, None] * DIM + n[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    gate_at = _gate_offset(row, token_stride, group_stride, H, R, DIM)[:, None] + n[None, :]
    gate = tl.load(gate_ptr + gate_at, mask=mask, other=0.0).to(tl.float32)
    weight = load_weight(weight_ptr, n, n < DIM, dtype, False)[None, :]
    rstd = tl.rsqrt(tl.sum(x * x, 1) / DIM + EPS)[:, None]
    tl.store(out_ptr + at, (x * rstd * weight * gate * tl.sigmoid(gate)).to(dtype), mask=mask)


@fast_launch
@triton.jit
def _gated_norm_grad(
    grad_ptr, x_ptr, gate_ptr, weight_ptr, x_grad_ptr, gate_grad_ptr, part_ptr, num_heads, token_stride, group_stride,
    EPS: tl.constexpr, H: tl.constexpr, R: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = x_grad_ptr.dtype.element_ty
    n = tl.arange(0, BLOCK)
    weight = load_weight(weight_ptr, n, n < DIM, dtype, False)[None, :]
    part = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in tl.range(tl.program_id(0) * ROWS, num_heads, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row < num_heads)[:, None] & (n < DIM)[None, :]
        at = row.to(tl.int64)[:, None] * DIM + n[None, :]
        gate_at = _gate_offset(row, token_stride, group_stride, H, R, DIM)[:, None] + n[None, :]
        grad = tl.load(grad_ptr + at, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + gate_at, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x * x, 1) / DIM + EPS)[:, None]
        unit = x * rstd
        sigmoid = tl.sigmoid(gate)
        normed_grad = grad * gate * sigmoid
        gate_grad = grad * unit * weight * sigmoid * (1.0 + gate * (1.0 - sigmoid))
        part += normed_grad * unit
        weighted = normed_grad * weight
        x_grad = (weighted - unit * (tl.sum(weighted * unit, 1) / DIM)[:, None]) * rstd
        tl.store(x_grad_ptr + at, x_grad.to(dtype), mask=mask)
        tl.store(gate_grad_ptr + at, gate_grad.to(dtype), mask=mask)
    tl.store(part_ptr + tl.program_id(0) * DIM + n, tl.sum(part, 0), mask=n < DIM)
