"""silu(gate) * up of a dense MLP in one kernel, which saves gate and up for the backward. `layers/mlp.py` calls it."""

from typing import Any

import torch
from torch import Tensor

from threefold.engine.device import is_simulated


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    out: Tensor = _SiluMul.apply(gate, up)
    return out


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        if not is_simulated():
            from threefold.engine.kernels.elementwise.silu_mul_triton import launch_silu_mul

            launch_silu_mul(gate, up, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        gate_grad, up_grad = torch.empty_like(gate), torch.empty_like(up)
        if not is_simulated():
            from threefold.engine.kernels.elementwise.silu_mul_triton import launch_silu_mul_grad

            launch_silu_mul_grad(grad.contiguous(), gate, up, gate_grad, up_grad)
        return gate_grad, up_grad
