"""Weight gradients of the experts in Triton: one GEMM over the rows of each expert, with the gather in its loads.

`gpu_steps.py` calls it for FC1 (step `up_grad`) and FC2 (step `down_grad`).

Shapes: T tokens, R rows (token copies sorted by expert), E experts, M rows of the weight, N columns.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from threefold.engine.kernels.experts.store_tile import split_columns
from threefold.engine.kernels.experts.tile_schedule import tile_coordinates
from threefold.engine.kernels.fast_launch import fast_launch, tensor_blocks
from threefold.engine.kernels.launch_config import TritonConfig, num_programs


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
