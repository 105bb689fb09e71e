"""The output norm of the gated delta rule, RMSNorm times silu(gate), in one kernel. `layers/norm.py` calls it.

The gate is read where the projection wrote it: by key head, with gaps between them. Input and gate are saved for the
backward, which computes the statistics again.

Shapes: N rows of tokens, H heads, d head dim, K groups of heads whose gates lie together, R = H / K, P programs.
"""

from typing import Any

import torch
from torch import Tensor

from threefold.engine.device import is_simulated
from threefold.engine.kernels.launch_config import num_programs

_PROGRAMS_PER_SM = 8


def gated_rms_norm(x: Tensor, gate: Tensor, weight_d: Tensor, eps: float) -> Tensor:
    """x is (..., H, d) and its gate (..., K, R * d). -> the norm times silu(gate), as x."""
    out: Tensor = _GatedRmsNorm.apply(x, gate, weight_d, eps)
    return out


class _GatedRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight_d: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, gate, weight_d)
        ctx.eps = eps
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if not is_simulated():
            from threefold.engine.kernels.mixers.gated_norm_triton import launch_gated_norm

            launch_gated_norm(x, _by_token(gate), weight_d, out, eps)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight_d = ctx.saved_tensors
        x_grad = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        gate_grad = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        part_Pd = torch.empty(
            num_programs(x.device, _PROGRAMS_PER_SM), x.shape[-1], dtype=torch.float32, device=x.device
        )
        weight_grad = torch.empty_like(weight_d)
        if not is_simulated():
            from threefold.engine.kernels.elementwise.rms_norm_triton import launch_sum_partials
            from threefold.engine.kernels.mixers.gated_norm_triton import launch_gated_norm_grad

            launch_gated_norm_grad(grad.contiguous(), x, _by_token(gate), weight_d, x_grad, gate_grad, part_Pd, ctx.eps)
            launch_sum_partials(part_Pd, weight_grad)
        return x_grad, gate_grad, weight_grad, None


def _by_token(gate: Tensor) -> Tensor:
    """The gate as (N, K, R * d); its last dim has no gaps."""
    gate_NKx = gate.reshape(-1, *gate.shape[-2:])
    return gate_NKx if gate_NKx.stride(2) == 1 else gate_NKx.contiguous()
