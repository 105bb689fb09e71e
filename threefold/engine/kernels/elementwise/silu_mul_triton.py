"""The Triton kernels of `silu_mul.py`. One program takes a block of values, wherever they lie in the tensor."""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from threefold.engine.kernels.elementwise.swiglu_triton import swiglu, swiglu_grad
from threefold.engine.kernels.fast_launch import fast_launch
from threefold.engine.kernels.launch_config import cdiv

_BLOCK = 2048


def launch_silu_mul(gate: Tensor, up: Tensor, out: Tensor) -> None:
    _silu_mul[(cdiv(gate.numel(), _BLOCK),)](gate, up, out, gate.numel(), _BLOCK, num_warps=8)


def launch_silu_mul_grad(grad: Tensor, gate: Tensor, up: Tensor, gate_grad: Tensor, up_grad: Tensor) -> None:
    grid = (cdiv(gate.numel(), _BLOCK),)
    _silu_mul_grad[grid](grad, gate, up, gate_grad, up_grad, gate.numel(), _BLOCK, num_warps=8)


@fast_launch
@triton.jit
def _silu_mul(gate_ptr, up_ptr, out_ptr, size, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = n < size
    gate = tl.load(gate_ptr + n, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + n, swiglu(gate, up, False).to(out_ptr.dtype.element_ty), mask=mask)


@fast_launch
@triton.jit
def _silu_mul_grad(grad_ptr, gate_ptr, up_ptr, gate_grad_ptr, up_grad_ptr, size, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = n < size
    grad = tl.load(grad_ptr + n, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + n, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + n, mask=mask, other=0.0).to(tl.float32)
    _, gate_grad, up_grad = swiglu_grad(grad, gate, up, False)
    tl.store(gate_grad_ptr + n, gate_grad.to(gate_grad_ptr.dtype.element_ty), mask=mask)
    tl.store(up_grad_ptr + n, up_grad.to(up_grad_ptr.dtype.element_ty), mask=mask)
