"""The FP8 grouped GEMM kernel for Hopper, in Gluon: one warp loads by TMA, two warp groups multiply and scale in turns.

The tensor cores work on the block of one group while the other group adds up. Each block of 128 of the sum is scaled
and added in fp32, because Hopper keeps only about 14 bits while it sums 8-bit products.

Without `WGRAD` the rows of `a` belong to experts, and the table says which rows a tile has. With `WGRAD` the dim that
is summed over belongs to experts: the table has the end of each expert's blocks, and `max_tiles` is the number of
experts; with `ADD` the result is added to what `out` holds. With `ROWWISE` each row of either side has one scale,
applied at the end. With `STORED` each row of the result is stored at the row that `target_ptr` names. `hopper_gemm`
launches the kernel.

Shapes: M rows of a (of the result), N columns of the result, K summed over, E experts.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from triton.experimental import gluon  # type: ignore
from triton.experimental.gluon import language as gl  # type: ignore
from triton.experimental.gluon.language.nvidia.hopper import (  # type: ignore
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from threefold.engine.kernels.experts.hopper.tiles import tile_coordinates
from threefold.engine.kernels.fast_launch import fast_launch

BK: gl.constexpr = gl.constexpr(128)  # length of a block of the sum
ROWS_PER_GROUP: gl.constexpr = gl.constexpr(64)  # rows of a tile that one warp group takes
BM: gl.constexpr = gl.constexpr(2 * 64)
HALF_BN: gl.constexpr = gl.constexpr(128)  # columns that are multiplied at a time
BN: gl.constexpr = gl.constexpr(2 * 128)


@fast_launch
@gluon.jit
def grouped_gemm_kernel(
    a, a_scale_ptr, w, w_scale_ptr, out, out_ptr, target_ptr, table_ptr, total_ptr, max_tiles, num_rows,
    M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, SE: gl.constexpr, SN: gl.constexpr, SK: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr, WGRAD: gl.constexpr, ROWWISE: gl.constexpr, ADD: gl.constexpr,
    STORED: gl.constexpr,
):  # fmt: skip
    a0 = gl.allocate_shared_memory(a.dtype, [STAGES, ROWS_PER_GROUP, BK], a.layout)
    a1 = gl.allocate_shared_memory(a.dtype, [STAGES, ROWS_PER_GROUP, BK], a.layout)
    b = gl.allocate_shared_memory(w.dtype, [STAGES, BN, BK], w.layout)
    out0 = gl.allocate_shared_memory(out.dtype, [ROWS_PER_GROUP, HALF_BN], out.layout)
    out1 = gl.allocate_shared_memory(out.dtype, [ROWS_PER_GROUP, HALF_BN], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (0, a0, b, a_scale_ptr, w_scale_ptr, out, out_ptr, target_ptr, out0, full, empty, table_ptr,
                        total_ptr, max_tiles, num_rows, M, N, K, SE, SN, SK, STAGES, GROUP, WGRAD, ROWWISE, ADD,
                        STORED)),
            (_consume, (1, a1, b, a_scale_ptr, w_scale_ptr, out, out_ptr, target_ptr, out1, full, empty, table_ptr,
                        total_ptr, max_tiles, num_rows, M, N, K, SE, SN, SK, STAGES, GROUP, WGRAD, ROWWISE, ADD,
                        STORED)),
            (_produce, (a, w, a0, a1, b, full, empty, table_ptr, total_ptr, max_tiles, M, N, K, STAGES, GROUP, WGRAD)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def _num_tiles(total_ptr, max_tiles, M: gl.constexpr, N: gl.constexpr, WGRAD: gl.constexpr):
    num_n: gl.constexpr = (N + BN - 1) // BN
    num_m = max_tiles * ((M + BM - 1) // BM) if WGRAD else gl.load(total_ptr)
    return num_m * num_n


@gluon.jit
def _load_tile(
    tile, table_ptr, total_ptr, max_tiles, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr,
    WGRAD: gl.constexpr,
):  # fmt: skip
    """The expert of a tile, first row of a, end of its rows, first column, first block of the sum, end of blocks."""
    num_n: gl.constexpr = (N + BN - 1) // BN
    if WGRAD:
        num_m: gl.constexpr = (M + BM - 1) // BM
        expert = tile // (num_m * num_n)
        tile_m, tile_n = tile_coordinates(tile % (num_m * num_n), num_m, num_n, GROUP)
        start = gl.load(table_ptr + expert - 1, mask=expert > 0, other=0)
        return expert, tile_m * BM, M, tile_n * BN, start, gl.load(table_ptr + expert)
    else:  # noqa: RET505 - what follows a return under a constant condition is still compiled
        tile_m, tile_n = tile_coordinates(tile, gl.load(total_ptr), num_n, GROUP)
        expert = gl.load(table_ptr + tile_m)
        first = gl.load(table_ptr + max_tiles + tile_m)
        return expert, first, gl.load(table_ptr + 2 * max_tiles + tile_m), tile_n * BN, 0, (K + BK - 1) // BK


@gluon.jit
def _produce(
    a, w, a0, a1, b, full, empty, table_ptr, total_ptr, max_tiles, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr, WGRAD: gl.constexpr,
):  # fmt: skip
    count = 0
    for tile in range(gl.program_id(0), _num_tiles(total_ptr, max_tiles, M, N, WGRAD), gl.num_programs(0)):
        expert, row, _, col, start, stop = _load_tile(tile, table_ptr, total_ptr, max_tiles, M, N, K, GROUP, WGRAD)
        w_row = col if WGRAD else expert * N + col
        for k in range(start, stop):
            at = count % STAGES
            mbarrier.wait(empty.index(at), ((count // STAGES) & 1) ^ 1)
            ready = full.index(at)
            mbarrier.expect(ready, (BM + BN) * BK)
            tma.async_copy_global_to_shared(a, [row, k * BK], ready, a0.index(at))
            tma.async_copy_global_to_shared(w, [w_row, k * BK], ready, b.index(at))
            tma.async_copy_global_to_shared(a, [row + ROWS_PER_GROUP, k * BK], ready, a1.index(at))
            count += 1


@gluon.jit
def _consume(
    WHICH: gl.constexpr, a_part, b, a_scale_ptr, w_scale_ptr, out, out_ptr, target_ptr, buffer, full, empty, table_ptr,
    total_ptr, max_tiles, num_rows, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, SE: gl.constexpr,
    SN: gl.constexpr, SK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, WGRAD: gl.constexpr,
    ROWWISE: gl.constexpr, ADD: gl.constexpr, STORED: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF_BN, 32])
    count = 0
    for tile in range(gl.program_id(0), _num_tiles(total_ptr, max_tiles, M, N, WGRAD), gl.num_programs(0)):
        expert, row, end, col, start, stop = _load_tile(tile, table_ptr, total_ptr, max_tiles, M, N, K, GROUP, WGRAD)
        row += WHICH * ROWS_PER_GROUP
        num_scales = M if WGRAD else num_rows
        m = gl.minimum(row + gl.arange(0, ROWS_PER_GROUP, gl.SliceLayout(1, layout)), num_scales - 1)
        a_scale = a_scale_ptr + start * num_scales + m
        w_scale = w_scale_ptr + expert * SE + (col // HALF_BN) * SN + start * SK
        second_half = gl.where(
            col + HALF_BN < N, SN, 0
        )  # the last tile has no second half, and no scale behind the end is read
        part = gl.zeros((ROWS_PER_GROUP, HALF_BN), gl.float32, layout)
        left = part
        right = part
        next_row = 1.0 if ROWWISE else gl.load(a_scale)
        next_left = 1.0 if ROWWISE else gl.load(w_scale)
        next_right = 1.0 if ROWWISE else gl.load(w_scale + second_half)
        for k in range(start, stop):
            at = count % STAGES
            mbarrier.wait(full.index(at), (count // STAGES) & 1)
            # All parts use one set of registers: a second would not fit beside the sums.
            part = warpgroup_mma(a_part.index(at), _transposed_slice(b, at, 0), part, use_acc=False, is_async=True)
            row_scale, left_scale, right_scale = next_row, next_left, next_right
            if not ROWWISE:  # the scales of the next block are loaded ahead, so that the wait is short
                then = gl.minimum(k + 1, stop - 1) - start
                next_row = gl.load(a_scale + then * num_scales)
                next_left = gl.load(w_scale + then * SK)
                next_right = gl.load(w_scale + then * SK + second_half)
            part = warpgroup_mma_wait(0, [part])
            left = _accumulate(left, part, row_scale, left_scale, ROWWISE)
            # The sum is finished first: otherwise the compiler multiplies into other registers meanwhile, and spills.
            left = warpgroup_mma_wait(0, [left])
            part = warpgroup_mma(
                a_part.index(at), _transposed_slice(b, at, HALF_BN), part, use_acc=False, is_async=True
            )
            part = warpgroup_mma_wait(0, [part])
            mbarrier.arrive(empty.index(at), count=1)
            right = _accumulate(right, part, row_scale, right_scale, ROWWISE)
            count += 1
        if ROWWISE:
            row_scale = gl.load(a_scale)
            left = left * row_scale[:, None] * _load_column_scales(w_scale, N - col, N, layout)[None, :]
            right = (
                right
                * row_scale[:, None]
                * _load_column_scales(w_scale + second_half, N - col - HALF_BN, N, layout)[None, :]
            )
        shift = expert * M if WGRAD else 0
        if ADD:
            _add_part(left, out_ptr, row, end, shift, col, N, layout)
            _add_part(right, out_ptr, row, end, shift, col + HALF_BN, N, layout)
        elif STORED:
            _store_at_targets(left, out_ptr, target_ptr, buffer, row, end, col, N)
            _store_at_targets(right, out_ptr, target_ptr, buffer, row, end, col + HALF_BN, N)
        else:
            _store_part(left, out, out_ptr, buffer, row, end, shift, col, N, layout)
            _store_part(right, out, out_ptr, buffer, row, end, shift, col + HALF_BN, N, layout)
    tma.store_wait(0)


@gluon.jit
def _transposed_slice(b, at, shift: gl.constexpr):
    return b.index(at).slice(shift, HALF_BN, dim=0).permute((1, 0))


@gluon.jit
def _load_column_scales(ptr, num, N: gl.constexpr, layout: gl.constexpr):
    """The scales of the columns of a tile. Columns behind the last get any scale, as they are not stored."""
    n = gl.arange(0, HALF_BN, gl.SliceLayout(0, layout))
    return gl.load(ptr + (n if N % HALF_BN == 0 else gl.minimum(n, gl.maximum(num, 1) - 1)))


@gluon.jit
def _accumulate(acc, part, row_scale, left_scale, ROWWISE: gl.constexpr):
    """Scale a part and add it. `by_column` is one number for all columns."""
    if ROWWISE:
        return acc + part
    else:  # noqa: RET505 - what follows a return under a constant condition is still compiled
        return acc + part * (row_scale * left_scale)[:, None]


@gluon.jit
def _store_part(acc, out, out_ptr, buffer, row, end, shift, col, N: gl.constexpr, layout: gl.constexpr):
    """Store rows from `row` up to `end`, `shift` rows further down in the result."""
    value = acc.to(out.dtype)
    tma.store_wait(0)
    if (row + ROWS_PER_GROUP <= end) & (col + HALF_BN <= N):
        buffer.store(value)
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [shift + row, col], buffer)
    else:
        # TMA would overwrite the rows of the next expert.
        at, mask = _pointers(out_ptr, row, end, shift, col, N, layout)
        gl.store(at, value, mask=mask)


@gluon.jit
def _store_at_targets(acc, out_ptr, target_ptr, buffer, row, end, col, N: gl.constexpr):
    """Store each row up to `end` at the row that `target_ptr` names."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    buffer.store(acc.to(out_ptr.dtype.element_ty))
    value = buffer.load(layout)  # 16 bytes a thread, whole rows of the half tile side by side
    m = row + gl.arange(0, ROWS_PER_GROUP, gl.SliceLayout(1, layout))
    n = col + gl.arange(0, HALF_BN, gl.SliceLayout(0, layout))
    at = gl.load(target_ptr + m, mask=m < end, other=0).to(gl.int64)
    gl.store(out_ptr + at[:, None] * N + n[None, :], value, mask=(m < end)[:, None] & (n < N)[None, :])


@gluon.jit
def _add_part(acc, out_ptr, row, end, shift, col, N: gl.constexpr, layout: gl.constexpr):
    """Add to rows from `row` up to `end`, `shift` rows further down in the result."""
    at, mask = _pointers(out_ptr, row, end, shift, col, N, layout)
    total = gl.load(at, mask=mask, other=0.0).to(gl.float32) + acc
    gl.store(at, total.to(out_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _pointers(out_ptr, row, end, shift, col, N: gl.constexpr, layout: gl.constexpr):
    """The addresses of a half tile of the result, and which of them lie inside."""
    m = row + gl.arange(0, ROWS_PER_GROUP, gl.SliceLayout(1, layout))
    n = col + gl.arange(0, HALF_BN, gl.SliceLayout(0, layout))
    return out_ptr + (shift + m).to(gl.int64)[:, None] * N + n[None, :], (m < end)[:, None] & (n < N)[None, :]
