"""Grouped GEMM in Triton: the rows of each expert times its own weight.

`gpu_steps.py` calls it for FC2 forward (step `down`) and for the gradient of FC1's input (step `input_grad`).

Shapes: R rows sorted by expert, E experts, K summed over, N columns of the result.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from threefold.engine.kernels.experts.store_tile import split_columns, store_tile
from threefold.engine.kernels.experts.tile_schedule import TileTable, tile_coordinates
from threefold.engine.kernels.fast_launch import fast_launch, tensor_blocks
from threefold.engine.kernels.launch_config import TritonConfig, num_programs


def grouped_gemm(
    a_RK: Tensor,
    weight: Tensor,
    tiles: TileTable,
    transposed: bool,
    config: TritonConfig,
    target_R: Tensor | None = None,
) -> Tensor:
    """a @ weight[expert of the row]. The weight is (E, K, N), or (E, N, K) where `transposed`.

    With `target_R` the result of a row is stored at the row that it names.
    """
    num_rows, inner = a_RK.shape
    outer = weight.shape[1 if transposed else 2]
    out_RN = a_RK.new_empty(num_rows, outer)
    a = tensor_blocks(a_RK, [tiles.size, config.k])
    block = [1, config.n, config.k] if transposed else [1, config.k, config.n]
    out = tensor_blocks(out_RN, [tiles.size, config.n // 2])
    _grouped_gemm[(num_programs(a_RK.device, config.per_sm),)](
        a, tensor_blocks(weight, block), out, out_RN, target_R, tiles.table, tiles.total, tiles.table.shape[1],
        inner, outer, tiles.size, config.n, config.k, config.group, transposed,
        outer % config.n == 0, config.flat, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return out_RN


@fast_launch
@triton.jit
def _grouped_gemm(
    a, w, out, out_ptr, target_ptr, table_ptr, total_ptr, max_tiles, K: tl.constexpr, N: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, TRANSPOSED: tl.constexpr,
    EVEN_N: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    num_n: tl.constexpr = (N + BN - 1) // BN
    total = tl.load(total_ptr)
    for tile in tl.range(tl.program_id(0), total * num_n, tl.num_programs(0), flatten=FLAT):
        tile_m, tile_n = tile_coordinates(tile, total, num_n, GROUP)
        expert = tl.load(table_ptr + tile_m)
        first = tl.load(table_ptr + max_tiles + tile_m)
        end = tl.load(table_ptr + 2 * max_tiles + tile_m)
        acc = tl.zeros((BM, BN), tl.float32)
        for begin in range(0, K, BK):
            rows = a.load([first, begin])
            if TRANSPOSED:
                acc = tl.dot(rows, w.load([expert, tile_n * BN, begin]).reshape(BN, BK).T, acc)
            else:
                acc = tl.dot(rows, w.load([expert, begin, tile_n * BN]).reshape(BK, BN), acc)
        acc = acc.to(out_ptr.dtype.element_ty)
        left, right = split_columns(acc, BM, BN)
        # The flattened loop cannot switch between two kinds of stores, so it never uses the copy engine.
        col, copies = tile_n * BN, not FLAT
        store_tile(left, out, out_ptr, first, end, col, 0, N, N, BM, BN // 2, EVEN_N, copies, target_ptr)
        store_tile(right, out, out_ptr, first, end, col + BN // 2, 0, N, N, BM, BN // 2, EVEN_N, copies, target_ptr)
