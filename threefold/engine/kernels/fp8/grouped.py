"""The products of `hopper.py` as functions of tensors.

Shapes: R rows sorted by expert, E experts, K summed over, N columns of the result; P rows with each expert's filled up
to whole blocks, M rows of a weight.
"""

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl  # type: ignore
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # type: ignore

from threefold.engine.kernels.fp8.format import BLOCK, Columns8, Rows8, num_blocks
from threefold.engine.kernels.fp8.hopper import multiply
from threefold.engine.kernels.launch import Config, num_programs
from threefold.engine.kernels.tiles import Tiles

_PART, _WIDE = 64, 256  # rows that one group of warps multiplies, columns of a tile
_KINDS = {torch.float8_e4m3fn: gl.float8e4nv, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}


def product(a8: Rows8, weight_ENK: Tensor, scale: Tensor, tiles: Tiles, config: Config) -> Tensor:
    """a @ weight.T of each row's expert, in bf16. `scale` has one number for each 128x128 of the weight, or one for
    each of its rows; that of a is alike."""
    num_rows, inner = a8.value_RK.shape
    outer = weight_ENK.shape[1]
    whole = scale.dim() == 2
    out_RN = torch.empty(num_rows, outer, dtype=torch.bfloat16, device=a8.value_RK.device)
    strides = (outer, BLOCK, 0) if whole else scale.stride()
    multiply[(num_programs(out_RN.device, config),)](
        _described(a8.value_RK, _PART, BLOCK), a8.scale_CR, _described(weight_ENK.flatten(0, 1), _WIDE, BLOCK),
        scale, _described(out_RN, _PART, BLOCK), out_RN, tiles.table, tiles.total, tiles.table.shape[1], num_rows, 0,
        outer, inner, *strides, config.stages, config.group, False, whole, num_warps=4,
    )  # fmt: skip
    return out_RN


def weight_grad(left8: Columns8, right8: Columns8, block_ends_E: Tensor, dtype: torch.dtype, config: Config) -> Tensor:
    """left.T @ right over each expert's rows, (E, M, N); the scales of the right are those of squares."""
    num_m, num_n, num_experts = len(left8.value_KP), len(right8.value_KP), len(block_ends_E)
    out_EMN = torch.empty(num_experts, num_m, num_n, dtype=dtype, device=block_ends_E.device)
    multiply[(num_programs(out_EMN.device, config),)](
        _described(left8.value_KP, _PART, BLOCK), left8.scale, _described(right8.value_KP, _WIDE, BLOCK),
        right8.scale, _described(out_EMN.flatten(0, 1), _PART, BLOCK), out_EMN, block_ends_E, block_ends_E,
        num_experts, 0, num_m, num_n, 0, 0, 1, num_blocks(num_n), config.stages, config.group, True, False, num_warps=4,
    )  # fmt: skip
    return out_EMN


def _described(tensor: Tensor, *block: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(list(block), _KINDS[tensor.dtype])
    return TensorDescriptor.from_tensor(tensor, list(block), layout)
