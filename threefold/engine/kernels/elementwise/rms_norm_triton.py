"""The Triton kernels of `rms_norm.py`.

In the forward one program takes one row. In the backward each program takes many rows and sums their part of the weight
gradient, and a second kernel adds the parts. Fractions such as `eps` are constants of the kernels in this folder,
because `torch.compile` would pass them as fp64.

Shapes: N rows, D the normed dim, P programs.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from threefold.engine.kernels.fast_launch import fast_launch
from threefold.engine.kernels.launch_config import cdiv, next_power_of_2


def _warps(block: int) -> int:
    """As few warps as the registers allow: many rows in flight are worth more than many threads for one row."""
    return max(1, min(4, block // 1024)) if block <= 8192 else 16


def launch_rms_norm(
    x_ND: Tensor, y_ND: Tensor | None, weight_D: Tensor, total: Tensor, out: Tensor, eps: float, zero_centered: bool
) -> None:
    num_rows, dim = x_ND.shape
    block = next_power_of_2(dim)
    y_stride = 0 if y_ND is None else y_ND.stride(0)
    _rms_norm[(num_rows,)](
        x_ND, y_ND, weight_D, total, out, x_ND.stride(0), y_stride, eps, dim, block, y_ND is not None, zero_centered,
        num_warps=_warps(block),
    )  # fmt: skip


def launch_rms_norm_grad(
    x_ND: Tensor,
    grad_ND: Tensor,
    residual_grad_ND: Tensor | None,
    weight_D: Tensor,
    out: Tensor,
    part_PD: Tensor,
    eps: float,
    zero_centered: bool,
) -> None:
    num_rows, dim = x_ND.shape
    block = next_power_of_2(dim)
    residual_grad_stride = 0 if residual_grad_ND is None else residual_grad_ND.stride(0)
    _rms_norm_grad[(len(part_PD),)](
        x_ND, grad_ND, residual_grad_ND, weight_D, out, part_PD, num_rows, x_ND.stride(0), grad_ND.stride(0),
        residual_grad_stride, eps, dim, block, residual_grad_ND is not None, zero_centered, num_warps=_warps(block),
    )  # fmt: skip


def launch_sum_partials(part_PD: Tensor, out_D: Tensor) -> None:
    num_parts, dim = part_PD.shape
    _sum_partials[(cdiv(dim, 32),)](part_PD, out_D, num_parts, dim, 256, 32, num_warps=8)


@fast_launch
@triton.jit
def _sum_partials(part_ptr, out_ptr, num_parts, D, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(0, num_parts, ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row < num_parts)[:, None] & (n < D)[None, :]
        total += tl.load(part_ptr + row[:, None] * D + n[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + n, tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=n < D)


@triton.jit
def load_weight(ptr, n, mask, dtype: tl.constexpr, CENTERED: tl.constexpr):
    """The weight as the torch form uses it: rounded to the dtype of x or, where 1 is added, in fp32."""
    weight = tl.load(ptr + n, mask=mask, other=0.0)
    if CENTERED:
        return weight.to(tl.float32) + 1.0
    else:  # noqa: RET505 - Triton compiles what follows a return under a constant condition
        return weight.to(dtype).to(tl.float32)


@fast_launch
@triton.jit
def _rms_norm(
    x_ptr, y_ptr, weight_ptr, total_ptr, out_ptr, x_stride, y_stride, EPS: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, ADD: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    mask = n < D
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * x_stride + n, mask=mask, other=0.0)
    if ADD:
        y = tl.load(y_ptr + row * y_stride + n, mask=mask, other=0.0)
        x = (x.to(tl.float32) + y.to(tl.float32)).to(dtype)
        tl.store(total_ptr + row * D + n, x, mask=mask)
    x = x.to(tl.float32)
    weight = load_weight(weight_ptr, n, mask, dtype, CENTERED)
    rstd = tl.rsqrt(tl.sum(x * x, 0) / D + EPS)
    tl.store(out_ptr + row * D + n, (x * rstd * weight).to(dtype), mask=mask)


@fast_launch
@triton.jit
def _rms_norm_grad(
    x_ptr, grad_ptr, residual_grad_ptr, weight_ptr, out_ptr, part_ptr, num_rows, x_stride, grad_stride,
    residual_grad_stride, EPS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr,
    CENTERED: tl.constexpr,
):  # fmt: skip
    n = tl.arange(0, BLOCK)
    mask = n < D
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    weight = load_weight(weight_ptr, n, mask, dtype, CENTERED)
    part = tl.zeros((BLOCK,), tl.float32)
    for row in tl.range(tl.program_id(0).to(tl.int64), num_rows, tl.num_programs(0)):
        x = tl.load(x_ptr + row * x_stride + n, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + row * grad_stride + n, mask=mask, other=0.0).to(tl.float32)
        if RESIDUAL:
            residual_grad = tl.load(residual_grad_ptr + row * residual_grad_stride + n, mask=mask, other=0.0).to(
                tl.float32
            )
        rstd = tl.rsqrt(tl.sum(x * x, 0) / D + EPS)
        weighted = grad * weight
        slope = tl.sum(weighted * x, 0) / D * rstd * rstd
        part += grad * x * rstd
        x_grad = (weighted - x * slope) * rstd
        if RESIDUAL:
            x_grad += residual_grad
        tl.store(out_ptr + row * D + n, x_grad.to(dtype), mask=mask)
    tl.store(part_ptr + tl.program_id(0) * D + n, part, mask=mask)
