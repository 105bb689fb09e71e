"""The steps of the fused experts for tensors without memory: empty results of the sizes that GPU kernels return.

`use_gpu_operators` puts `empty_expert_steps` in place of the function that chooses the kernels of
`engine/kernels/experts/fused_experts.py`. The methods are those of `GpuSteps` in `gpu_steps.py`, which also explains
the shape letters.
"""

from typing import Any

import torch
from torch import Tensor


class EmptyExpertSteps:
    """Allocates what the GPU kernels allocate. Kernels that gather rows by token need nothing beside their results."""

    def __init__(self, ends_E: Tensor) -> None:
        self.num_experts = len(ends_E)

    def up(self, x_XD: Tensor, rows: Any, weight_R: Tensor, gate_up_EXD: Tensor, bias: Any) -> tuple[Tensor, Tensor]:
        gate_up_dim = gate_up_EXD.shape[1]
        return x_XD.new_empty(len(weight_R), gate_up_dim), x_XD.new_empty(len(weight_R), gate_up_dim // 2)

    def down(self, act_RH: Tensor, down_EDH: Tensor) -> Tensor:
        return act_RH.new_empty(len(act_RH), down_EDH.shape[1])

    def act_grad(
        self, grad_XD: Tensor, rows: Any, weight_R: Tensor, down_EDH: Tensor, gate_up_RX: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        expert_dim = down_EDH.shape[2]
        # Without gathered rows torch's grouped GEMM runs first, and its result is live while one kernel makes the rest.
        gemm_RH = None if rows is not None else grad_XD.new_empty(len(weight_R), expert_dim)
        grads = torch.empty_like(gate_up_RX), grad_XD.new_empty(len(weight_R), expert_dim), torch.empty_like(weight_R)
        del gemm_RH
        return grads

    def input_grad(self, grad_RX: Tensor, gate_up_EXD: Tensor) -> Tensor:
        return grad_RX.new_empty(len(grad_RX), gate_up_EXD.shape[2])

    def up_grad(self, grad_RX: Tensor, x_XD: Tensor, rows: Any, main_grad: Tensor | None = None) -> Tensor | None:
        return None if main_grad is not None else x_XD.new_empty(self.num_experts, grad_RX.shape[1], x_XD.shape[1])

    def down_grad(self, grad_XD: Tensor, rows: Any, act_RH: Tensor, main_grad: Tensor | None = None) -> Tensor | None:
        return None if main_grad is not None else grad_XD.new_empty(self.num_experts, grad_XD.shape[1], act_RH.shape[1])

    def sum_rows(self, y_RD: Tensor, row_TK: Tensor) -> Tensor:
        return y_RD.new_empty(len(row_TK), y_RD.shape[1])


def empty_expert_steps(ctx: Any, ends_E: Tensor, num_rows: int) -> EmptyExpertSteps:
    """Replaces the engine's choice of kernels, so it has the same arguments."""
    return EmptyExpertSteps(ends_E)
