"""The steps of the experts in plain torch, one expert after another: the slow reference for any device and dtype.

`gpu_steps.GpuSteps` has the same methods; `kernel_choice.py` says what each step is, and `fused_experts.py` calls them.
The reference steps copy the row counts to the host, so they synchronize.

Shapes: T tokens, R rows (token copies sorted by expert), D model dim, E experts, H expert dim, K experts of a token. As
a dim of weights and of FC1's output X is 2 H (gate and up). As the first dim of x_XD and grad_XD it is T where `rows`
are given, because the step gathers the rows then, and R otherwise.
"""

from itertools import accumulate, pairwise

import torch
from torch import Tensor

from threefold.engine.autograd.grad_squares import GradSquares
from threefold.engine.autograd.main_grad import accumulate_gemm
from threefold.engine.dist.host_sizes import host_sizes
from threefold.engine.kernels.elementwise.swiglu_torch import gated_activation
from threefold.engine.kernels.experts.sorted_rows import SortedRows


class ReferenceSteps:
    """Forward and backward of experts whose rows end at `ends_E`."""

    def __init__(self, ends_E: Tensor, num_rows: int, clamped: bool) -> None:
        self.clamped = clamped
        sizes = host_sizes(ends_E.diff(prepend=ends_E.new_zeros(1)), num_rows)
        self.parts = [slice(a, b) for a, b in pairwise(accumulate(sizes, initial=0))]

    def up(
        self, x_XD: Tensor, rows: SortedRows | None, weight_R: Tensor, gate_up_EXD: Tensor, bias_EX: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """-> (FC1's output, the activation times the router weight)."""
        gate_up_RX = self._matmul_by_expert(_gather_rows(x_XD, rows), gate_up_EXD.mT)
        if bias_EX is not None:
            for expert, part in enumerate(self.parts):
                gate_up_RX[part] += bias_EX[expert]
        return gate_up_RX, self._weighted_activation(gate_up_RX, weight_R)[1]

    def down(self, act_RH: Tensor, down_EDH: Tensor, rows: SortedRows | None) -> Tensor:
        """FC2, summed by token where `rows` are given."""
        return _sum_rows(self._matmul_by_expert(act_RH, down_EDH.mT), rows)

    def act_grad(
        self, grad_XD: Tensor, rows: SortedRows | None, weight_R: Tensor, down_EDH: Tensor, gate_up_RX: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """-> (gradient of FC1's output, the weighted activation, the gradient of the router weights)."""
        grad_RH = self._matmul_by_expert(_gather_rows(grad_XD, rows), down_EDH)
        with torch.enable_grad():
            gate_up_RX, weight_R = gate_up_RX.detach().requires_grad_(), weight_R.detach().requires_grad_()
            unrounded_RH, act_RH = self._weighted_activation(gate_up_RX, weight_R)
            grads = torch.autograd.grad(unrounded_RH, (gate_up_RX, weight_R), grad_RH.to(unrounded_RH.dtype))
        return grads[0], act_RH.detach(), grads[1]

    def input_grad(self, grad_RX: Tensor, gate_up_EXD: Tensor, rows: SortedRows | None) -> Tensor:
        """The gradient of FC1's input, summed by token where `rows` are given."""
        return _sum_rows(self._matmul_by_expert(grad_RX, gate_up_EXD), rows)

    def up_grad(
        self,
        grad_RX: Tensor,
        x_XD: Tensor,
        rows: SortedRows | None,
        main_grad: Tensor | None = None,
        squares: GradSquares | None = None,
    ) -> Tensor | None:
        """The weight gradient of FC1; with a `main_grad` it is added there, and None comes back. `squares` stay empty:
        the gradient norm reads the gradient."""
        return self._wgrad(grad_RX, _gather_rows(x_XD, rows), main_grad)

    def down_grad(
        self,
        grad_XD: Tensor,
        rows: SortedRows | None,
        act_RH: Tensor,
        main_grad: Tensor | None = None,
        squares: GradSquares | None = None,
    ) -> Tensor | None:
        return self._wgrad(_gather_rows(grad_XD, rows), act_RH, main_grad)

    def _wgrad(self, left_RM: Tensor, right_RN: Tensor, main_grad: Tensor | None) -> Tensor | None:
        if main_grad is None:
            return torch.stack([left_RM[part].mT @ right_RN[part] for part in self.parts])
        for total, part in zip(main_grad, self.parts, strict=True):
            accumulate_gemm(total, left_RM[part].mT, right_RN[part], main_grad.dtype)
        return None

    def _matmul_by_expert(self, a_RI: Tensor, weight_EIO: Tensor) -> Tensor:
        return torch.cat([a_RI[part] @ weight for part, weight in zip(self.parts, weight_EIO, strict=True)])

    def _weighted_activation(self, gate_up_RX: Tensor, weight_R: Tensor) -> tuple[Tensor, Tensor]:
        """-> (the weighted activation in the router's precision, the same rounded once to the dtype of the rows)."""
        gate_RH, up_RH = gate_up_RX.to(weight_R.dtype).chunk(2, dim=-1)
        act_RH = gated_activation(gate_RH, up_RH, self.clamped) * weight_R[:, None]
        return act_RH, act_RH.to(gate_up_RX.dtype)


def _sum_rows(y_RD: Tensor, rows: SortedRows | None) -> Tensor:
    return y_RD if rows is None else y_RD[rows.row_TK].sum(dim=1)


def _gather_rows(x_XD: Tensor, rows: SortedRows | None) -> Tensor:
    return x_XD if rows is None else x_XD[rows.token_R]
