"""Grouped weight-gradient GEMM in FP8 by Triton: each expert sums over its rows, in whole blocks of 128.

Each block of 128 rows is scaled and added in fp32, because Hopper keeps only about 14 bits while it sums 8-bit
products. `gpu_steps` calls it where the Hopper kernel (`hopper_gemm`) does not run.

Shapes: P rows with each expert's padded to whole blocks, B blocks of rows, E experts, M rows of the weight, N its
columns.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore

from threefold.engine.kernels.experts.tile_schedule import tile_coordinates
from threefold.engine.kernels.fp8.quantized_tensors import BLOCK, Fp8Columns
from threefold.engine.kernels.launch_config import TritonConfig, num_programs


def wgrad_gemm(
    left_fp8: Fp8Columns, right_fp8: Fp8Columns, block_ends_E: Tensor, dtype: torch.dtype, config: TritonConfig
) -> Tensor:
    """Sum left.T @ right over the rows of each expert, (E, M, N). The right side has 128x128 blocks."""
    num_m, num_n, num_experts = len(left_fp8.value_KP), len(right_fp8.value_KP), len(block_ends_E)
    out_EMN = torch.empty(num_experts, num_m, num_n, dtype=dtype, device=block_ends_E.device)
    left = TensorDescriptor.from_tensor(left_fp8.value_KP, [config.m, BLOCK])
    right = TensorDescriptor.from_tensor(right_fp8.value_KP, [config.n, BLOCK])
    out = TensorDescriptor.from_tensor(out_EMN, [1, config.m, config.n])
    _wgrad_gemm[(num_programs(out_EMN.device, config.per_sm),)](
        left, left_fp8.scale, right, right_fp8.scale, block_ends_E, out, num_experts, num_m, num_n, config.m, config.n,
        BLOCK, config.group, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return out_EMN


@triton.jit
def _wgrad_gemm(
    left, left_scale_ptr, right, right_scale_ptr, ends_ptr, out, num_experts, M: tl.constexpr, N: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    num_m: tl.constexpr = (M + BM - 1) // BM
    num_n: tl.constexpr = (N + BN - 1) // BN
    per_expert: tl.constexpr = num_m * num_n
    squares: tl.constexpr = (N + BLOCK - 1) // BLOCK
    for tile in tl.range(tl.program_id(0), num_experts * per_expert, tl.num_programs(0)):
        expert = tile // per_expert
        tile_m, tile_n = tile_coordinates(tile % per_expert, num_m, num_n, GROUP)
        start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
        end = tl.load(ends_ptr + expert)
        left_scale = left_scale_ptr + tl.minimum(tile_m * BM + tl.arange(0, BM), M - 1)
        right_scale = right_scale_ptr + tile_n * BN // BLOCK
        acc = tl.zeros((BM, BN), tl.float32)
        if start < end:
            by_row, by_col = tl.load(left_scale + start * M), tl.load(right_scale + start * squares)
            for block in range(start, end):
                part = tl.dot(left.load([tile_m * BM, block * BLOCK]), right.load([tile_n * BN, block * BLOCK]).T)
                then = tl.minimum(block + 1, end - 1)
                row_then, col_then = tl.load(left_scale + then * M), tl.load(right_scale + then * squares)
                acc += part * (by_row * by_col)[:, None]
                by_row, by_col = row_then, col_then
        out.store([expert, tile_m * BM, tile_n * BN], acc.to(out.dtype).reshape(1, BM, BN))
