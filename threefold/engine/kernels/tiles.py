"""Which tile of a grouped product is which: tiles of BM rows, none of which crosses from one expert to the next.

The table is made on the device from the ends of the experts' rows, so that the host never waits for a count.

Shapes: E experts, M tiles of rows (an upper bound; those behind `total` are unused).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from dataclasses import dataclass

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor


@dataclass(frozen=True)
class Tiles:
    table: Tensor  # (3, M): expert, first row, end of the expert's rows
    total: Tensor  # (1,): tiles in use
    size: int  # rows of a tile


def tiles_of(ends_E: Tensor, num_rows: int, size: int) -> Tiles:
    num_experts = len(ends_E)
    most = num_rows // size + num_experts
    table = torch.empty(3, most, dtype=torch.int32, device=ends_E.device)
    total = torch.empty(1, dtype=torch.int32, device=ends_E.device)
    block = 64
    grid = (triton.cdiv(most, block),)
    _fill[grid](ends_E, table, total, num_experts, most, size, triton.next_power_of_2(num_experts), block)
    return Tiles(table, total, size)


@triton.jit
def _fill(ends_ptr, table_ptr, total_ptr, num_experts, most, size: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr):
    expert = tl.arange(0, E)
    known = expert < num_experts
    end = tl.load(ends_ptr + expert, mask=known, other=0)
    start = tl.load(ends_ptr + expert - 1, mask=known & (expert > 0), other=0)
    num = tl.where(known, (end - start + size - 1) // size, 0)
    after = tl.cumsum(num, 0)
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = (tile[:, None] >= (after - num)[None, :]) & (tile[:, None] < after[None, :])
    first = start[None, :] + (tile[:, None] - (after - num)[None, :]) * size
    live = tile < most
    tl.store(table_ptr + tile, tl.sum(tl.where(mine, expert[None, :], 0), 1), mask=live)
    tl.store(table_ptr + most + tile, tl.sum(tl.where(mine, first, 0), 1), mask=live)
    tl.store(table_ptr + 2 * most + tile, tl.sum(tl.where(mine, end[None, :], 0), 1), mask=live)
    tl.store(total_ptr, tl.sum(num, 0))


def order_of(ends_E: Tensor) -> Tensor:
    """Experts by their number of rows, the fullest first: tiles that sum over rows side by side then take as long."""
    num_experts, block = len(ends_E), 32
    order_E = torch.empty_like(ends_E)
    _rank[(triton.cdiv(num_experts, block),)](ends_E, order_E, num_experts, triton.next_power_of_2(num_experts), block)
    return order_E


@triton.jit
def _counts(ends_ptr, expert, known):
    end = tl.load(ends_ptr + expert, mask=known, other=0)
    return tl.where(known, end - tl.load(ends_ptr + expert - 1, mask=known & (expert > 0), other=0), -1)


@triton.jit
def _rank(ends_ptr, order_ptr, num_experts, E: tl.constexpr, BLOCK: tl.constexpr):
    expert, other = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, E)
    known = expert < num_experts
    count = _counts(ends_ptr, expert, known)[:, None]
    others = _counts(ends_ptr, other, other < num_experts)[None, :]
    before = (others > count) | ((others == count) & (other[None, :] < expert[:, None]))
    tl.store(order_ptr + tl.sum(before.to(tl.int32), 1), expert, mask=known)


@triton.jit
def place(tile, total, num_n, GROUP: tl.constexpr):
    """Tile number -> (tile of rows, tile of columns). Neighbours share rows and weights, which then stay in L2."""
    width = GROUP * num_n
    first = (tile // width) * GROUP
    height = tl.minimum(total - first, GROUP)
    inside = tile % width
    return first + inside % height, inside // height
