"""Which tile of a grouped GEMM belongs to which expert and rows, and in which order tiles and experts are computed.

The table of tiles is made on the device from the ends of the experts' rows, so that the host never waits for a count.
No tile crosses from one expert to the next. Example: experts with 5 and 3 rows and tiles of 4 rows give three tiles,
(expert 0, first row 0, end 5), (0, 4, 5) and (1, 5, 8); with one extra row there are two, (0, 0, 5) and (1, 5, 8). The
grouped GEMMs of `experts/` and `fp8/` read it, and store tiles without touching the rows of the next expert.

Shapes: E experts, M tiles of rows (an upper bound; the tiles from `total` on are unused).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from threefold.engine.kernels.fast_launch import fast_launch
from threefold.engine.kernels.launch_config import cdiv, next_power_of_2

_TILES, _EXPERTS = 64, 32  # tiles and experts of one program


@dataclass(frozen=True)
class TileTable:
    """The tiles of rows of one grouped GEMM."""

    table: Tensor  # (3, M): expert, first row, end of the expert's rows
    total: Tensor  # (1,): number of tiles in use
    size: int  # rows of a tile; the last tile of an expert may have more (`extra` of `make_tile_table`)
    order_E: Tensor  # see `experts_by_load`


def make_tile_table(ends_E: Tensor, num_rows: int, size: int, extra: int = 0) -> TileTable:
    """Cut the rows of every expert, which end at `ends_E`, into tiles of `size` rows, and sort experts by load.

    Up to `extra` rows that are left over at the end of an expert belong to its last tile.
    """
    num_experts = len(ends_E)
    max_tiles = num_rows // size + num_experts
    table = torch.empty(3, max_tiles, dtype=torch.int32, device=ends_E.device)
    total = torch.empty(1, dtype=torch.int32, device=ends_E.device)
    order_E = torch.empty_like(ends_E)
    num_blocks = cdiv(max_tiles, _TILES)
    _fill_table[(num_blocks + cdiv(num_experts, _EXPERTS),)](
        ends_E, table, total, order_E, num_experts, max_tiles, num_blocks, size, extra, next_power_of_2(num_experts),
        _TILES, _EXPERTS,
    )  # fmt: skip
    return TileTable(table, total, size, order_E)


def experts_by_load(ends_E: Tensor) -> Tensor:
    """Experts sorted by their number of rows, most rows first: weight-gradient tiles that run at the same time then
    take about as long. A `TileTable` has the same."""
    order_E, num_experts = torch.empty_like(ends_E), len(ends_E)
    _rank_experts[(cdiv(num_experts, _EXPERTS),)](ends_E, order_E, num_experts, next_power_of_2(num_experts), _EXPERTS)
    return order_E


@fast_launch
@triton.jit
def _fill_table(
    ends_ptr, table_ptr, total_ptr, order_ptr, num_experts, max_tiles, num_blocks, size: tl.constexpr,
    extra: tl.constexpr, E: tl.constexpr, TILES: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """The first `num_blocks` programs fill the table, and the others sort experts by load."""
    if tl.program_id(0) >= num_blocks:
        _store_ranks(ends_ptr, order_ptr, tl.program_id(0) - num_blocks, num_experts, E, EXPERTS)
    else:
        expert = tl.arange(0, E)
        known = expert < num_experts
        end = tl.load(ends_ptr + expert, mask=known, other=0)
        start = tl.load(ends_ptr + expert - 1, mask=known & (expert > 0), other=0)
        # At least one tile for an expert with rows, and with `extra` fewer than its rows would fill.
        num_tiles = tl.maximum((end - start - extra + size - 1) // size, tl.where(end > start, 1, 0))
        tile_end = tl.cumsum(num_tiles, 0)
        tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
        mine = (tile[:, None] >= (tile_end - num_tiles)[None, :]) & (tile[:, None] < tile_end[None, :])
        first = start[None, :] + (tile[:, None] - (tile_end - num_tiles)[None, :]) * size
        live = tile < max_tiles
        tl.store(table_ptr + tile, tl.sum(tl.where(mine, expert[None, :], 0), 1), mask=live)
        tl.store(table_ptr + max_tiles + tile, tl.sum(tl.where(mine, first, 0), 1), mask=live)
        tl.store(table_ptr + 2 * max_tiles + tile, tl.sum(tl.where(mine, end[None, :], 0), 1), mask=live)
        tl.store(total_ptr, tl.sum(num_tiles, 0))


@fast_launch
@triton.jit
def _rank_experts(ends_ptr, order_ptr, num_experts, E: tl.constexpr, EXPERTS: tl.constexpr):
    _store_ranks(ends_ptr, order_ptr, tl.program_id(0), num_experts, E, EXPERTS)


@triton.jit
def _row_counts(ends_ptr, expert, known):
    end = tl.load(ends_ptr + expert, mask=known, other=0)
    return tl.where(known, end - tl.load(ends_ptr + expert - 1, mask=known & (expert > 0), other=0), -1)


@triton.jit
def _store_ranks(ends_ptr, order_ptr, block, num_experts, E: tl.constexpr, EXPERTS: tl.constexpr):
    expert, other = block * EXPERTS + tl.arange(0, EXPERTS), tl.arange(0, E)
    known = expert < num_experts
    count = _row_counts(ends_ptr, expert, known)[:, None]
    others = _row_counts(ends_ptr, other, other < num_experts)[None, :]
    before = (others > count) | ((others == count) & (other[None, :] < expert[:, None]))
    tl.store(order_ptr + tl.sum(before.to(tl.int32), 1), expert, mask=known)


@triton.jit
def tile_coordinates(tile, total, num_n, GROUP: tl.constexpr):
    """Tile number -> (tile of rows, tile of columns). Neighboring tiles share rows and weights, which stay in L2."""
    width = GROUP * num_n
    first = (tile // width) * GROUP
    height = tl.minimum(total - first, GROUP)
    inside = tile % width
    return first + inside % height, inside // height


@triton.jit
def split_columns(acc, BM: tl.constexpr, BN: tl.constexpr):
    """-> (left columns, right columns). Whatever follows needs half the registers then."""
    return acc.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()


@triton.jit
def store_tile(
    value, desc, ptr, first, end, col, shift, WIDTH: tl.constexpr, STRIDE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, EVEN: tl.constexpr, COPY: tl.constexpr = True, target_ptr=None,
):  # fmt: skip
    """Store rows from `first` up to `end` and columns from `col` up to WIDTH, `shift` columns further right.

    COPY permits the copy engine (TMA), which is used for tiles that are full. With `target_ptr` a row is stored at the
    row that it names there.
    """
    if target_ptr is not None:
        row, n = first + tl.arange(0, BM), col + tl.arange(0, BN)
        target = tl.load(target_ptr + row, mask=row < end, other=0).to(tl.int64)
        mask = (row < end)[:, None] & (n < WIDTH)[None, :]
        tl.store(ptr + target[:, None] * STRIDE + shift + n[None, :], value, mask=mask)
    elif EVEN and COPY and first + BM <= end:
        desc.store([first, shift + col], value)
    else:
        # The copy engine stores whole tiles: it would overwrite the next expert's rows or the next half's columns.
        row, n = first + tl.arange(0, BM), col + tl.arange(0, BN)
        mask = (row < end)[:, None] & (n < WIDTH)[None, :]
        tl.store(ptr + row.to(tl.int64)[:, None] * STRIDE + shift + n[None, :], value, mask=mask)
