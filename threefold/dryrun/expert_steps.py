"""The fused experts' steps with the results of the GPU's kernels, where there are none to launch.

Shapes: as in `engine/kernels/steps.py`.
"""

from typing import Any

import torch
from torch import Tensor


class EmptySteps:
    """Where rows are read at their tokens our own kernels run, which need nothing beside their results."""

    def __init__(self, ends_E: Tensor, clamped: bool = False) -> None:
        self.num_experts = len(ends_E)

    def up(self, x_XD: Tensor, rows: Any, weight_R: Tensor, gate_up_EXD: Tensor, bias: Any) -> tuple[Tensor, Tensor]:
        wide = gate_up_EXD.shape[1]
        return x_XD.new_empty(len(weight_R), wide), x_XD.new_empty(len(weight_R), wide // 2)

    def down(self, act_RH: Tensor, down_EDH: Tensor) -> Tensor:
        return act_RH.new_empty(len(act_RH), down_EDH.shape[1])

    def act_grad(
        self, grad_XD: Tensor, rows: Any, weight_R: Tensor, down_EDH: Tensor, gate_up_RX: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        half = down_EDH.shape[2]
        product_RH = None if rows is not None else grad_XD.new_empty(len(weight_R), half)
        made = torch.empty_like(gate_up_RX), grad_XD.new_empty(len(weight_R), half), torch.empty_like(weight_R)
        del product_RH  # torch's grouped product, behind which one pass makes the rest
        return made

    def input_grad(self, grad_RX: Tensor, gate_up_EXD: Tensor) -> Tensor:
        return grad_RX.new_empty(len(grad_RX), gate_up_EXD.shape[2])

    def up_grad(self, grad_RX: Tensor, x_XD: Tensor, rows: Any, sink: Tensor | None = None) -> Tensor | None:
        return None if sink is not None else x_XD.new_empty(self.num_experts, grad_RX.shape[1], x_XD.shape[1])

    def down_grad(self, grad_XD: Tensor, rows: Any, act_RH: Tensor, sink: Tensor | None = None) -> Tensor | None:
        return None if sink is not None else grad_XD.new_empty(self.num_experts, grad_XD.shape[1], act_RH.shape[1])

    def sum_rows(self, y_RD: Tensor, row_TK: Tensor) -> Tensor:
        return y_RD.new_empty(len(row_TK), y_RD.shape[1])


def steps_for(ctx: Any, ends_E: Tensor, num_rows: int) -> EmptySteps:
    return EmptySteps(ends_E)
