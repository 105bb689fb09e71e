"""The steps of the experts on a GPU: each by a kernel of ours, by one of quack's (`cute`), or by torch's grouped
product with the rest in passes of ours beside it. `reference.Reference` has the same steps in plain torch.

Shapes: T tokens, R rows (token copies sorted by expert), D model dim, E experts, H expert dim, X = 2 H, K experts of a
token; x_XD and grad_XD have a row for each token where `rows` are given, else for each row.
"""

import torch.nn.functional as F
from torch import Tensor

from threefold.engine.kernels import act_grad, cute, elementwise, product, up, weight_grad
from threefold.engine.kernels.choose import Choice
from threefold.engine.kernels.launch import Config, CuteConfig
from threefold.engine.kernels.sort import Rows, expert_of
from threefold.engine.kernels.tiles import Tiles, order_of, tiles_of


class Steps:
    def __init__(
        self, ends_E: Tensor, num_rows: int, clamped: bool, choice: Choice, starts_F: Tensor | None = None
    ) -> None:
        self.ends_E, self.clamped, self.choice = ends_E, clamped, choice
        self._tiles: dict[int, Tiles] = {}
        self._num_rows = num_rows
        self._gathered: tuple[Tensor, Tensor] | None = None
        self._starts = starts_F
        self._by_rows: Tensor | None = None

    def up(
        self, x_XD: Tensor, rows: Rows | None, weight_R: Tensor, gate_up_EXD: Tensor, bias_EX: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        config = self.choice.up
        if isinstance(config, CuteConfig):
            return cute.up(x_XD, _tokens(rows), weight_R, gate_up_EXD, self._edges, config)
        if config is not None:
            tiles = self.tiles(config.m)
            return up.up(x_XD, _tokens(rows), weight_R, gate_up_EXD, bias_EX, tiles, self.clamped, config)
        gate_up_RX = F.grouped_mm(self._rows(x_XD, rows), gate_up_EXD.mT, offs=self.ends_E)
        if bias_EX is not None:
            gate_up_RX += bias_EX[expert_of(self.ends_E, self._num_rows)]
        return gate_up_RX, elementwise.activated(gate_up_RX, weight_R, self.clamped)

    def down(self, act_RH: Tensor, down_EDH: Tensor) -> Tensor:
        config = self.choice.down
        if isinstance(config, CuteConfig):
            return cute.product(act_RH, down_EDH, self._edges, config)
        if config is not None:
            return product.product(act_RH, down_EDH, self.tiles(config.m), True, config)
        return F.grouped_mm(act_RH, down_EDH.mT, offs=self.ends_E)

    def act_grad(
        self, grad_XD: Tensor, rows: Rows | None, weight_R: Tensor, down_EDH: Tensor, gate_up_RX: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        config = self.choice.act_grad
        if isinstance(config, CuteConfig):
            return cute.act_grad(grad_XD, _tokens(rows), weight_R, down_EDH, gate_up_RX, self._edges, config)
        if config is not None:
            tiles = self.tiles(config.m)
            return act_grad.act_grad(
                grad_XD, _tokens(rows), weight_R, down_EDH, gate_up_RX, tiles, self.clamped, config
            )
        grad_RH = F.grouped_mm(self._rows(grad_XD, rows), down_EDH, offs=self.ends_E)
        return elementwise.activated_grad(grad_RH, gate_up_RX, weight_R, self.clamped)

    def input_grad(self, grad_RX: Tensor, gate_up_EXD: Tensor) -> Tensor:
        config = self.choice.input_grad
        if isinstance(config, CuteConfig):
            return cute.product(grad_RX, gate_up_EXD.mT, self._edges, config, self.choice.interleaved)
        if config is not None:
            return product.product(grad_RX, gate_up_EXD, self.tiles(config.m), False, config)
        return F.grouped_mm(grad_RX, gate_up_EXD, offs=self.ends_E)

    def up_grad(self, grad_RX: Tensor, x_XD: Tensor, rows: Rows | None, sink: Tensor | None = None) -> Tensor | None:
        """With a sink it is added there, and nothing comes back."""
        config = self.choice.up_grad
        if isinstance(config, Config):
            return weight_grad.weight_grad(
                grad_RX, x_XD, _tokens(rows), "right", self.ends_E, self._order, config, sink
            )
        if isinstance(config, CuteConfig):
            up_grad = x_XD.new_empty(len(self.ends_E), grad_RX.shape[1], x_XD.shape[1])
            edges = self._edges, config, self.choice.interleaved
            cute.weight_grad(x_XD, _tokens(rows), grad_RX, up_grad.mT, *edges)
        else:
            up_grad = F.grouped_mm(grad_RX.mT, self._rows(x_XD, rows), offs=self.ends_E)
        return _put(up_grad, sink)

    def down_grad(
        self, grad_XD: Tensor, rows: Rows | None, act_RH: Tensor, sink: Tensor | None = None
    ) -> Tensor | None:
        config = self.choice.down_grad
        if isinstance(config, Config):
            return weight_grad.weight_grad(
                grad_XD, act_RH, _tokens(rows), "left", self.ends_E, self._order, config, sink
            )
        if isinstance(config, CuteConfig):
            down_grad = act_RH.new_empty(len(self.ends_E), grad_XD.shape[1], act_RH.shape[1])
            cute.weight_grad(grad_XD, _tokens(rows), act_RH, down_grad, self._edges, config)
        else:
            down_grad = F.grouped_mm(self._rows(grad_XD, rows).mT, act_RH, offs=self.ends_E)
        return _put(down_grad, sink)

    def sum_rows(self, y_RD: Tensor, row_TK: Tensor) -> Tensor:
        return elementwise.sum_rows(y_RD, row_TK)

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
    def _edges(self) -> Tensor:
        if self._starts is None:
            self._starts = F.pad(self.ends_E, (1, 0))
        return self._starts

    @property
    def _order(self) -> Tensor:
        if self._by_rows is None:
            self._by_rows = order_of(self.ends_E)
        return self._by_rows


def _put(grad: Tensor, sink: Tensor | None) -> Tensor | None:
    if sink is None:
        return grad
    sink.add_(grad)
    return None


def _tokens(rows: Rows | None) -> Tensor | None:
    return None if rows is None else rows.token_R
