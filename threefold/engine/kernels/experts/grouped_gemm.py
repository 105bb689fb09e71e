"""Grouped GEMMs in Triton: the rows of each expert times its own weight, and weight gradients over them.

`gpu_steps.py` calls `grouped_gemm` for FC2 forward (step `down`) and for the gradient of FC1's input (`input_grad`),
`grouped_wgrad`, with the gather in its loads, for the steps `up_grad` and `down_grad`.

Shapes: T tokens, R rows sorted by expert, E experts, K summed over, M rows of a weight, N columns of the result.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
import triton
import triton.language as tl
from torch import Tensor

from threefold.engine.kernels.experts.tile_schedule import TileTable, split_columns, store_tile, tile_coordinates
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


def grouped_wgrad(
    left_XM: Tensor,
    right_XN: Tensor,
    token_R: Tensor | None,
    gathered: str,
    ends_E: Tensor,
    order_E: Tensor,
    config: TritonConfig,
    main_grad_EMN: Tensor | None = None,
) -> Tensor | None:
    """left.T @ right over the rows of each expert, (E, M, N).

    `gathered` is "left" or "right": that side is read at token_R[row], or without `token_R` at the row itself. The
    other side is always read at the row itself. With a `main_grad` the result is added there, in its dtype, and None
    comes back.
    """
    num_m, num_n, num_experts = left_XM.shape[1], right_XN.shape[1], len(ends_E)
    out_EMN = left_XM.new_empty(num_experts, num_m, num_n) if main_grad_EMN is None else main_grad_EMN
    by_row, width = (right_XN, config.n) if gathered == "left" else (left_XM, config.m)
    by_token = left_XM if gathered == "left" else right_XN
    out = tensor_blocks(out_EMN, [1, config.m, config.n // 2])
    _grouped_wgrad[(num_programs(left_XM.device, config.per_sm),)](
        by_token, tensor_blocks(by_row, [config.k, width]), token_R, ends_E, order_E, out, num_experts,
        num_m, num_n, config.m, config.n, config.k, config.group, gathered == "left", token_R is not None,
        main_grad_EMN is not None, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return out_EMN if main_grad_EMN is None else None


@fast_launch
@triton.jit
def _grouped_wgrad(
    token_side_ptr, row_side, token_ptr, ends_ptr, order_ptr, out, num_experts, M: tl.constexpr, N: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, LEFT: tl.constexpr,
    GATHER: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    num_m: tl.constexpr = (M + BM - 1) // BM
    num_n: tl.constexpr = (N + BN - 1) // BN
    per_expert: tl.constexpr = num_m * num_n
    width: tl.constexpr = M if LEFT else N
    for tile in tl.range(tl.program_id(0), num_experts * per_expert, tl.num_programs(0)):
        expert = tl.load(order_ptr + tile // per_expert)
        tile_m, tile_n = tile_coordinates(tile % per_expert, num_m, num_n, GROUP)
        start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
        end = tl.load(ends_ptr + expert)
        if LEFT:
            col = tile_m * BM + tl.arange(0, BM)
        else:
            col = tile_n * BN + tl.arange(0, BN)
        acc = tl.zeros((BM, BN), tl.float32)
        for begin in range(start, end, BK):
            row = begin + tl.arange(0, BK)
            live = row < end
            token = tl.load(token_ptr + row, mask=live, other=0) if GATHER else row
            # Rows beyond the expert's are zero on this side, so that the other side needs no mask.
            offset = token.to(tl.int64)[:, None] * width + col[None, :]
            by_token = tl.load(token_side_ptr + offset, mask=live[:, None] & (col < width)[None, :], other=0.0)
            if LEFT:
                acc = tl.dot(by_token.T, row_side.load([begin, tile_n * BN]), acc)
            else:
                acc = tl.dot(row_side.load([begin, tile_m * BM]).T, by_token, acc)
        half: tl.constexpr = BN // 2
        left, right = split_columns(acc.to(out.dtype), BM, BN)
        if ADD:
            left += out.load([expert, tile_m * BM, tile_n * BN]).reshape(BM, half)
        out.store([expert, tile_m * BM, tile_n * BN], left.reshape(1, BM, half))
        if ADD:
            right += out.load([expert, tile_m * BM, tile_n * BN + half]).reshape(BM, half)
        out.store([expert, tile_m * BM, tile_n * BN + half], right.reshape(1, BM, half))
