"""The steps of the FP8 experts on a GPU, by Triton and Gluon kernels. `fused_experts` calls them in order.

`reference_steps` has the same methods in plain torch, `dry_run_steps` for a dry run.

Shapes: T tokens, R rows sorted by expert, K columns, E experts, H expert dim, N columns of a result. As the last dim of
a tensor X is 2 H (gate and up). As the first dim of x_XK it is T where `rows` are given, because the step gathers the
rows then, and R otherwise.
"""

import torch
from torch import Tensor

from threefold.engine.autograd.main_grad import add_to_main_grad
from threefold.engine.kernels.availability import has_gluon_kernels
from threefold.engine.kernels.experts import row_kernels as elementwise
from threefold.engine.kernels.experts.sorted_rows import SortedRows
from threefold.engine.kernels.experts.tile_schedule import make_tile_table
from threefold.engine.kernels.fp8 import blockwise_quantize, blockwise_swiglu, grouped_gemm
from threefold.engine.kernels.fp8 import rowwise_kernels as rowwise_quantize
from threefold.engine.kernels.fp8.quantized_tensors import BLOCK, Fp8Columns, Fp8Rows, RowBlocks
from threefold.engine.kernels.launch_config import TritonConfig

_PORTABLE_CONFIG = TritonConfig(m=128, n=128, k=128, stages=4)
_HOPPER_CONFIG = TritonConfig(m=128, n=256, k=128, stages=4)
_HOPPER_WGRAD_CONFIG = TritonConfig(m=128, n=256, k=128, stages=4, group=4)
_HOPPER_FP32_WGRAD_CONFIG = TritonConfig(
    m=128, n=256, k=128, stages=3, group=4
)  # an fp32 result takes more shared memory


class BlockwiseGpuSteps:
    """The blockwise recipe: 1x128 scales on rows, 128x128 on weights. `ends_E` holds the end of each expert's rows."""

    def __init__(self, ends_E: Tensor, num_rows: int, clamped: bool) -> None:
        self.clamped, self.ends_E, self.uses_hopper_kernels = clamped, ends_E, has_gluon_kernels(ends_E.device)
        self.tiles = make_tile_table(ends_E, num_rows, BLOCK)
        self.blocks = RowBlocks(self.tiles.table, self.tiles.total, blockwise_quantize.block_ends(ends_E))

    def quantize(
        self, x_XK: Tensor, rows: SortedRows | None, with_columns: bool, square: bool
    ) -> tuple[Fp8Rows, Fp8Columns | None]:
        fp8_rows, fp8_columns = blockwise_quantize.quantize_rows_and_columns(
            x_XK, _token_indices(rows), self.blocks, True, with_columns, square
        )
        assert fp8_rows is not None
        return fp8_rows, fp8_columns

    def grouped_gemm(self, a_fp8: Fp8Rows, value_ENK: Tensor, scale: Tensor, rows: SortedRows | None = None) -> Tensor:
        """Rows of the result, summed by token with `rows`; where each token has one row it is stored there."""
        target_R = None if rows is None else rows.target_R
        given = a_fp8, value_ENK, scale, self.tiles
        if self.uses_hopper_kernels:
            from threefold.engine.kernels.fp8 import hopper_gemm

            y_RN = hopper_gemm.grouped_gemm(*given, _HOPPER_CONFIG, target_R)
        else:
            y_RN = grouped_gemm.grouped_gemm(*given, _PORTABLE_CONFIG, target_R)
        return y_RN if rows is None or target_R is not None else elementwise.sum_rows(y_RN, rows.row_TK)

    def wgrad(
        self, left_fp8: Fp8Columns, right_fp8: Fp8Columns, dtype: torch.dtype, main_grad: Tensor | None = None
    ) -> Tensor | None:
        """The weight gradient; with a `main_grad` it is added there, and None comes back."""
        given = left_fp8, right_fp8, self.blocks.ends_E
        if not self.uses_hopper_kernels:
            return add_to_main_grad(grouped_gemm.wgrad_gemm(*given, dtype, _PORTABLE_CONFIG), main_grad)
        from threefold.engine.kernels.fp8 import hopper_gemm

        if main_grad is not None and hopper_gemm.can_add_to(main_grad):
            hopper_gemm.wgrad_gemm(*given, dtype, _HOPPER_WGRAD_CONFIG, main_grad)
            return None
        config = _HOPPER_FP32_WGRAD_CONFIG if dtype == torch.float32 else _HOPPER_WGRAD_CONFIG
        return add_to_main_grad(hopper_gemm.wgrad_gemm(*given, dtype, config), main_grad)

    def swiglu(self, gate_up_RX: Tensor, weight_R: Tensor) -> Fp8Rows:
        return blockwise_swiglu.swiglu_fp8(gate_up_RX, weight_R, self.clamped)

    def swiglu_grad(
        self, grad_RH: Tensor, gate_up_RX: Tensor, weight_R: Tensor, wants_gate_up: bool, wants_act: bool
    ) -> tuple[Fp8Rows, Fp8Columns | None, Fp8Columns | None, Tensor]:
        given = grad_RH, gate_up_RX, weight_R
        fp8_rows, amax_CR, weight_grad_R = self._swiglu_grad_rows(*given, self.clamped)
        columns = blockwise_swiglu.swiglu_grad_columns(
            *given, amax_CR, self.blocks, self.clamped, wants_gate_up, wants_act
        )
        return fp8_rows, *columns, weight_grad_R

    _swiglu_grad_rows = staticmethod(blockwise_swiglu.swiglu_grad_rows)


class RowwiseGpuSteps(BlockwiseGpuSteps):
    """The rowwise recipe: one scale per row. Weight gradients still sum over blocks of 128 rows."""

    _swiglu_grad_rows = staticmethod(rowwise_quantize.swiglu_grad_rows)

    def quantize(
        self, x_XK: Tensor, rows: SortedRows | None, with_columns: bool, square: bool
    ) -> tuple[Fp8Rows, Fp8Columns | None]:
        fp8_rows = rowwise_quantize.quantize_rows(x_XK, _token_indices(rows))
        if not with_columns:
            return fp8_rows, None
        return fp8_rows, blockwise_quantize.quantize_rows_and_columns(
            x_XK, _token_indices(rows), self.blocks, False, True, square
        )[1]

    def grouped_gemm(self, a_fp8: Fp8Rows, value_ENK: Tensor, scale: Tensor, rows: SortedRows | None = None) -> Tensor:
        if self.uses_hopper_kernels:
            return super().grouped_gemm(a_fp8, value_ENK, scale, rows)
        # Fast accumulation keeps about 14 bits of a sum, however many terms it has, so it is off.
        y_RN = torch._scaled_grouped_mm(
            a_fp8.value_RK, value_ENK.mT, a_fp8.scale_CR[0], scale, offs=self.ends_E, out_dtype=torch.bfloat16,
            use_fast_accum=False,
        )  # fmt: skip
        return y_RN if rows is None else elementwise.sum_rows(y_RN, rows.row_TK)

    def swiglu(self, gate_up_RX: Tensor, weight_R: Tensor) -> Fp8Rows:
        return rowwise_quantize.swiglu_fp8(gate_up_RX, weight_R, self.clamped)


def _token_indices(rows: SortedRows | None) -> Tensor | None:
    return None if rows is None else rows.token_R
