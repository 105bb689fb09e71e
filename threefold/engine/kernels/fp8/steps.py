"""The steps of the FP8 experts on a GPU. `reference.Reference8` and `RowReference8` have the same in plain torch.

Shapes: R rows sorted by expert, K columns, E experts, H expert dim, X = 2 H, N columns of a result; x_XK has a row for
each token where `rows` are given, else for each row.
"""

from functools import cache

import torch
import triton  # type: ignore
from torch import Tensor

from threefold.engine.kernels import elementwise
from threefold.engine.kernels.fp8 import activation, product, quantize, rowwise, weight_grad
from threefold.engine.kernels.fp8.format import BLOCK, Blocks, Columns8, Rows8
from threefold.engine.kernels.launch import Config
from threefold.engine.kernels.sort import Rows
from threefold.engine.kernels.tiles import tiles_of

_PLAIN = Config(m=128, n=128, k=128, stages=4)
_HOPPER = Config(m=128, n=256, k=128, stages=4)
_HOPPER_TURNED = Config(m=128, n=256, k=128, stages=4, group=4)
_HOPPER_WIDE = Config(m=128, n=256, k=128, stages=3, group=4)  # a result in fp32 takes more room
_GLUON = (3, 6), (3, 8)  # from which release of triton, and up to which, `hopper.py` compiles


@cache
def on_hopper(device: torch.device) -> bool:
    release = tuple(int(part) for part in triton.__version__.split(".")[:2])
    known = _GLUON[0] <= release < _GLUON[1] and device.type == "cuda"
    return known and torch.cuda.get_device_capability(device)[0] == 9


class Steps8:
    """`ends_E`: the end of each expert's rows."""

    def __init__(self, ends_E: Tensor, num_rows: int, clamped: bool) -> None:
        self.clamped, self.ends_E, self.on_hopper = clamped, ends_E, on_hopper(ends_E.device)
        self.tiles = tiles_of(ends_E, num_rows, BLOCK)
        self.blocks = Blocks(self.tiles.table, self.tiles.total, quantize.block_ends(ends_E))

    def quantize(self, x_XK: Tensor, rows: Rows | None, by_column: bool, square: bool) -> tuple[Rows8, Columns8 | None]:
        rows8, columns8 = quantize.quantize(x_XK, _tokens(rows), self.blocks, True, by_column, square)
        assert rows8 is not None
        return rows8, columns8

    def product(self, a8: Rows8, value_ENK: Tensor, scale: Tensor) -> Tensor:
        if self.on_hopper:
            from threefold.engine.kernels.fp8 import grouped

            return grouped.product(a8, value_ENK, scale, self.tiles, _HOPPER)
        return product.product(a8, value_ENK, scale, self.tiles, _PLAIN)

    def weight_grad(self, left8: Columns8, right8: Columns8, dtype: torch.dtype) -> Tensor:
        if self.on_hopper:
            from threefold.engine.kernels.fp8 import grouped

            config = _HOPPER_WIDE if dtype == torch.float32 else _HOPPER_TURNED
            return grouped.weight_grad(left8, right8, self.blocks.ends_E, dtype, config)
        return weight_grad.weight_grad(left8, right8, self.blocks.ends_E, dtype, _PLAIN)

    def activated(self, gate_up_RX: Tensor, weight_R: Tensor) -> Rows8:
        return activation.activated(gate_up_RX, weight_R, self.clamped)

    def activated_grad(
        self, grad_RH: Tensor, gate_up_RX: Tensor, weight_R: Tensor, up: bool, act: bool
    ) -> tuple[Rows8, Columns8 | None, Columns8 | None, Tensor]:
        given = grad_RH, gate_up_RX, weight_R
        rows8, largest_CR, weight_grad_R = self._grad_rows(*given, self.clamped)
        columns = activation.activated_columns(*given, largest_CR, self.blocks, self.clamped, up, act)
        return rows8, *columns, weight_grad_R

    _grad_rows = staticmethod(activation.activated_grad)

    def sum_rows(self, y_RD: Tensor, row_TK: Tensor) -> Tensor:
        return elementwise.sum_rows(y_RD, row_TK)


class RowSteps8(Steps8):
    """One scale a row. Gradients of weights sum over blocks of rows all the same."""

    _grad_rows = staticmethod(rowwise.activated_grad)

    def quantize(self, x_XK: Tensor, rows: Rows | None, by_column: bool, square: bool) -> tuple[Rows8, Columns8 | None]:
        rows8 = rowwise.quantize_rows(x_XK, _tokens(rows))
        if not by_column:
            return rows8, None
        return rows8, quantize.quantize(x_XK, _tokens(rows), self.blocks, False, True, square)[1]

    def product(self, a8: Rows8, value_ENK: Tensor, scale: Tensor) -> Tensor:
        if self.on_hopper:
            return super().product(a8, value_ENK, scale)
        # Without fast accumulation, as its sums keep about 14 bits however many numbers they are of.
        return torch._scaled_grouped_mm(
            a8.value_RK, value_ENK.mT, a8.scale_CR[0], scale, offs=self.ends_E, out_dtype=torch.bfloat16,
            use_fast_accum=False,
        )  # fmt: skip

    def activated(self, gate_up_RX: Tensor, weight_R: Tensor) -> Rows8:
        return rowwise.activated(gate_up_RX, weight_R, self.clamped)


def _tokens(rows: Rows | None) -> Tensor | None:
    return None if rows is None else rows.token_R
