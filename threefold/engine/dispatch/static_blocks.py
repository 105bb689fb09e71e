"""Blocks of a fixed size for the rows of a dispatch, so that a CUDA graph of a whole microbatch can hold it.

Dropless routing sends each rank another number of rows every time, which `all_to_all` wants to know on the host. Inside
a graph (`graphs/full_iteration.py` enters `context.static_rows`) each rank sends each other one a block of
`job.capacity_factor` times the balanced number instead (`job.capacity_scope = "rank"`). Rows that find no room are left
out and counted: the graph then makes all its gradients zero, and the microbatch is run again without it, dropless.

Shapes: T tokens, K experts of a token, S sorted copies, P rows in blocks, X ranks of ep, Y ranks of etp, E experts,
e experts held here.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from threefold.engine.dispatch.rows import RowMap
from threefold.engine.dispatch.split_sizes import SplitSizes
from threefold.engine.dist.collectives import all_gather, all_to_all
from threefold.engine.dist.mesh import Group


@dataclass
class StaticRows:
    """The capacity of the blocks of a microbatch, and how many rows found no room in any of its layers."""

    factor: float
    overflow: Tensor

    def place(self, rows: RowMap, count_E: Tensor, num_ranks: int) -> tuple[RowMap, Tensor, int]:
        """The same rows in a block for each rank with padding behind, how many of each expert are in it, and the rows
        of a block."""
        num_rows = rows.row_TK.numel()
        capacity = min(num_rows, math.ceil(num_rows / num_ranks * self.factor))
        ends_Xe = count_E.view(num_ranks, -1).cumsum(1)
        count_X = ends_Xe[:, -1]
        ends_X = count_X.cumsum(0)
        row_S = torch.arange(num_rows, device=count_E.device)
        rank_S = torch.searchsorted(ends_X, row_S, right=True)
        offset_S = row_S - (ends_X - count_X)[rank_S]
        row_S = torch.where(offset_S < capacity, rank_S * capacity + offset_S, -1)
        # One slot more than rows: copies without room are written there and cut off.
        slot_P = torch.full((num_ranks * capacity + 1,), -1, device=count_E.device)
        slot_P = slot_P.scatter_(0, torch.where(row_S < 0, len(slot_P) - 1, row_S), rows.slot_R)[:-1]
        self.overflow += (count_X - capacity).clamp(min=0).sum()
        count_Xe = ends_Xe.clamp(max=capacity).diff(dim=1, prepend=ends_Xe.new_zeros(num_ranks, 1))
        return RowMap(slot_P, row_S[rows.row_TK], padded=True), count_Xe.flatten(), capacity


class BlockCounts:
    """What `RowCounts` is where blocks have a fixed size: the counts stay on the device."""

    def __init__(self, count_E: Tensor, block_rows: int, ep: Group, etp: Group) -> None:
        self.block_rows = block_rows
        self.count_YXe = count_E.new_empty(etp.size, *count_E.shape)
        received_E = self.count_YXe[etp.rank]
        all_to_all(received_E, count_E, ep).wait()
        if not etp.is_trivial:
            all_gather(self.count_YXe.flatten(), received_E.clone(), etp).wait()
        blocks = [block_rows] * ep.size
        etp_rows = [block_rows * ep.size] * etp.size
        self._splits = SplitSizes(blocks, blocks, etp_rows, sum(etp_rows))

    def split_sizes(self) -> SplitSizes:
        return self._splits
