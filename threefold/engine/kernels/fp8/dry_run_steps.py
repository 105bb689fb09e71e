"""The steps of the FP8 experts in a dry run: they allocate what the GPU kernels would, and compute nothing.

`fused_experts` uses them on fake tensors. Shapes: as in `gpu_steps`.
"""

import torch
from torch import Tensor

from threefold.engine.kernels.experts.sorted_rows import SortedRows
from threefold.engine.kernels.fp8.quantized_tensors import (
    BLOCK,
    E4M3,
    Fp8Columns,
    Fp8Rows,
    Fp8Weight,
    max_row_blocks,
    num_blocks,
)


class BlockwiseSimulatedSteps:
    """The sizes of the blockwise recipe."""

    rowwise = False  # whether a row has one scale, not one for each block

    def __init__(self, ends_E: Tensor, num_rows: int, clamped: bool) -> None:
        self.num_rows, self.num_experts = num_rows, len(ends_E)
        self.max_blocks = max_row_blocks(num_rows, len(ends_E))

    def quantize(
        self, x_XK: Tensor, rows: SortedRows | None, with_columns: bool, square: bool
    ) -> tuple[Fp8Rows, Fp8Columns | None]:
        width = x_XK.shape[1]
        return self._rows(x_XK, width), self._columns(x_XK, width, square) if with_columns else None

    def grouped_gemm(self, a_fp8: Fp8Rows, value_ENK: Tensor, scale: Tensor, rows: SortedRows | None = None) -> Tensor:
        y_RN = value_ENK.new_empty(self.num_rows, value_ENK.shape[1], dtype=torch.bfloat16)
        return y_RN if rows is None or rows.target_R is not None else y_RN.new_empty(len(rows.row_TK), y_RN.shape[1])

    def wgrad(
        self, left_fp8: Fp8Columns, right_fp8: Fp8Columns, dtype: torch.dtype, main_grad: Tensor | None = None
    ) -> Tensor | None:
        if main_grad is not None:
            return None
        shape = self.num_experts, len(left_fp8.value_KP), len(right_fp8.value_KP)
        return left_fp8.value_KP.new_empty(shape, dtype=dtype)

    def swiglu(self, gate_up_RX: Tensor, weight_R: Tensor) -> Fp8Rows:
        return self._rows(gate_up_RX, gate_up_RX.shape[1] // 2)

    def swiglu_grad(
        self, grad_RH: Tensor, gate_up_RX: Tensor, weight_R: Tensor, wants_gate_up: bool, wants_act: bool
    ) -> tuple[Fp8Rows, Fp8Columns | None, Fp8Columns | None, Tensor]:
        expert_dim = grad_RH.shape[1]
        up_fp8 = self._columns(grad_RH, 2 * expert_dim, square=False) if wants_gate_up else None
        act_fp8 = self._columns(grad_RH, expert_dim, square=True) if wants_act else None
        return self._rows(grad_RH, 2 * expert_dim), up_fp8, act_fp8, torch.empty_like(weight_R)

    def _rows(self, like: Tensor, width: int) -> Fp8Rows:
        num = 1 if self.rowwise else num_blocks(width)
        value_RK = like.new_empty(self.num_rows, width, dtype=E4M3)
        return Fp8Rows(value_RK, like.new_empty(num, self.num_rows, dtype=torch.float32))

    def _columns(self, like: Tensor, width: int, square: bool) -> Fp8Columns:
        value_KP = like.new_empty(width, self.max_blocks * BLOCK, dtype=E4M3)
        num = num_blocks(width) if square else width
        return Fp8Columns(value_KP, like.new_empty(self.max_blocks, num, dtype=torch.float32))


class RowwiseSimulatedSteps(BlockwiseSimulatedSteps):
    """The sizes of the rowwise recipe."""

    rowwise = True


def empty_weight(weight_EOI: Tensor, rowwise: bool) -> Fp8Weight:
    """A quantized weight of these sizes, not initialized."""
    num, outer, inner = weight_EOI.shape
    new = weight_EOI.new_empty
    value, transposed = new(num, outer, inner, dtype=E4M3), new(num, inner, outer, dtype=E4M3)
    if rowwise:
        return Fp8Weight(value, transposed, new(num, outer, dtype=torch.float32), new(num, inner, dtype=torch.float32))
    scale = new(num, num_blocks(outer), num_blocks(inner), dtype=torch.float32)
    return Fp8Weight(value, transposed, scale, scale.mT)
