"""The steps of the experts on a GPU, each with the kernel that a `KernelChoice` names.

A step runs as one kernel of ours in Triton (on Hopper some also in Gluon), as one CuTe kernel of quack, or as torch's
grouped GEMM with row-wise kernels of ours beside it. `reference_steps.ReferenceSteps` has the same methods
in plain torch, and `fused_experts.py` calls both.

Shapes: T tokens, R rows (token copies sorted by expert), D model dim, E experts, H expert dim, K experts of a token. As
a dim of weights and of FC1's output X is 2 H (gate and up). As the first dim of x_XD and grad_XD it is T where `rows`
are given, because the step gathers the rows then, and R otherwise.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from threefold.engine.autograd.grad_squares import GradSquares
from threefold.engine.autograd.main_grad import add_to_main_grad
from threefold.engine.kernels.experts import quack_kernels, row_kernels
from threefold.engine.kernels.experts.fc1_forward import fc1_forward
from threefold.engine.kernels.experts.fc2_backward import fc2_backward
from threefold.engine.kernels.experts.grouped_gemm import grouped_gemm, grouped_wgrad
from threefold.engine.kernels.experts.kernel_choice import KernelChoice, StepConfig
from threefold.engine.kernels.experts.sorted_rows import SortedRows, expert_of_rows
from threefold.engine.kernels.experts.tile_schedule import TileTable, experts_by_load, make_tile_table
from threefold.engine.kernels.launch_config import CuteConfig, GluonConfig, TritonConfig


class GpuSteps:
    """Forward or backward of experts whose rows end at `ends_E`. `starts_F` is `ends_E` with a zero in front.

    `tables` are the tile tables that an earlier pass has made, by rows and extra rows of a tile; new ones are added.
    """

    def __init__(
        self,
        ends_E: Tensor,
        num_rows: int,
        clamped: bool,
        choice: KernelChoice,
        starts_F: Tensor | None = None,
        tables: dict[tuple[int, int], TileTable] | None = None,
    ) -> None:
        self.ends_E, self.clamped, self.choice = ends_E, clamped, choice
        self._num_rows = num_rows
        # Each is made by the first step that needs it, and cached for the next.
        self._tiles = {} if tables is None else tables
        self._gathered: tuple[Tensor, Tensor] | None = None  # a tensor by token, and the same by row
        self._starts = starts_F
        self._order: Tensor | None = None

    def up(
        self, x_XD: Tensor, rows: SortedRows | None, weight_R: Tensor, gate_up_EXD: Tensor, bias_EX: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        config = self.choice.up
        if isinstance(config, CuteConfig):
            return quack_kernels.fc1_forward(x_XD, _token_index(rows), weight_R, gate_up_EXD, self._row_starts, config)
        if isinstance(config, TritonConfig):
            tiles = self._tile_table(config.m)
            return fc1_forward(x_XD, _token_index(rows), weight_R, gate_up_EXD, bias_EX, tiles, self.clamped, config)
        gate_up_RX = F.grouped_mm(self._gather(x_XD, rows), gate_up_EXD.mT, offs=self.ends_E)
        if bias_EX is not None:
            gate_up_RX += bias_EX[expert_of_rows(self.ends_E, self._num_rows)]
        return gate_up_RX, row_kernels.weighted_swiglu(gate_up_RX, weight_R, self.clamped)

    def down(self, act_RH: Tensor, down_EDH: Tensor, rows: SortedRows | None) -> Tensor:
        return self._gemm_to_tokens(self.choice.down, act_RH, down_EDH, True, rows)

    def act_grad(
        self, grad_XD: Tensor, rows: SortedRows | None, weight_R: Tensor, down_EDH: Tensor, gate_up_RX: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        config = self.choice.act_grad
        if isinstance(config, CuteConfig):
            return quack_kernels.fc2_backward(
                grad_XD, _token_index(rows), weight_R, down_EDH, gate_up_RX, self._row_starts, config
            )
        if isinstance(config, TritonConfig):
            tiles = self._tile_table(config.m)
            return fc2_backward(
                grad_XD, _token_index(rows), weight_R, down_EDH, gate_up_RX, tiles, self.clamped, config
            )
        grad_RH = F.grouped_mm(self._gather(grad_XD, rows), down_EDH, offs=self.ends_E)
        return row_kernels.weighted_swiglu_grad(grad_RH, gate_up_RX, weight_R, self.clamped)

    def input_grad(self, grad_RX: Tensor, gate_up_EXD: Tensor, rows: SortedRows | None) -> Tensor:
        return self._gemm_to_tokens(self.choice.input_grad, grad_RX, gate_up_EXD, False, rows)

    def _gemm_to_tokens(
        self, config: StepConfig, a_RK: Tensor, weight: Tensor, transposed: bool, rows: SortedRows | None
    ) -> Tensor:
        """The rows times the weights (E, N, K), or (E, K, N) where not `transposed`, summed by token with `rows`.

        Where each token has one row, our kernels store it there, and no pass over the rows follows.
        """
        target_R = None if rows is None else rows.target_R
        if isinstance(config, TritonConfig):
            y_RD = grouped_gemm(a_RK, weight, self._tile_table(config.m), transposed, config, target_R)
        elif isinstance(config, GluonConfig):
            from threefold.engine.kernels.experts.hopper import row_gemm

            tiles = self._tile_table(row_gemm.TILE_ROWS, row_gemm.EXTRA_ROWS)
            y_RD = row_gemm.grouped_gemm(a_RK, weight, tiles, transposed, config, target_R)
        elif isinstance(config, CuteConfig):
            weight_ENK, interleaved = weight if transposed else weight.mT, self.choice.interleaved and not transposed
            y_RD, target_R = quack_kernels.grouped_gemm(a_RK, weight_ENK, self._row_starts, config, interleaved), None
        else:
            y_RD, target_R = F.grouped_mm(a_RK, weight.mT if transposed else weight, offs=self.ends_E), None
        return y_RD if rows is None or target_R is not None else row_kernels.sum_rows(y_RD, rows.row_TK)

    def up_grad(
        self,
        grad_RX: Tensor,
        x_XD: Tensor,
        rows: SortedRows | None,
        main_grad: Tensor | None = None,
        squares: GradSquares | None = None,
    ) -> Tensor | None:
        """The weight gradient of FC1; with a `main_grad` it is added there, and None comes back.

        A kernel that can leaves the sums of the gradient's squares in `squares`.
        """
        config = self.choice.up_grad
        if isinstance(config, TritonConfig | GluonConfig):
            return self._wgrad(config, grad_RX, x_XD, rows, "right", main_grad, squares)
        if isinstance(config, CuteConfig):
            up_grad = x_XD.new_empty(len(self.ends_E), grad_RX.shape[1], x_XD.shape[1])
            layout = self._row_starts, config, self.choice.interleaved
            quack_kernels.grouped_wgrad(x_XD, _token_index(rows), grad_RX, up_grad.mT, *layout)
        else:
            up_grad = F.grouped_mm(grad_RX.mT, self._gather(x_XD, rows), offs=self.ends_E)
        return add_to_main_grad(up_grad, main_grad)

    def down_grad(
        self,
        grad_XD: Tensor,
        rows: SortedRows | None,
        act_RH: Tensor,
        main_grad: Tensor | None = None,
        squares: GradSquares | None = None,
    ) -> Tensor | None:
        config = self.choice.down_grad
        if isinstance(config, TritonConfig | GluonConfig):
            return self._wgrad(config, grad_XD, act_RH, rows, "left", main_grad, squares)
        if isinstance(config, CuteConfig):
            down_grad = act_RH.new_empty(len(self.ends_E), grad_XD.shape[1], act_RH.shape[1])
            quack_kernels.grouped_wgrad(grad_XD, _token_index(rows), act_RH, down_grad, self._row_starts, config)
        else:
            down_grad = F.grouped_mm(self._gather(grad_XD, rows).mT, act_RH, offs=self.ends_E)
        return add_to_main_grad(down_grad, main_grad)

    def _wgrad(
        self,
        config: TritonConfig | GluonConfig,
        left_XM: Tensor,
        right_XN: Tensor,
        rows: SortedRows | None,
        gathered: str,
        main_grad: Tensor | None,
        squares: GradSquares | None,
    ) -> Tensor | None:
        """A weight gradient by one of our kernels, which gather one side and add to a `main_grad` by themselves."""
        sides = left_XM, right_XN, _token_index(rows), gathered, self.ends_E, self._expert_order
        if isinstance(config, TritonConfig):
            return grouped_wgrad(*sides, config, main_grad)
        from threefold.engine.kernels.experts.hopper import wgrad

        if squares is None or main_grad is not None:
            return wgrad.grouped_wgrad(*sides, config, main_grad)
        sums_P = torch.empty(wgrad.num_squares(left_XM.device), dtype=torch.float32, device=left_XM.device)
        grad = wgrad.grouped_wgrad(*sides, config, squares_P=sums_P)
        assert grad is not None
        squares.note(grad, sums_P)
        return grad

    def _tile_table(self, size: int, extra: int = 0) -> TileTable:
        if (size, extra) not in self._tiles:
            self._tiles[size, extra] = make_tile_table(self.ends_E, self._num_rows, size, extra)
        return self._tiles[size, extra]

    def _gather(self, x_XD: Tensor, rows: SortedRows | None) -> Tensor:
        """x by row. The last result is cached, because two steps of the backward gather the same tensor."""
        if rows is None:
            return x_XD
        if self._gathered is None or self._gathered[0] is not x_XD:
            self._gathered = x_XD, row_kernels.gather_rows(x_XD, rows.row_TK)
        return self._gathered[1]

    @property
    def _row_starts(self) -> Tensor:
        if self._starts is None:
            self._starts = F.pad(self.ends_E, (1, 0))
        return self._starts

    @property
    def _expert_order(self) -> Tensor:
        if self._order is None:
            table = next(iter(self._tiles.values()), None)
            self._order = experts_by_load(self.ends_E) if table is None else table.order_E
        return self._order


def _token_index(rows: SortedRows | None) -> Tensor | None:
    return None if rows is None else rows.token_R
