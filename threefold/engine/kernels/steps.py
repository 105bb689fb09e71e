"""The steps of the experts on a GPU: each by a kernel of ours, or by torch's products with the rest in one pass of ours
beside them. `reference.Reference` has the same steps in plain torch.

Shapes: T tokens, R rows (token copies sorted by expert), D model dim, E experts, H expert dim, X = 2 H, K experts of a
token; x_XD and grad_XD have a row for each token where `rows` are given, else for each row.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from threefold.engine.kernels import act_grad, elementwise, product, up, weight_grad
from threefold.engine.kernels.choose import EACH, Choice
from threefold.engine.kernels.launch import Config
from threefold.engine.kernels.sort import Rows
from threefold.engine.kernels.tiles import Tiles, tiles_of


class Steps:
    """`counts`: rows of each expert, where the host knows them."""

    def __init__(
        self, ends_E: Tensor, num_rows: int, clamped: bool, choice: Choice, counts: Sequence[int] | None = None
    ) -> None:
        self.ends_E, self.clamped, self.choice = ends_E, clamped, choice
        self._tiles: dict[int, Tiles] = {}
        self._num_rows = num_rows
        ends = None if counts is None else [0, *accumulate(counts)]
        self._parts = None if ends is None else [slice(*pair) for pair in pairwise(ends)]
        self._gathered: tuple[Tensor, Tensor] | None = None

    def up(
        self, x_XD: Tensor, rows: Rows | None, weight_R: Tensor, gate_up_EXD: Tensor, bias_EX: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        config = self.choice.up
        if isinstance(config, Config):
            tiles = self.tiles(config.m)
            return up.up(x_XD, _tokens(rows), weight_R, gate_up_EXD, bias_EX, tiles, self.clamped, config)
        gate_up_RX = self._product(config, self._rows(x_XD, rows), gate_up_EXD.mT)
        if bias_EX is not None:
            gate_up_RX += bias_EX[self._experts]
        return gate_up_RX, elementwise.activated(gate_up_RX, weight_R, self.clamped)

    def down(self, act_RH: Tensor, down_EDH: Tensor) -> Tensor:
        config = self.choice.down
        if isinstance(config, Config):
            return product.product(act_RH, down_EDH, self.tiles(config.m), True, config)
        return self._product(config, act_RH, down_EDH.mT)

    def act_grad(
        self, grad_XD: Tensor, rows: Rows | None, weight_R: Tensor, down_EDH: Tensor, gate_up_RX: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        config = self.choice.act_grad
        if isinstance(config, Config):
            tiles = self.tiles(config.m)
            return act_grad.act_grad(
                grad_XD, _tokens(rows), weight_R, down_EDH, gate_up_RX, tiles, self.clamped, config
            )
        grad_RH = self._product(config, self._rows(grad_XD, rows), down_EDH)
        return elementwise.activated_grad(grad_RH, gate_up_RX, weight_R, self.clamped)

    def input_grad(self, grad_RX: Tensor, gate_up_EXD: Tensor) -> Tensor:
        config = self.choice.input_grad
        if isinstance(config, Config):
            return product.product(grad_RX, gate_up_EXD, self.tiles(config.m), False, config)
        return self._product(config, grad_RX, gate_up_EXD)

    def up_grad(self, grad_RX: Tensor, x_XD: Tensor, rows: Rows | None) -> Tensor:
        config = self.choice.up_grad
        if isinstance(config, Config):
            return weight_grad.weight_grad(grad_RX, x_XD, _tokens(rows), "right", self.ends_E, config)
        return self._weight_grad(config, grad_RX, self._rows(x_XD, rows))

    def down_grad(self, grad_XD: Tensor, rows: Rows | None, act_RH: Tensor) -> Tensor:
        config = self.choice.down_grad
        if isinstance(config, Config):
            return weight_grad.weight_grad(grad_XD, act_RH, _tokens(rows), "left", self.ends_E, config)
        return self._weight_grad(config, self._rows(grad_XD, rows), act_RH)

    def sum_rows(self, y_RD: Tensor, row_TK: Tensor) -> Tensor:
        return elementwise.sum_rows(y_RD, row_TK)

    def _product(self, how: str | None, a_RI: Tensor, weight_EIO: Tensor) -> Tensor:
        if how != EACH or self._parts is None:
            return F.grouped_mm(a_RI, weight_EIO, offs=self.ends_E)
        y_RO = a_RI.new_empty(len(a_RI), weight_EIO.shape[2])
        for part, weight_IO in zip(self._parts, weight_EIO, strict=True):
            torch.mm(a_RI[part], weight_IO, out=y_RO[part])
        return y_RO

    def _weight_grad(self, how: str | None, left_RM: Tensor, right_RN: Tensor) -> Tensor:
        if how != EACH or self._parts is None:
            return F.grouped_mm(left_RM.mT, right_RN, offs=self.ends_E)
        grad_EMN = left_RM.new_empty(len(self._parts), left_RM.shape[1], right_RN.shape[1])
        for part, grad_MN in zip(self._parts, grad_EMN, strict=True):
            torch.mm(left_RM[part].mT, right_RN[part], out=grad_MN)
        return grad_EMN

    def tiles(self, size: int) -> Tiles:
        if size not in self._tiles:
            self._tiles[size] = tiles_of(self.ends_E, self._num_rows, size)
        return self._tiles[size]

    def _rows(self, x_XD: Tensor, rows: Rows | None) -> Tensor:
        """Kept for the next step that wants the same rows: two of the backward do."""
        if rows is None:
            return x_XD
        if self._gathered is None or self._gathered[0] is not x_XD:
            self._gathered = x_XD, elementwise.take_rows(x_XD, rows.row_TK)
        return self._gathered[1]

    @property
    def _experts(self) -> Tensor:
        """Of each row."""
        row_R = torch.arange(self._num_rows, dtype=torch.int32, device=self.ends_E.device)
        return torch.searchsorted(self.ends_E, row_R, right=True)


def _tokens(rows: Rows | None) -> Tensor | None:
    return None if rows is None else rows.token_R
