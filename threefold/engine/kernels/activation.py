"""SwiGLU and GPT-OSS's clamped kind, forward and backward, on values in fp32."""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton  # type: ignore
import triton.language as tl  # type: ignore

from threefold.engine.kernels import reference

CLAMP: tl.constexpr = tl.constexpr(reference.CLAMP)
ALPHA: tl.constexpr = tl.constexpr(reference.ALPHA)


@triton.jit
def activate(gate, up, CLAMPED: tl.constexpr):
    if CLAMPED:
        gate = tl.minimum(gate, CLAMP)
        up = tl.clamp(up, -CLAMP, CLAMP) + 1.0
        return gate * tl.sigmoid(ALPHA * gate) * up
    else:  # noqa: RET505 - what follows a return under a constant condition is still compiled
        return gate * tl.sigmoid(gate) * up


@triton.jit
def activate_grad(grad, gate, up, CLAMPED: tl.constexpr):
    """`grad` of the activation -> the activation and the gradients of gate and up."""
    if CLAMPED:
        gate_moves = gate <= CLAMP
        up_moves = (up >= -CLAMP) & (up <= CLAMP)
        gate = tl.minimum(gate, CLAMP)
        up = tl.clamp(up, -CLAMP, CLAMP) + 1.0
        sig = tl.sigmoid(ALPHA * gate)
        bent = gate * sig
        gate_grad = tl.where(gate_moves, grad * up * (sig + ALPHA * bent * (1.0 - sig)), 0.0)
        up_grad = tl.where(up_moves, grad * bent, 0.0)
    else:
        sig = tl.sigmoid(gate)
        bent = gate * sig
        gate_grad = grad * up * (sig + bent * (1.0 - sig))
        up_grad = grad * bent
    return bent * up, gate_grad, up_grad
