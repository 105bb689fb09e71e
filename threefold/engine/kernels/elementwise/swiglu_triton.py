"""SwiGLU and GPT-OSS's clamped form as Triton functions, forward and backward, on fp32 values in registers.

The kernels of `silu_mul_triton.py`, `experts/` and `fp8/` call them. `swiglu_torch.py` is the same in plain torch.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton  # type: ignore
import triton.language as tl  # type: ignore

from threefold.engine.kernels.elementwise import swiglu_torch as torch_form

CLAMP: tl.constexpr = tl.constexpr(torch_form.CLAMP)
ALPHA: tl.constexpr = tl.constexpr(torch_form.ALPHA)


@triton.jit
def swiglu(gate, up, CLAMPED: tl.constexpr):
    if CLAMPED:
        gate = tl.minimum(gate, CLAMP)
        up = tl.clamp(up, -CLAMP, CLAMP) + 1.0
        return gate * tl.sigmoid(ALPHA * gate) * up
    else:  # noqa: RET505 - Triton compiles what follows a return under a constant condition
        return gate * tl.sigmoid(gate) * up


@triton.jit
def swiglu_grad(grad, gate, up, CLAMPED: tl.constexpr):
    """`grad` is the gradient of the activation. -> (the activation, gradient of gate, gradient of up)."""
    if CLAMPED:
        gate_passes = gate <= CLAMP
        up_passes = (up >= -CLAMP) & (up <= CLAMP)
        gate = tl.minimum(gate, CLAMP)
        up = tl.clamp(up, -CLAMP, CLAMP) + 1.0
        sig = tl.sigmoid(ALPHA * gate)
        silu = gate * sig
        gate_grad = tl.where(gate_passes, grad * up * (sig + ALPHA * silu * (1.0 - sig)), 0.0)
        up_grad = tl.where(up_passes, grad * silu, 0.0)
    else:
        sig = tl.sigmoid(gate)
        silu = gate * sig
        gate_grad = grad * up * (sig + silu * (1.0 - sig))
        up_grad = grad * silu
    return silu * up, gate_grad, up_grad
