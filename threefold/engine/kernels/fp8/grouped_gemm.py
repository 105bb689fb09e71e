"""Grouped GEMM in FP8 by Triton: each expert multiplies its rows, in both layers and for the gradients of their inputs.

Each block of 128 of the sum is scaled and added in fp32, because Hopper keeps only about 14 bits while it sums 8-bit
products. `gpu_steps` calls it where the Hopper kernel (`hopper_gemm`) does not run.

Shapes: R rows sorted by expert, E experts, K summed over, N columns of the result.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from threefold.engine.kernels.experts.tile_schedule import TileTable, store_tile, tile_coordinates
from threefold.engine.kernels.fp8.quantized_tensors import BLOCK, Fp8Columns, Fp8Rows
from threefold.engine.kernels.launch_config import TritonConfig, num_programs


def grouped_gemm(
    a_fp8: Fp8Rows,
    weight_ENK: Tensor,
    scale: Tensor,
    tiles: TileTable,
    config: TritonConfig,
    target_R: Tensor | None = None,
) -> Tensor:
    """Multiply each row by the weight of its expert, a @ weight.T, in bf16. `scale` has one number a 128x128 block.

    With `target_R` the result of a row is stored at the row that it names.
    """
    num_rows, inner = a_fp8.value_RK.shape
    outer = weight_ENK.shape[1]
    out_RN = torch.empty(num_rows, outer, dtype=torch.bfloat16, device=a_fp8.value_RK.device)
    a = TensorDescriptor.from_tensor(a_fp8.value_RK, [tiles.size, BLOCK])
    weight = TensorDescriptor.from_tensor(weight_ENK, [1, BLOCK, BLOCK])
    out = TensorDescriptor.from_tensor(out_RN, [tiles.size, BLOCK])
    _grouped_gemm[(num_programs(out_RN.device, config.per_sm),)](
        a, a_fp8.scale_CR, weight, scale, out, out_RN, target_R, tiles.table, tiles.total, tiles.table.shape[1],
        num_rows, inner, outer, *scale.stride(), tiles.size, BLOCK, config.group, outer % BLOCK == 0,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return out_RN


@triton.jit
def _grouped_gemm(
    a, a_scale_ptr, w, w_scale_ptr, out, out_ptr, target_ptr, table_ptr, total_ptr, max_tiles, num_rows,
    K: tl.constexpr, N: tl.constexpr, SE: tl.constexpr, SN: tl.constexpr, SK: tl.constexpr, BM: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, EVEN_N: tl.constexpr,
):  # fmt: skip
    num_n: tl.constexpr = (N + BLOCK - 1) // BLOCK
    num_k: tl.constexpr = (K + BLOCK - 1) // BLOCK
    total = tl.load(total_ptr)
    for tile in tl.range(tl.program_id(0), total * num_n, tl.num_programs(0)):
        tile_m, tile_n = tile_coordinates(tile, total, num_n, GROUP)
        expert = tl.load(table_ptr + tile_m)
        first = tl.load(table_ptr + max_tiles + tile_m)
        end = tl.load(table_ptr + 2 * max_tiles + tile_m)
        a_scale = a_scale_ptr + tl.minimum(first + tl.arange(0, BM), num_rows - 1)
        w_scale = w_scale_ptr + expert * SE + tile_n * SN
        acc = tl.zeros((BM, BLOCK), tl.float32)
        scale = tl.load(a_scale) * tl.load(w_scale)
        for k in range(num_k):
            part = tl.dot(
                a.load([first, k * BLOCK]), w.load([expert, tile_n * BLOCK, k * BLOCK]).reshape(BLOCK, BLOCK).T
            )
            # The scales of the next block are loaded ahead, so that the wait is short.
            then = tl.minimum(k + 1, num_k - 1)
            a_then, w_then = tl.load(a_scale + then * num_rows), tl.load(w_scale + then * SK)
            acc += part * scale[:, None]
            scale = a_then * w_then
        fp8 = acc.to(out_ptr.dtype.element_ty)
        store_tile(fp8, out, out_ptr, first, end, tile_n * BLOCK, 0, N, N, BM, BLOCK, EVEN_N, True, target_ptr)


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
