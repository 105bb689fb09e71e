"""The steps of the fused experts for tensors without memory: empty results of the sizes that GPU kernels return.

`use_gpu_operators` puts `empty_expert_steps` in place of the function that chooses the kernels of
`engine/kernels/experts/fused_experts.py`. The methods are those of `GpuSteps` in `gpu_steps.py`, which also explains
the shape letters.
"""

from typing import Any

import torch
from torch import Tensor

WIDEST_IN_PLACE = 1024  # the widest expert whose weight gradients our kernels compute from tokens (`default_choice`)


class EmptyExpertSteps:
    """Allocates what the default kernels on a GPU allocate.

    Ours gather rows as they read them, and add to `main_grad` as they store. torch's grouped GEMM, which computes the
    weight gradients of wide experts and of given rows, does neither.
    """

    def __init__(self, ends_E: Tensor) -> None:
        self.num_experts = len(ends_E)
        self._gathered: tuple[Tensor, Tensor] | None = None  # a tensor by token, and the same by row

    def up(self, x_XD: Tensor, rows: Any, weight_R: Tensor, gate_up_EXD: Tensor, bias: Any) -> tuple[Tensor, Tensor]:
        gate_up_dim = gate_up_EXD.shape[1]
        return x_XD.new_empty(len(weight_R), gate_up_dim), x_XD.new_empty(len(weight_R), gate_up_dim // 2)

    def down(self, act_RH: Tensor, down_EDH: Tensor, rows: Any) -> Tensor:
        return self._to_tokens(act_RH.new_empty(len(act_RH), down_EDH.shape[1]), rows)

    def act_grad(
        self, grad_XD: Tensor, rows: Any, weight_R: Tensor, down_EDH: Tensor, gate_up_RX: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        expert_dim = down_EDH.shape[2]
        # Without gathered rows torch's grouped GEMM runs first, and its result is live while one kernel makes the rest.
        gemm_RH = None if rows is not None else grad_XD.new_empty(len(weight_R), expert_dim)
        grads = torch.empty_like(gate_up_RX), grad_XD.new_empty(len(weight_R), expert_dim), torch.empty_like(weight_R)
        del gemm_RH
        return grads

    def input_grad(self, grad_RX: Tensor, gate_up_EXD: Tensor, rows: Any) -> Tensor:
        return self._to_tokens(grad_RX.new_empty(len(grad_RX), gate_up_EXD.shape[2]), rows)

    def _to_tokens(self, y_RD: Tensor, rows: Any) -> Tensor:
        return y_RD if rows is None or rows.target_R is not None else y_RD.new_empty(len(rows.row_TK), y_RD.shape[1])

    def up_grad(
        self, grad_RX: Tensor, x_XD: Tensor, rows: Any, main_grad: Tensor | None = None, squares: Any = None
    ) -> Tensor | None:
        self._gather_for_torch(x_XD, grad_RX, rows, grad_RX.shape[1] // 2)
        if main_grad is not None and self._gathers_in_place(rows, grad_RX.shape[1] // 2):
            return None
        grad_EXD = x_XD.new_empty(self.num_experts, grad_RX.shape[1], x_XD.shape[1])
        return grad_EXD if main_grad is None else None

    def down_grad(
        self, grad_XD: Tensor, rows: Any, act_RH: Tensor, main_grad: Tensor | None = None, squares: Any = None
    ) -> Tensor | None:
        self._gather_for_torch(grad_XD, act_RH, rows, act_RH.shape[1])
        if main_grad is not None and self._gathers_in_place(rows, act_RH.shape[1]):
            return None
        grad_EDH = grad_XD.new_empty(self.num_experts, grad_XD.shape[1], act_RH.shape[1])
        return grad_EDH if main_grad is None else None

    def _gathers_in_place(self, rows: Any, expert_dim: int) -> bool:
        return rows is not None and (expert_dim <= WIDEST_IN_PLACE or rows.target_R is not None)

    def _gather_for_torch(self, by_token_XD: Tensor, by_row_RX: Tensor, rows: Any, expert_dim: int) -> None:
        """The rows of tokens, as torch's grouped GEMM reads them; the last ones are kept for the next step."""
        known = self._gathered is not None and self._gathered[0] is by_token_XD
        if rows is not None and not self._gathers_in_place(rows, expert_dim) and not known:
            self._gathered = by_token_XD, self._gather(by_token_XD, len(by_row_RX))

    def _gather(self, x_TD: Tensor, num_rows: int) -> Tensor:
        return x_TD.new_empty(num_rows, x_TD.shape[1])


def empty_expert_steps(ctx: Any, ends_E: Tensor, num_rows: int) -> EmptyExpertSteps:
    """Replaces the engine's choice of kernels, so it has the same arguments."""
    return EmptyExpertSteps(ends_E)
