"""silu(gate) * up of a dense feed-forward part, one pass each way. Kept for the backward: gate and up.

Shapes: any.
"""

from typing import Any

import torch
from torch import Tensor

from threefold.engine.ways import stood_for


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    out: Tensor = _SiluTimes.apply(gate, up)
    return out


class _SiluTimes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        if not stood_for():
            from threefold.engine.kernels.gated_passes import launch_silu_times

            launch_silu_times(gate, up, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        gate_grad, up_grad = torch.empty_like(gate), torch.empty_like(up)
        if not stood_for():
            from threefold.engine.kernels.gated_passes import launch_silu_times_grad

            launch_silu_times_grad(grad.contiguous(), gate, up, gate_grad, up_grad)
        return gate_grad, up_grad
