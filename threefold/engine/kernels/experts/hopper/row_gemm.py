"""Grouped GEMM on Hopper, in Gluon: the rows of each expert times its own weight. One warp loads, two groups multiply.

`gpu_steps.py` calls `grouped_gemm` for the steps `down` and `input_grad` where the choice has a `GluonConfig`;
`../grouped_gemm.py` has the same in Triton. What bounds such a kernel is the traffic between L2 and shared memory. The
weight is the left side here and the rows are the right one, whose size in a tensor-core instruction is any multiple of
8: a tile has 256 rows, and the last tile of an expert up to 32 more. With 256 rows an expert on average, tiles of 128
rows would load the weight a third time for every second expert.

The result is transposed in registers, and in shared memory it is as it is stored.

Shapes: R rows sorted by expert, E experts, K summed over, N columns of the result.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from torch import Tensor
from triton.experimental import gluon  # type: ignore
from triton.experimental.gluon import language as gl  # type: ignore
from triton.experimental.gluon.language.nvidia.hopper import (  # type: ignore
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from threefold.engine.kernels.experts.hopper.tiles import gluon_blocks, tile_coordinates
from threefold.engine.kernels.experts.tile_schedule import TileTable
from threefold.engine.kernels.fast_launch import fast_launch
from threefold.engine.kernels.launch_config import GluonConfig, num_programs

TILE_ROWS, EXTRA_ROWS = 256, 32  # rows of a tile, and how many more the last tile of an expert may have
TILE_COLUMNS = 128
STAGES: gl.constexpr = gl.constexpr(4)  # loads in flight
BK: gl.constexpr = gl.constexpr(64)  # values that are summed in one step
ROWS: gl.constexpr = gl.constexpr(TILE_ROWS)
HALF_ROWS: gl.constexpr = gl.constexpr(TILE_ROWS // 2)
EXTRA: gl.constexpr = gl.constexpr(EXTRA_ROWS)
BN: gl.constexpr = gl.constexpr(TILE_COLUMNS)
GROUP_N: gl.constexpr = gl.constexpr(TILE_COLUMNS // 2)  # columns of a tile that one warp group takes
PART: gl.constexpr = gl.constexpr(64)  # rows that are stored at a time


def grouped_gemm(
    a_RK: Tensor,
    weight: Tensor,
    tiles: TileTable,
    transposed: bool,
    config: GluonConfig,
    target_R: Tensor | None = None,
) -> Tensor:
    """a @ weight[expert of the row], as `../grouped_gemm.py` has it. `tiles` are of TILE_ROWS and EXTRA_ROWS rows."""
    num_rows, inner = a_RK.shape
    outer = weight.shape[1 if transposed else 2]
    out_RN = a_RK.new_empty(num_rows, outer)
    sizes = TILE_ROWS, TILE_ROWS // 2, EXTRA_ROWS
    _row_gemm_kernel[(num_programs(a_RK.device, 1),)](
        gluon_blocks(weight.flatten(0, 1), 64, 64), *(gluon_blocks(a_RK, size, 64) for size in sizes),
        gluon_blocks(out_RN, 64, 64), out_RN, tiles.table if target_R is None else target_R, tiles.table, tiles.total,
        tiles.table.shape[1], inner, outer, config.group, transposed, target_R is not None, num_warps=4,
    )  # fmt: skip
    return out_RN


@fast_launch
@gluon.jit
def _row_gemm_kernel(
    w, rows, half_rows, extra_rows, out, out_ptr, target_ptr, table_ptr, total_ptr, max_tiles, K: gl.constexpr,
    N: gl.constexpr, GROUP: gl.constexpr, TRANSPOSED: gl.constexpr, STORED: gl.constexpr,
):  # fmt: skip
    """With STORED each row of the result is stored at the row that `target_ptr` names."""
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    a0 = gl.allocate_shared_memory(w.dtype, [STAGES, 64, 64], layout)
    a1 = gl.allocate_shared_memory(w.dtype, [STAGES, 64, 64], layout)
    b = gl.allocate_shared_memory(w.dtype, [STAGES, ROWS, BK], layout)
    extra = gl.allocate_shared_memory(w.dtype, [STAGES, EXTRA, BK], layout)
    out0 = gl.allocate_shared_memory(out.dtype, [PART, GROUP_N], out.layout)
    out1 = gl.allocate_shared_memory(out.dtype, [PART, GROUP_N], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (0, a0, b, extra, out, out_ptr, target_ptr, out0, full, empty, table_ptr, total_ptr, max_tiles,
                         K, N, GROUP, TRANSPOSED, STORED)),
            (_multiply, (1, a1, b, extra, out, out_ptr, target_ptr, out1, full, empty, table_ptr, total_ptr, max_tiles,
                         K, N, GROUP, TRANSPOSED, STORED)),
            (_load, (w, rows, half_rows, extra_rows, a0, a1, b, extra, full, empty, table_ptr, total_ptr, max_tiles, K,
                     N, GROUP, TRANSPOSED)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


@gluon.jit
def _load_tile(tile, total, table_ptr, max_tiles, N: gl.constexpr, GROUP: gl.constexpr):
    """-> (expert, first row, number of rows, first column); behind the last tile these are of any tile."""
    num_m = gl.maximum(total, 1)
    tile_m, tile_n = tile_coordinates(gl.minimum(tile, num_m * (N // BN) - 1), num_m, N // BN, GROUP)
    first = gl.load(table_ptr + max_tiles + tile_m)
    left = gl.load(table_ptr + 2 * max_tiles + tile_m) - first
    return gl.load(table_ptr + tile_m), first, gl.where(left > ROWS + EXTRA, ROWS, left), tile_n * BN


@gluon.jit
def _load(
    w, rows, half_rows, extra_rows, a0, a1, b, extra, full, empty, table_ptr, total_ptr, max_tiles, K: gl.constexpr,
    N: gl.constexpr, GROUP: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    count = 0
    total = gl.load(total_ptr)
    expert, first, num_rows, col = _load_tile(gl.program_id(0), total, table_ptr, max_tiles, N, GROUP)
    for tile in range(gl.program_id(0), total * (N // BN), gl.num_programs(0)):
        # The next tile is looked up in the time of this one.
        next_expert, next_first, next_num_rows, next_col = _load_tile(
            tile + gl.num_programs(0), total, table_ptr, max_tiles, N, GROUP
        )
        is_half = num_rows <= HALF_ROWS + EXTRA
        has_extra = num_rows > gl.where(is_half, HALF_ROWS, ROWS)
        for k in range(0, K, BK):
            at = count % STAGES
            mbarrier.wait(empty.index(at), ((count // STAGES) & 1) ^ 1)
            ready = full.index(at)
            # The bytes that come; all of it counts as one arrival.
            if is_half:
                if has_extra:
                    mbarrier.expect(ready, (BN + HALF_ROWS + EXTRA) * BK * 2)
                else:
                    mbarrier.expect(ready, (BN + HALF_ROWS) * BK * 2)
                tma.async_copy_global_to_shared(
                    half_rows, [first, k], ready, b.index(at).slice(0, HALF_ROWS, dim=0)
                )  # fmt: skip
                tma.async_copy_global_to_shared(
                    extra_rows, [first + HALF_ROWS, k], ready, extra.index(at), pred=has_extra
                )  # fmt: skip
            else:
                if has_extra:
                    mbarrier.expect(ready, (BN + ROWS + EXTRA) * BK * 2)
                else:
                    mbarrier.expect(ready, (BN + ROWS) * BK * 2)
                tma.async_copy_global_to_shared(rows, [first, k], ready, b.index(at))
                tma.async_copy_global_to_shared(extra_rows, [first + ROWS, k], ready, extra.index(at), pred=has_extra)
            if TRANSPOSED:
                tma.async_copy_global_to_shared(w, [expert * N + col, k], ready, a0.index(at))
                tma.async_copy_global_to_shared(w, [expert * N + col + GROUP_N, k], ready, a1.index(at))
            else:
                tma.async_copy_global_to_shared(w, [expert * K + k, col], ready, a0.index(at))
                tma.async_copy_global_to_shared(w, [expert * K + k, col + GROUP_N], ready, a1.index(at))
            count += 1
        expert, first, num_rows, col = next_expert, next_first, next_num_rows, next_col


@gluon.jit
def _multiply(
    WHICH: gl.constexpr, a, b, extra, out, out_ptr, target_ptr, buffer, full, empty, table_ptr, total_ptr, max_tiles,
    K: gl.constexpr, N: gl.constexpr, GROUP: gl.constexpr, TRANSPOSED: gl.constexpr, STORED: gl.constexpr,
):  # fmt: skip
    """One of two warp groups: half the columns of every tile."""
    total = gl.load(total_ptr)
    _, first, num_rows, col = _load_tile(gl.program_id(0), total, table_ptr, max_tiles, N, GROUP)
    for tile in range(gl.program_id(0), total * (N // BN), gl.num_programs(0)):
        _, next_first, next_num_rows, next_col = _load_tile(
            tile + gl.num_programs(0), total, table_ptr, max_tiles, N, GROUP
        )
        col += WHICH * GROUP_N
        number = tile // gl.num_programs(0)
        if num_rows > ROWS:
            _compute_tile(a, b, extra, out, out_ptr, target_ptr, buffer, full, empty, number, first, num_rows, col,
                          K, N, TRANSPOSED, STORED, ROWS, True)  # fmt: skip
        elif num_rows > HALF_ROWS + EXTRA:
            _compute_tile(a, b, extra, out, out_ptr, target_ptr, buffer, full, empty, number, first, num_rows, col,
                          K, N, TRANSPOSED, STORED, ROWS, False)  # fmt: skip
        elif num_rows > HALF_ROWS:
            _compute_tile(a, b, extra, out, out_ptr, target_ptr, buffer, full, empty, number, first, num_rows, col,
                          K, N, TRANSPOSED, STORED, HALF_ROWS, True)  # fmt: skip
        else:
            _compute_tile(a, b, extra, out, out_ptr, target_ptr, buffer, full, empty, number, first, num_rows, col,
                          K, N, TRANSPOSED, STORED, HALF_ROWS, False)  # fmt: skip
        first, num_rows, col = next_first, next_num_rows, next_col
    tma.store_wait(0)


@gluon.jit
def _compute_tile(
    a, b, extra, out, out_ptr, target_ptr, buffer, full, empty, number, first, num_rows, col, K: gl.constexpr,
    N: gl.constexpr, TRANSPOSED: gl.constexpr, STORED: gl.constexpr, BR: gl.constexpr, HAS_EXTRA: gl.constexpr,
):  # fmt: skip
    """A tile of BR rows, and of up to 32 more if HAS_EXTRA; `number` counts the tiles of this program."""
    NUM_STEPS: gl.constexpr = K // BK
    acc = gl.zeros((GROUP_N, BR), gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BR, 16]))
    tail = gl.zeros((GROUP_N, EXTRA), gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, EXTRA, 16]))
    count = number * NUM_STEPS
    for step in range(NUM_STEPS):
        at = count % STAGES
        mbarrier.wait(full.index(at), (count // STAGES) & 1)
        if TRANSPOSED:
            left = a.index(at)
        else:
            left = a.index(at).permute((1, 0))
        acc = warpgroup_mma(left, b.index(at).slice(0, BR, dim=0).permute((1, 0)), acc, is_async=True)
        if HAS_EXTRA:
            tail = warpgroup_mma(left, extra.index(at).permute((1, 0)), tail, is_async=True)
            acc, tail = warpgroup_mma_wait(2, [acc, tail])
        else:
            acc = warpgroup_mma_wait(1, [acc])
        # The product before this one is done, so that its stage can be loaded again.
        mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1, pred=step > 0)
        count += 1
    if HAS_EXTRA:
        acc, tail = warpgroup_mma_wait(0, [acc, tail])
    else:
        acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1)
    end = first + num_rows
    _store_parts(acc, out, out_ptr, target_ptr, buffer, first, end, col, N, STORED, BR)
    if HAS_EXTRA:
        _store_masked(tail, out_ptr, target_ptr, buffer.slice(0, EXTRA, dim=0), first + BR, end, col, N, STORED, EXTRA)


@gluon.jit
def _store_parts(
    acc, out, out_ptr, target_ptr, buffer, row, end, col, N: gl.constexpr, STORED: gl.constexpr, BR: gl.constexpr
):  # fmt: skip
    """Store PART rows at a time: it halves the accumulator until a half has so many."""
    if BR == PART:
        if (not STORED) and row + PART <= end:
            tma.store_wait(0)  # the store before this one has read the buffer
            buffer.store(acc.to(out.dtype).permute(1, 0))
            fence_async_shared()
            tma.async_copy_shared_to_global(out, [row, col], buffer)
        elif row < end:
            _store_masked(acc, out_ptr, target_ptr, buffer, row, end, col, N, STORED, PART)
    else:
        HALF: gl.constexpr = BR // 2
        first, second = acc.reshape(GROUP_N, 2, HALF).permute(0, 2, 1).split()
        _store_parts(first, out, out_ptr, target_ptr, buffer, row, end, col, N, STORED, HALF)
        _store_parts(second, out, out_ptr, target_ptr, buffer, row + HALF, end, col, N, STORED, HALF)


@gluon.jit
def _store_masked(
    acc, out_ptr, target_ptr, buffer, row, end, col, N: gl.constexpr, STORED: gl.constexpr, NUM: gl.constexpr
):  # fmt: skip
    """Store rows up to `end`. TMA would overwrite the rows of the next expert."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    tma.store_wait(0)
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    buffer.store(acc.to(dtype).permute(1, 0))
    value = buffer.load(layout)
    m = row + gl.arange(0, NUM, gl.SliceLayout(1, layout))
    n = col + gl.arange(0, GROUP_N, gl.SliceLayout(0, layout))
    at = gl.load(target_ptr + m, mask=m < end, other=0) if STORED else m
    gl.store(out_ptr + at.to(gl.int64)[:, None] * N + n[None, :], value, mask=(m < end)[:, None])
