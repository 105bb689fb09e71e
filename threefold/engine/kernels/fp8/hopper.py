"""Grouped products in FP8 on Hopper: one warp fetches, two groups of warps multiply and scale in turns, so that the
tensor cores work on one group's block while the other adds up.

Each block of 128 of the sum is scaled and added in fp32: Hopper keeps only about 14 bits while it sums 8-bit products.
Where experts share out the rows of `a`, the table says which tile of rows is which. `TURNED`, they share out what is
summed over: the table has the end of each expert's blocks, and `most` is the number of experts.

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

BK: gl.constexpr = gl.constexpr(128)  # a block of the sum
PART: gl.constexpr = gl.constexpr(64)  # rows of a tile for each group of warps
BM: gl.constexpr = gl.constexpr(2 * 64)
WIDTH: gl.constexpr = gl.constexpr(128)  # columns multiplied at a time
BN: gl.constexpr = gl.constexpr(2 * 128)


@gluon.jit
def multiply(
    a, a_scale_ptr, w, w_scale_ptr, out, out_ptr, table_ptr, total_ptr, most, num_rows, M: gl.constexpr,
    N: gl.constexpr, K: gl.constexpr, SE: gl.constexpr, SN: gl.constexpr, SK: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, TURNED: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    a0 = gl.allocate_shared_memory(a.dtype, [STAGES, PART, BK], a.layout)
    a1 = gl.allocate_shared_memory(a.dtype, [STAGES, PART, BK], a.layout)
    b = gl.allocate_shared_memory(w.dtype, [STAGES, BN, BK], w.layout)
    out0 = gl.allocate_shared_memory(out.dtype, [PART, WIDTH], out.layout)
    out1 = gl.allocate_shared_memory(out.dtype, [PART, WIDTH], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (0, a0, b, a_scale_ptr, w_scale_ptr, out, out_ptr, out0, full, empty, table_ptr, total_ptr, most,
                        num_rows, M, N, K, SE, SN, SK, STAGES, GROUP, TURNED, WHOLE)),
            (_consume, (1, a1, b, a_scale_ptr, w_scale_ptr, out, out_ptr, out1, full, empty, table_ptr, total_ptr, most,
                        num_rows, M, N, K, SE, SN, SK, STAGES, GROUP, TURNED, WHOLE)),
            (_produce, (a, w, a0, a1, b, full, empty, table_ptr, total_ptr, most, M, N, K, STAGES, GROUP, TURNED)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def _num_tiles(total_ptr, most, M: gl.constexpr, N: gl.constexpr, TURNED: gl.constexpr):
    num_n: gl.constexpr = (N + BN - 1) // BN
    num_m = most * ((M + BM - 1) // BM) if TURNED else gl.load(total_ptr)
    return num_m * num_n


@gluon.jit
def _place(tile, num_m, num_n, GROUP: gl.constexpr):
    """Tile number -> (tile of rows, tile of columns). Neighbours share rows and weights, which then stay in L2."""
    width = GROUP * num_n
    first = (tile // width) * GROUP
    height = gl.minimum(num_m - first, GROUP)
    inside = tile % width
    return first + inside % height, inside // height


@gluon.jit
def _tile(
    tile, table_ptr, total_ptr, most, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr,
    TURNED: gl.constexpr,
):  # fmt: skip
    """-> (expert, first row of a, end of its rows, first column, first block of the sum, end of its blocks)."""
    num_n: gl.constexpr = (N + BN - 1) // BN
    if TURNED:
        num_m: gl.constexpr = (M + BM - 1) // BM
        expert = tile // (num_m * num_n)
        tile_m, tile_n = _place(tile % (num_m * num_n), num_m, num_n, GROUP)
        start = gl.load(table_ptr + expert - 1, mask=expert > 0, other=0)
        return expert, tile_m * BM, M, tile_n * BN, start, gl.load(table_ptr + expert)
    else:  # noqa: RET505 - what follows a return under a constant condition is still compiled
        tile_m, tile_n = _place(tile, gl.load(total_ptr), num_n, GROUP)
        expert = gl.load(table_ptr + tile_m)
        first = gl.load(table_ptr + most + tile_m)
        return expert, first, gl.load(table_ptr + 2 * most + tile_m), tile_n * BN, 0, (K + BK - 1) // BK


@gluon.jit
def _produce(
    a, w, a0, a1, b, full, empty, table_ptr, total_ptr, most, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr, TURNED: gl.constexpr,
):  # fmt: skip
    count = 0
    for tile in range(gl.program_id(0), _num_tiles(total_ptr, most, M, N, TURNED), gl.num_programs(0)):
        expert, row, _, col, start, stop = _tile(tile, table_ptr, total_ptr, most, M, N, K, GROUP, TURNED)
        w_row = col if TURNED else expert * N + col
        for k in range(start, stop):
            at = count % STAGES
            mbarrier.wait(empty.index(at), ((count // STAGES) & 1) ^ 1)
            ready = full.index(at)
            mbarrier.expect(ready, (BM + BN) * BK)
            tma.async_copy_global_to_shared(a, [row, k * BK], ready, a0.index(at))
            tma.async_copy_global_to_shared(w, [w_row, k * BK], ready, b.index(at))
            tma.async_copy_global_to_shared(a, [row + PART, k * BK], ready, a1.index(at))
            count += 1


@gluon.jit
def _consume(
    WHICH: gl.constexpr, a_part, b, a_scale_ptr, w_scale_ptr, out, out_ptr, buffer, full, empty, table_ptr, total_ptr,
    most, num_rows, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, SE: gl.constexpr, SN: gl.constexpr,
    SK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, TURNED: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    count = 0
    for tile in range(gl.program_id(0), _num_tiles(total_ptr, most, M, N, TURNED), gl.num_programs(0)):
        expert, row, end, col, start, stop = _tile(tile, table_ptr, total_ptr, most, M, N, K, GROUP, TURNED)
        row += WHICH * PART
        num_scales = M if TURNED else num_rows
        m = gl.minimum(row + gl.arange(0, PART, gl.SliceLayout(1, layout)), num_scales - 1)
        by_a = a_scale_ptr + start * num_scales + m
        by_w = w_scale_ptr + expert * SE + (col // WIDTH) * SN + start * SK
        beside = gl.where(col + WIDTH < N, SN, 0)  # no scale behind the last is read
        part = gl.zeros((PART, WIDTH), gl.float32, layout)
        left = part
        right = part
        then_row = 1.0 if WHOLE else gl.load(by_a)
        then_left = 1.0 if WHOLE else gl.load(by_w)
        then_right = 1.0 if WHOLE else gl.load(by_w + beside)
        for k in range(start, stop):
            at = count % STAGES
            mbarrier.wait(full.index(at), (count // STAGES) & 1)
            # One set of registers for all parts: a second would not fit beside the sums.
            part = warpgroup_mma(a_part.index(at), _turned(b, at, 0), part, use_acc=False, is_async=True)
            by_row, by_column, beside_it = then_row, then_left, then_right
            if not WHOLE:  # asked for a block ahead, so that the wait is short
                then = gl.minimum(k + 1, stop - 1) - start
                then_row = gl.load(by_a + then * num_scales)
                then_left = gl.load(by_w + then * SK)
                then_right = gl.load(by_w + then * SK + beside)
            part = warpgroup_mma_wait(0, [part])
            left = _add(left, part, by_row, by_column, WHOLE)
            # Added up first: the compiler would multiply into other registers meanwhile, and spill.
            left = warpgroup_mma_wait(0, [left])
            part = warpgroup_mma(a_part.index(at), _turned(b, at, WIDTH), part, use_acc=False, is_async=True)
            part = warpgroup_mma_wait(0, [part])
            mbarrier.arrive(empty.index(at), count=1)
            right = _add(right, part, by_row, beside_it, WHOLE)
            count += 1
        if WHOLE:
            by_row = gl.load(by_a)
            left = left * by_row[:, None] * _of_columns(by_w, N - col, N, layout)[None, :]
            right = right * by_row[:, None] * _of_columns(by_w + beside, N - col - WIDTH, N, layout)[None, :]
        shift = expert * M if TURNED else 0
        _put(left, out, out_ptr, buffer, row, end, shift, col, N, layout)
        _put(right, out, out_ptr, buffer, row, end, shift, col + WIDTH, N, layout)
    tma.store_wait(0)


@gluon.jit
def _turned(b, at, shift: gl.constexpr):
    return b.index(at).slice(shift, WIDTH, dim=0).permute((1, 0))


@gluon.jit
def _of_columns(ptr, num, N: gl.constexpr, layout: gl.constexpr):
    """Scales of the columns of a tile; those behind the last get any, as nobody keeps what it makes."""
    n = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    return gl.load(ptr + (n if N % WIDTH == 0 else gl.minimum(n, gl.maximum(num, 1) - 1)))


@gluon.jit
def _add(acc, part, by_row, by_column, WHOLE: gl.constexpr):
    """`by_column` is one for all."""
    if WHOLE:
        return acc + part
    else:  # noqa: RET505 - what follows a return under a constant condition is still compiled
        return acc + part * (by_row * by_column)[:, None]


@gluon.jit
def _put(acc, out, out_ptr, buffer, row, end, shift, col, N: gl.constexpr, layout: gl.constexpr):
    """Rows from `row` up to `end`, all `shift` further down."""
    value = acc.to(out.dtype)
    tma.store_wait(0)
    if (row + PART <= end) & (col + WIDTH <= N):
        buffer.store(value)
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [shift + row, col], buffer)
    else:
        # The copy engine cannot be told to spare the next expert's rows.
        m = row + gl.arange(0, PART, gl.SliceLayout(1, layout))
        n = col + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
        kept = (m < end)[:, None] & (n < N)[None, :]
        gl.store(out_ptr + (shift + m).to(gl.int64)[:, None] * N + n[None, :], value, mask=kept)
