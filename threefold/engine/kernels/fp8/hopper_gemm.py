"""Launch functions of the Hopper FP8 GEMM kernel (`hopper_gluon_kernel`): grouped GEMM and weight gradient.

`gpu_steps` calls them on Hopper GPUs.

Shapes: R rows sorted by expert, E experts, K summed over, N columns of the result; P rows with each expert's padded to
whole blocks, M rows of a weight.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl  # type: ignore

from threefold.engine.kernels.experts.tile_schedule import TileTable
from threefold.engine.kernels.fast_launch import tensor_blocks
from threefold.engine.kernels.fp8.hopper_gluon_kernel import grouped_gemm_kernel
from threefold.engine.kernels.fp8.quantized_tensors import BLOCK, Fp8Columns, Fp8Rows, num_blocks
from threefold.engine.kernels.launch_config import TritonConfig, num_programs

_ROWS_PER_GROUP, _TILE_COLUMNS = 64, 256  # rows that one warp group multiplies, columns of a tile
_ALIGN = 16  # bytes
_GLUON_DTYPES = {torch.float8_e4m3fn: gl.float8e4nv, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}


def grouped_gemm(
    a_fp8: Fp8Rows,
    weight_ENK: Tensor,
    scale: Tensor,
    tiles: TileTable,
    config: TritonConfig,
    target_R: Tensor | None = None,
) -> Tensor:
    """Multiply each row by the weight of its expert, a @ weight.T, in bf16.

    `scale` has one number for each 128x128 block of the weight, or one for each of its rows; `a_fp8` has the same kind.
    With `target_R` the result of a row is stored at the row that it names.
    """
    num_rows, inner = a_fp8.value_RK.shape
    outer = weight_ENK.shape[1]
    rowwise = scale.dim() == 2
    out_RN = torch.empty(num_rows, outer, dtype=torch.bfloat16, device=a_fp8.value_RK.device)
    strides = (outer, BLOCK, 0) if rowwise else scale.stride()
    grouped_gemm_kernel[(num_programs(out_RN.device, config.per_sm),)](
        _descriptor(a_fp8.value_RK, _ROWS_PER_GROUP, BLOCK), a_fp8.scale_CR,
        _descriptor(weight_ENK.flatten(0, 1), _TILE_COLUMNS, BLOCK), scale,
        _descriptor(out_RN, _ROWS_PER_GROUP, BLOCK), out_RN, tiles.table if target_R is None else target_R, tiles.table,
        tiles.total, tiles.table.shape[1], num_rows, 0, outer, inner, *strides, config.stages, config.group, False,
        rowwise, False, target_R is not None, num_warps=4,
    )  # fmt: skip
    return out_RN


def wgrad_gemm(
    left_fp8: Fp8Columns,
    right_fp8: Fp8Columns,
    block_ends_E: Tensor,
    dtype: torch.dtype,
    config: TritonConfig,
    main_grad_EMN: Tensor | None = None,
) -> Tensor:
    """Sum left.T @ right over the rows of each expert, (E, M, N). The right side has 128x128 blocks.

    With a `main_grad_EMN` the kernel adds to it, and it comes back.
    """
    num_m, num_n, num_experts = len(left_fp8.value_KP), len(right_fp8.value_KP), len(block_ends_E)
    out_EMN, adds = main_grad_EMN, main_grad_EMN is not None
    if out_EMN is None:
        out_EMN = torch.empty(num_experts, num_m, num_n, dtype=dtype, device=block_ends_E.device)
    grouped_gemm_kernel[(num_programs(out_EMN.device, config.per_sm),)](
        _descriptor(left_fp8.value_KP, _ROWS_PER_GROUP, BLOCK), left_fp8.scale,
        _descriptor(right_fp8.value_KP, _TILE_COLUMNS, BLOCK), right_fp8.scale,
        _descriptor(out_EMN.flatten(0, 1), _ROWS_PER_GROUP, BLOCK), out_EMN, block_ends_E, block_ends_E, block_ends_E,
        num_experts, 0, num_m, num_n, 0, 0, 1, num_blocks(num_n), config.stages, config.group, True, False, adds,
        False, num_warps=4,
    )  # fmt: skip
    return out_EMN


def can_add_to(main_grad: Tensor) -> bool:
    """Whether `wgrad_gemm` takes this tensor to add to: its rows begin at multiples that TMA descriptors need."""
    return main_grad.is_contiguous() and main_grad.data_ptr() % _ALIGN == 0 and main_grad.dtype in _GLUON_DTYPES


def _descriptor(tensor: Tensor, *block: int) -> Any:
    return tensor_blocks(tensor, list(block), _shared_layout(tensor.dtype, block))


@cache
def _shared_layout(dtype: torch.dtype, block: tuple[int, ...]) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(block), _GLUON_DTYPES[dtype])
