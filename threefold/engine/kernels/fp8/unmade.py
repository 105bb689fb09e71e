"""The steps of the FP8 experts in a rehearsal: what the kernels would allocate, and nothing computed.

Shapes: as in `steps.py`.
"""

import torch
from torch import Tensor

from threefold.engine.kernels.fp8.format import (
    BLOCK,
    E4M3,
    Columns8,
    Rows8,
    Weight8,
    most_blocks,
    num_blocks,
)
from threefold.engine.kernels.sort import Rows


class Unmade8:
    whole_rows = False  # one scale for each

    def __init__(self, ends_E: Tensor, num_rows: int, clamped: bool) -> None:
        self.num_rows, self.num_experts = num_rows, len(ends_E)
        self.num = most_blocks(num_rows, len(ends_E))

    def quantize(self, x_XK: Tensor, rows: Rows | None, by_column: bool, square: bool) -> tuple[Rows8, Columns8 | None]:
        width = x_XK.shape[1]
        return self._rows(x_XK, width), self._columns(x_XK, width, square) if by_column else None

    def product(self, a8: Rows8, value_ENK: Tensor, scale: Tensor) -> Tensor:
        return value_ENK.new_empty(self.num_rows, value_ENK.shape[1], dtype=torch.bfloat16)

    def weight_grad(self, left8: Columns8, right8: Columns8, dtype: torch.dtype) -> Tensor:
        shape = self.num_experts, len(left8.value_KP), len(right8.value_KP)
        return left8.value_KP.new_empty(shape, dtype=dtype)

    def activated(self, gate_up_RX: Tensor, weight_R: Tensor) -> Rows8:
        return self._rows(gate_up_RX, gate_up_RX.shape[1] // 2)

    def activated_grad(
        self, grad_RH: Tensor, gate_up_RX: Tensor, weight_R: Tensor, up: bool, act: bool
    ) -> tuple[Rows8, Columns8 | None, Columns8 | None, Tensor]:
        half = grad_RH.shape[1]
        up8 = self._columns(grad_RH, 2 * half, square=False) if up else None
        act8 = self._columns(grad_RH, half, square=True) if act else None
        return self._rows(grad_RH, 2 * half), up8, act8, torch.empty_like(weight_R)

    def sum_rows(self, y_RD: Tensor, row_TK: Tensor) -> Tensor:
        return y_RD.new_empty(len(row_TK), y_RD.shape[1])

    def _rows(self, like: Tensor, width: int) -> Rows8:
        num = 1 if self.whole_rows else num_blocks(width)
        value_RK = like.new_empty(self.num_rows, width, dtype=E4M3)
        return Rows8(value_RK, like.new_empty(num, self.num_rows, dtype=torch.float32))

    def _columns(self, like: Tensor, width: int, square: bool) -> Columns8:
        value_KP = like.new_empty(width, self.num * BLOCK, dtype=E4M3)
        num = num_blocks(width) if square else width
        return Columns8(value_KP, like.new_empty(self.num, num, dtype=torch.float32))


class RowUnmade8(Unmade8):
    whole_rows = True


def unmade_weight(weight_EOI: Tensor, whole_rows: bool) -> Weight8:
    num, outer, inner = weight_EOI.shape
    new = weight_EOI.new_empty
    value, turned = new(num, outer, inner, dtype=E4M3), new(num, inner, outer, dtype=E4M3)
    if whole_rows:
        return Weight8(value, turned, new(num, outer, dtype=torch.float32), new(num, inner, dtype=torch.float32))
    scale = new(num, num_blocks(outer), num_blocks(inner), dtype=torch.float32)
    return Weight8(value, turned, scale, scale.mT)
