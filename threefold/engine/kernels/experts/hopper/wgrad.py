"""Weight gradients of the experts on Hopper, in Gluon: four warps gather and load, two warp groups multiply.

`gpu_steps.py` calls `grouped_wgrad` for the steps `up_grad` and `down_grad` where the choice has a `GluonConfig`;
`../wgrad_gemm.py` has the same in Triton. At a few hundred rows an expert a tile is a short sum, and most of a plain
kernel's time goes into its beginning and its end. Here the loads of the next tiles begin while this one is stored, and
which rows the tiles behind it sum is looked up while it is multiplied. (Two warp groups that take turns at storing, one
some steps ahead of the other, were 1 to 5 % slower.)

One side is read at the tokens of the rows by plain asynchronous copies, as TMA of Hopper cannot gather, and rows beyond
the expert's are zeros there. So the other side, which TMA loads, needs no mask.

Shapes: T tokens, R rows (token copies sorted by expert), E experts, M rows of the weight, N columns.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
from torch import Tensor
from triton.experimental import gluon  # type: ignore
from triton.experimental.gluon import language as gl  # type: ignore
from triton.experimental.gluon.language.nvidia.ampere import async_copy  # type: ignore
from triton.experimental.gluon.language.nvidia.hopper import (  # type: ignore
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from threefold.engine.kernels.experts.hopper.tiles import gluon_blocks, tile_coordinates
from threefold.engine.kernels.fast_launch import fast_launch
from threefold.engine.kernels.launch_config import GluonConfig, num_programs

BK: gl.constexpr = gl.constexpr(64)  # rows that are summed in one step
GROUP_M: gl.constexpr = gl.constexpr(64)  # rows of a tile that one warp group takes
BM: gl.constexpr = gl.constexpr(2 * 64)
BN: gl.constexpr = gl.constexpr(256)
HALF_BN: gl.constexpr = gl.constexpr(128)  # columns that are stored at a time
LOADERS: gl.constexpr = gl.constexpr(4 * 32)  # threads that load


def grouped_wgrad(
    left_XM: Tensor,
    right_XN: Tensor,
    token_R: Tensor | None,
    gathered: str,
    ends_E: Tensor,
    order_E: Tensor,
    config: GluonConfig,
    main_grad_EMN: Tensor | None = None,
    squares_P: Tensor | None = None,
) -> Tensor | None:
    """left.T @ right over the rows of each expert, (E, M, N), as `wgrad_gemm.grouped_wgrad` has it.

    `squares_P` (`num_squares` of them) get the squares of the result, a sum for each warp group, without which the
    gradient norm would have to read all of it once more. They are taken before the result is rounded, which changes
    their sum by 1e-6 to 1e-5.
    """
    num_m, num_n, num_experts = left_XM.shape[1], right_XN.shape[1], len(ends_E)
    out_EMN = left_XM.new_empty(num_experts, num_m, num_n) if main_grad_EMN is None else main_grad_EMN
    by_token, by_row, width = (left_XM, right_XN, 256) if gathered == "left" else (right_XN, left_XM, 64)
    stored = by_row if main_grad_EMN is not None else out_EMN.flatten(0, 1)  # TMA stores nothing where it is added
    _wgrad_kernel[(num_programs(left_XM.device, 1),)](
        by_token, gluon_blocks(by_row, 64, width), token_R, gluon_blocks(stored, 64, 128), out_EMN, ends_E, order_E,
        squares_P, num_experts, num_m, num_n, config.stages, config.group, gathered == "left", token_R is not None,
        main_grad_EMN is not None, squares_P is not None, num_warps=4,
    )  # fmt: skip
    return out_EMN if main_grad_EMN is None else None


def num_squares(device: torch.device) -> int:
    return 2 * num_programs(device, 1)


@fast_launch
@gluon.jit
def _wgrad_kernel(
    by_token, by_row, token_ptr, out, out_ptr, ends_ptr, order_ptr, squares_ptr, num_experts, M: gl.constexpr,
    N: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, LEFT: gl.constexpr, GATHER: gl.constexpr,
    ADD: gl.constexpr, SQUARES: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    a0 = gl.allocate_shared_memory(by_row.dtype, [STAGES, BK, GROUP_M], layout)
    a1 = gl.allocate_shared_memory(by_row.dtype, [STAGES, BK, GROUP_M], layout)
    b = gl.allocate_shared_memory(by_row.dtype, [STAGES, BK, BN], layout)
    out0 = gl.allocate_shared_memory(out.dtype, [GROUP_M, HALF_BN], out.layout)
    out1 = gl.allocate_shared_memory(out.dtype, [GROUP_M, HALF_BN], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=LOADERS + 1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (0, a0, b, out, out_ptr, out0, full, empty, ends_ptr, order_ptr, squares_ptr, num_experts, M,
                         N, STAGES, GROUP, ADD, SQUARES)),
            (_multiply, (1, a1, b, out, out_ptr, out1, full, empty, ends_ptr, order_ptr, squares_ptr, num_experts, M,
                         N, STAGES, GROUP, ADD, SQUARES)),
            (_load, (by_token, by_row, token_ptr, a0, a1, b, full, empty, ends_ptr, order_ptr, num_experts, M, N,
                     STAGES, GROUP, LEFT, GATHER)),
        ],
        [4, 4],
        [200, 104],
    )  # fmt: skip


@gluon.jit
def _num_tiles(num_experts, M: gl.constexpr, N: gl.constexpr):
    return num_experts * ((M + BM - 1) // BM) * ((N + BN - 1) // BN)


@gluon.jit
def _expert_of_tile(tile, order_ptr, num_experts, M: gl.constexpr, N: gl.constexpr):
    """Behind the last tile it is any expert."""
    number = tile // _num_tiles(1, M, N)
    return gl.load(order_ptr + gl.minimum(number, num_experts - 1))


@gluon.jit
def _rows_of_expert(expert, ends_ptr):
    """-> (first row, end of the rows)."""
    return gl.load(ends_ptr + expert - 1, mask=expert > 0, other=0), gl.load(ends_ptr + expert)


@gluon.jit
def _corner(tile, M: gl.constexpr, N: gl.constexpr, GROUP: gl.constexpr):
    """-> (first row, first column of the tile in the expert's weight)."""
    num_m: gl.constexpr = (M + BM - 1) // BM
    num_n: gl.constexpr = (N + BN - 1) // BN
    tile_m, tile_n = tile_coordinates(tile % (num_m * num_n), num_m, num_n, GROUP)
    return tile_m * BM, tile_n * BN


@gluon.jit
def _load_tokens(token_ptr, row, end, GATHER: gl.constexpr):
    """The tokens of rows up to `end`, or the rows themselves."""
    if GATHER:
        return gl.load(token_ptr + row, mask=row < end, other=0)
    else:  # noqa: RET505 - what follows a return under a constant condition is still compiled
        return row


@gluon.jit
def _load(
    by_token, by_row, token_ptr, a0, a1, b, full, empty, ends_ptr, order_ptr, num_experts, M: gl.constexpr,
    N: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, LEFT: gl.constexpr, GATHER: gl.constexpr,
):  # fmt: skip
    WIDTH: gl.constexpr = M if LEFT else N
    COLUMNS: gl.constexpr = GROUP_M if LEFT else BN
    lanes: gl.constexpr = COLUMNS // 8  # a thread copies 16 bytes at a time
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])
    k = gl.arange(0, BK, gl.SliceLayout(1, layout))
    n = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    count = 0
    # Each look-up needs the one before it. So the tokens of the next tile, the rows of the one behind that and the
    # expert of a third are loaded ahead, all in the time of one tile.
    stride = gl.num_programs(0)
    start, end = _rows_of_expert(_expert_of_tile(gl.program_id(0), order_ptr, num_experts, M, N), ends_ptr)
    expert = _expert_of_tile(gl.program_id(0) + stride, order_ptr, num_experts, M, N)
    next_start, next_end = _rows_of_expert(expert, ends_ptr)
    expert = _expert_of_tile(gl.program_id(0) + 2 * stride, order_ptr, num_experts, M, N)
    first_token = _load_tokens(token_ptr, start + k, end, GATHER)
    for tile in range(gl.program_id(0), _num_tiles(num_experts, M, N), stride):
        row, col = _corner(tile, M, N, GROUP)
        next_token = first_token
        first_token = _load_tokens(token_ptr, next_start + k, next_end, GATHER)
        then_start, then_end = _rows_of_expert(expert, ends_ptr)
        expert = _expert_of_tile(tile + 3 * stride, order_ptr, num_experts, M, N)
        column = (row if LEFT else col) + n
        for begin in range(start, end, BK):
            at = count % STAGES
            live = (begin + k < end)[:, None]
            ptrs = by_token + (next_token.to(gl.int64) * WIDTH)[:, None] + column[None, :]
            # The tokens of the next step are loaded ahead, so that the wait is short.
            next_token = _load_tokens(token_ptr, begin + BK + k, end, GATHER)
            mbarrier.wait(empty.index(at), ((count // STAGES) & 1) ^ 1)
            ready = full.index(at)
            if LEFT:
                mbarrier.expect(ready, BN * BK * 2)
                tma.async_copy_global_to_shared(by_row, [begin, col], ready, b.index(at))
                mask = live & (column < WIDTH)[None, :]
                async_copy.async_copy_global_to_shared(a0.index(at), ptrs, mask=mask)
                mask = live & (column + GROUP_M < WIDTH)[None, :]
                async_copy.async_copy_global_to_shared(a1.index(at), ptrs + GROUP_M, mask=mask)
            else:
                mbarrier.expect(ready, BM * BK * 2)
                tma.async_copy_global_to_shared(by_row, [begin, row], ready, a0.index(at))
                tma.async_copy_global_to_shared(by_row, [begin, row + GROUP_M], ready, a1.index(at))
                mask = live & (column < WIDTH)[None, :]
                async_copy.async_copy_global_to_shared(b.index(at), ptrs, mask=mask)
            async_copy.mbarrier_arrive(ready, increment_count=False)
            count += 1
        start, end, next_start, next_end = next_start, next_end, then_start, then_end
    async_copy.wait_group(0)


@gluon.jit
def _multiply(
    WHICH: gl.constexpr, a, b, out, out_ptr, buffer, full, empty, ends_ptr, order_ptr, squares_ptr, num_experts,
    M: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, ADD: gl.constexpr,
    SQUARES: gl.constexpr,
):  # fmt: skip
    """One of two warp groups: half the rows of every tile."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    count = 0
    stride = gl.num_programs(0)
    expert = _expert_of_tile(gl.program_id(0), order_ptr, num_experts, M, N)
    start, end = _rows_of_expert(expert, ends_ptr)
    next_expert = _expert_of_tile(gl.program_id(0) + stride, order_ptr, num_experts, M, N)
    squares = gl.zeros((GROUP_M,), gl.float32, gl.SliceLayout(1, layout))
    for tile in range(gl.program_id(0), _num_tiles(num_experts, M, N), stride):
        row, col = _corner(tile, M, N, GROUP)
        row += WHICH * GROUP_M
        next_start, next_end = _rows_of_expert(next_expert, ends_ptr)
        then_expert = _expert_of_tile(tile + 2 * stride, order_ptr, num_experts, M, N)
        acc = gl.zeros((GROUP_M, BN), gl.float32, layout)
        for begin in range(start, end, BK):
            at = count % STAGES
            mbarrier.wait(full.index(at), (count // STAGES) & 1)
            fence_async_shared()  # tensor cores read what plain copies have written
            acc = warpgroup_mma(a.index(at).permute((1, 0)), b.index(at), acc, is_async=True)
            acc = warpgroup_mma_wait(1, [acc])
            # The product before this one is done, so that its stage can be loaded again.
            mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1, pred=begin > start)
            count += 1
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1, pred=end > start)
        if SQUARES:  # values behind the weight's last row and column are zeros
            squares += gl.sum(acc * acc, 1)
        left, right = acc.reshape(GROUP_M, 2, HALF_BN).permute(0, 2, 1).split()
        if row < M:
            if ADD:
                _add(left, out_ptr, expert * M + row, col, N)
                _add(right, out_ptr, expert * M + row, col + HALF_BN, N)
            else:
                _store(left, out, buffer, expert * M + row, col)
                _store(right, out, buffer, expert * M + row, col + HALF_BN)
        expert, start, end, next_expert = next_expert, next_start, next_end, then_expert
    if SQUARES:
        gl.store(squares_ptr + 2 * gl.program_id(0) + WHICH, gl.sum(squares, 0))
    tma.store_wait(0)


@gluon.jit
def _store(value, out, buffer, row, col):
    tma.store_wait(0)  # the store before this one has read the buffer
    buffer.store(value.to(out.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [row, col], buffer)


@gluon.jit
def _add(value, out_ptr, row, col, N: gl.constexpr):
    """Add to what the result holds, in its dtype."""
    layout: gl.constexpr = value.type.layout
    m = row + gl.arange(0, GROUP_M, gl.SliceLayout(1, layout))
    n = col + gl.arange(0, HALF_BN, gl.SliceLayout(0, layout))
    ptrs, mask = out_ptr + m.to(gl.int64)[:, None] * N + n[None, :], (n < N)[None, :]
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    gl.store(ptrs, gl.load(ptrs, mask=mask, other=0.0) + value.to(dtype), mask=mask)
