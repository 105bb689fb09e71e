"""Weight gradients of the experts on Hopper, in Gluon: four warps gather and load, two warp groups multiply.

`gpu_steps.py` calls `grouped_wgrad` for the steps `up_grad` and `down_grad` where the choice has a `GluonConfig`;
`../grouped_gemm.py` has the same in Triton. At a few hundred rows an expert a tile is a short sum, and most of a plain
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
PART_M: gl.constexpr = gl.constexpr(64)  # rows of one accumulator, of which a tile has PARTS, two or three
BN: gl.constexpr = gl.constexpr(256)
GROUP_N: gl.constexpr = gl.constexpr(128)  # columns of a tile that one warp group takes
LOADERS: gl.constexpr = gl.constexpr(4 * 32)  # threads that load

_STAGES = {2: 4, 3: 3}  # loads in flight, by the parts of a tile: as many as fit into shared memory


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
    """left.T @ right over the rows of each expert, (E, M, N), as `grouped_gemm.grouped_wgrad` has it.

    `squares_P` (`num_squares` of them) get the squares of the result, a sum for each warp group, without which the
    gradient norm would have to read all of it once more. They are taken before the result is rounded, which changes
    their sum by 1e-6 to 1e-5.
    """
    num_m, num_n, num_experts = left_XM.shape[1], right_XN.shape[1], len(ends_E)
    out_EMN = left_XM.new_empty(num_experts, num_m, num_n) if main_grad_EMN is None else main_grad_EMN
    by_token, by_row, width = (left_XM, right_XN, 128) if gathered == "left" else (right_XN, left_XM, 64)
    # Three parts load less for each product. With the left side gathered they were slower all the same.
    parts = 3 if gathered == "right" and num_m % (3 * 64) == 0 else 2
    stored = by_row if main_grad_EMN is not None else out_EMN.flatten(0, 1)  # TMA stores nothing where it is added
    _wgrad_kernel[(num_programs(left_XM.device, 1),)](
        by_token, gluon_blocks(by_row, 64, width), token_R, gluon_blocks(stored, 64, 128), out_EMN, ends_E, order_E,
        squares_P, num_experts, num_m, num_n, parts, _STAGES[parts], config.group, gathered == "left",
        token_R is not None, main_grad_EMN is not None, squares_P is not None, num_warps=4,
    )  # fmt: skip
    return out_EMN if main_grad_EMN is None else None


def num_squares(device: torch.device) -> int:
    return 2 * num_programs(device, 1)


@fast_launch
@gluon.jit
def _wgrad_kernel(
    by_token, by_row, token_ptr, out, out_ptr, ends_ptr, order_ptr, squares_ptr, num_experts, M: gl.constexpr,
    N: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, LEFT: gl.constexpr,
    GATHER: gl.constexpr, ADD: gl.constexpr, SQUARES: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    a0 = gl.allocate_shared_memory(by_row.dtype, [STAGES, BK, PART_M], layout)
    a1 = gl.allocate_shared_memory(by_row.dtype, [STAGES, BK, PART_M], layout)
    if PARTS == 3:
        a2 = gl.allocate_shared_memory(by_row.dtype, [STAGES, BK, PART_M], layout)
    else:
        a2 = a1
    b0 = gl.allocate_shared_memory(by_row.dtype, [STAGES, BK, GROUP_N], layout)
    b1 = gl.allocate_shared_memory(by_row.dtype, [STAGES, BK, GROUP_N], layout)
    out0 = gl.allocate_shared_memory(out.dtype, [PART_M, GROUP_N], out.layout)
    out1 = gl.allocate_shared_memory(out.dtype, [PART_M, GROUP_N], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=LOADERS + 1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (0, a0, a1, a2, b0, out, out_ptr, out0, full, empty, ends_ptr, order_ptr, squares_ptr,
                         num_experts, M, N, PARTS, STAGES, GROUP, ADD, SQUARES)),
            (_multiply, (1, a0, a1, a2, b1, out, out_ptr, out1, full, empty, ends_ptr, order_ptr, squares_ptr,
                         num_experts, M, N, PARTS, STAGES, GROUP, ADD, SQUARES)),
            (_load, (by_token, by_row, token_ptr, a0, a1, a2, b0, b1, full, empty, ends_ptr, order_ptr, num_experts,
                     M, N, PARTS, STAGES, GROUP, LEFT, GATHER)),
        ],
        [4, 4],
        [224, 56],
    )  # fmt: skip


@gluon.jit
def _num_tiles(num_experts, M: gl.constexpr, N: gl.constexpr, PARTS: gl.constexpr):
    BM: gl.constexpr = PARTS * PART_M
    return num_experts * ((M + BM - 1) // BM) * ((N + BN - 1) // BN)


@gluon.jit
def _expert_of_tile(tile, order_ptr, num_experts, M: gl.constexpr, N: gl.constexpr, PARTS: gl.constexpr):
    """Behind the last tile it is any expert."""
    number = tile // _num_tiles(1, M, N, PARTS)
    return gl.load(order_ptr + gl.minimum(number, num_experts - 1))


@gluon.jit
def _rows_of_expert(expert, ends_ptr):
    """-> (first row, end of the rows)."""
    return gl.load(ends_ptr + expert - 1, mask=expert > 0, other=0), gl.load(ends_ptr + expert)


@gluon.jit
def _corner(tile, M: gl.constexpr, N: gl.constexpr, PARTS: gl.constexpr, GROUP: gl.constexpr):
    """-> (first row, first column of the tile in the expert's weight)."""
    BM: gl.constexpr = PARTS * PART_M
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
    by_token, by_row, token_ptr, a0, a1, a2, b0, b1, full, empty, ends_ptr, order_ptr, num_experts, M: gl.constexpr,
    N: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, LEFT: gl.constexpr,
    GATHER: gl.constexpr,
):  # fmt: skip
    WIDTH: gl.constexpr = M if LEFT else N
    COLUMNS: gl.constexpr = PART_M if LEFT else GROUP_N
    lanes: gl.constexpr = COLUMNS // 8  # a thread copies 16 bytes at a time
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])
    k = gl.arange(0, BK, gl.SliceLayout(1, layout))
    n = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    count = 0
    # Each look-up needs the one before it. So the tokens of the next tile, the rows of the one behind that and the
    # expert of a third are loaded ahead, all in the time of one tile.
    stride = gl.num_programs(0)
    start, end = _rows_of_expert(_expert_of_tile(gl.program_id(0), order_ptr, num_experts, M, N, PARTS), ends_ptr)
    expert = _expert_of_tile(gl.program_id(0) + stride, order_ptr, num_experts, M, N, PARTS)
    next_start, next_end = _rows_of_expert(expert, ends_ptr)
    expert = _expert_of_tile(gl.program_id(0) + 2 * stride, order_ptr, num_experts, M, N, PARTS)
    first_token = _load_tokens(token_ptr, start + k, end, GATHER)
    for tile in range(gl.program_id(0), _num_tiles(num_experts, M, N, PARTS), stride):
        row, col = _corner(tile, M, N, PARTS, GROUP)
        next_token = first_token
        first_token = _load_tokens(token_ptr, next_start + k, next_end, GATHER)
        then_start, then_end = _rows_of_expert(expert, ends_ptr)
        expert = _expert_of_tile(tile + 3 * stride, order_ptr, num_experts, M, N, PARTS)
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
                tma.async_copy_global_to_shared(by_row, [begin, col], ready, b0.index(at))
                tma.async_copy_global_to_shared(by_row, [begin, col + GROUP_N], ready, b1.index(at))
                mask = live & (column < WIDTH)[None, :]
                async_copy.async_copy_global_to_shared(a0.index(at), ptrs, mask=mask)
                mask = live & (column + PART_M < WIDTH)[None, :]
                async_copy.async_copy_global_to_shared(a1.index(at), ptrs + PART_M, mask=mask)
                if PARTS == 3:
                    mask = live & (column + 2 * PART_M < WIDTH)[None, :]
                    async_copy.async_copy_global_to_shared(a2.index(at), ptrs + 2 * PART_M, mask=mask)
            else:
                mbarrier.expect(ready, PARTS * PART_M * BK * 2)
                tma.async_copy_global_to_shared(by_row, [begin, row], ready, a0.index(at))
                tma.async_copy_global_to_shared(by_row, [begin, row + PART_M], ready, a1.index(at))
                if PARTS == 3:
                    tma.async_copy_global_to_shared(by_row, [begin, row + 2 * PART_M], ready, a2.index(at))
                mask = live & (column < WIDTH)[None, :]
                async_copy.async_copy_global_to_shared(b0.index(at), ptrs, mask=mask)
                mask = live & (column + GROUP_N < WIDTH)[None, :]
                async_copy.async_copy_global_to_shared(b1.index(at), ptrs + GROUP_N, mask=mask)
            async_copy.mbarrier_arrive(ready, increment_count=False)
            count += 1
        start, end, next_start, next_end = next_start, next_end, then_start, then_end
    async_copy.wait_group(0)


@gluon.jit
def _multiply(
    WHICH: gl.constexpr, a0, a1, a2, b, out, out_ptr, buffer, full, empty, ends_ptr, order_ptr, squares_ptr,
    num_experts, M: gl.constexpr, N: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    ADD: gl.constexpr, SQUARES: gl.constexpr,
):  # fmt: skip
    """One of two warp groups: half the columns of every tile."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, GROUP_N, 16])
    count = 0
    stride = gl.num_programs(0)
    expert = _expert_of_tile(gl.program_id(0), order_ptr, num_experts, M, N, PARTS)
    start, end = _rows_of_expert(expert, ends_ptr)
    next_expert = _expert_of_tile(gl.program_id(0) + stride, order_ptr, num_experts, M, N, PARTS)
    squares = gl.zeros((PART_M,), gl.float32, gl.SliceLayout(1, layout))
    for tile in range(gl.program_id(0), _num_tiles(num_experts, M, N, PARTS), stride):
        next_start, next_end = _rows_of_expert(next_expert, ends_ptr)
        then_expert = _expert_of_tile(tile + 2 * stride, order_ptr, num_experts, M, N, PARTS)
        top = gl.zeros((PART_M, GROUP_N), gl.float32, layout)
        middle = gl.zeros((PART_M, GROUP_N), gl.float32, layout)
        bottom = gl.zeros((PART_M, GROUP_N), gl.float32, layout)
        for begin in range(start, end, BK):
            at = count % STAGES
            mbarrier.wait(full.index(at), (count // STAGES) & 1)
            fence_async_shared()  # tensor cores read what plain copies have written
            top = warpgroup_mma(a0.index(at).permute((1, 0)), b.index(at), top, is_async=True)
            middle = warpgroup_mma(a1.index(at).permute((1, 0)), b.index(at), middle, is_async=True)
            if PARTS == 3:
                bottom = warpgroup_mma(a2.index(at).permute((1, 0)), b.index(at), bottom, is_async=True)
                top, middle, bottom = warpgroup_mma_wait(3, [top, middle, bottom])
            else:
                top, middle = warpgroup_mma_wait(2, [top, middle])
            # The products of the step before are done, so that its stage can be loaded again.
            mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1, pred=begin > start)
            count += 1
        if PARTS == 3:
            top, middle, bottom = warpgroup_mma_wait(0, [top, middle, bottom])
        else:
            top, middle = warpgroup_mma_wait(0, [top, middle])
        mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1, pred=end > start)
        if SQUARES:  # values behind the weight's last row and column are zeros
            squares += gl.sum(top * top, 1) + gl.sum(middle * middle, 1)
            if PARTS == 3:
                squares += gl.sum(bottom * bottom, 1)
        row, col = _corner(tile, M, N, PARTS, GROUP)
        col += WHICH * GROUP_N
        _finish(top, out, out_ptr, buffer, expert, row, col, M, N, ADD)
        _finish(middle, out, out_ptr, buffer, expert, row + PART_M, col, M, N, ADD)
        if PARTS == 3:
            _finish(bottom, out, out_ptr, buffer, expert, row + 2 * PART_M, col, M, N, ADD)
        expert, start, end, next_expert = next_expert, next_start, next_end, then_expert
    if SQUARES:
        gl.store(squares_ptr + 2 * gl.program_id(0) + WHICH, gl.sum(squares, 0))
    tma.store_wait(0)


@gluon.jit
def _finish(value, out, out_ptr, buffer, expert, row, col, M: gl.constexpr, N: gl.constexpr, ADD: gl.constexpr):
    """Store or add the part of a tile at this row and column of the expert's weight, if it has that row."""
    if row < M:
        if ADD:
            _add(value, out_ptr, expert * M + row, col, N)
        else:
            _store(value, out, buffer, expert * M + row, col)


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
    m = row + gl.arange(0, PART_M, gl.SliceLayout(1, layout))
    n = col + gl.arange(0, GROUP_N, gl.SliceLayout(0, layout))
    ptrs, mask = out_ptr + m.to(gl.int64)[:, None] * N + n[None, :], (n < N)[None, :]
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    gl.store(ptrs, gl.load(ptrs, mask=mask, other=0.0) + value.to(dtype), mask=mask)
