"""Rows that have come to a rank, in blocks, to the order of its experts, and back; with ETP, every slice's rows.

A rank of the etp group holds a slice of the width of each expert. It needs the rows of all of the group, and what it
computes from them are parts of sums.

Shapes: P rows that came to this rank, R rows of the etp group by expert, B blocks, e experts held here, D model dim.
"""

import torch
from torch import Tensor

from threefold.engine.dispatch.rows import inverse, reorder
from threefold.engine.mesh import Group
from threefold.engine.shard.collectives import exchange


class Arrival:
    """`sizes`: rows that each rank of etp has; `count_Be`: rows of each expert in each block, as all of them lie."""

    def __init__(self, etp: Group, sizes: list[int], count_Be: Tensor) -> None:
        self._etp, self._sizes, self._own = etp, sizes, sizes[etp.rank]
        self.count_e = count_Be.sum(dim=0)
        self._index: tuple[Tensor, Tensor] | None = None
        if min(count_Be.shape) > 1:
            expert_B = torch.arange(count_Be.shape[1], device=count_Be.device).repeat(len(count_Be))
            expert_R = expert_B.repeat_interleave(count_Be.flatten(), output_size=sum(sizes))
            # Stable: the rows of an expert lie by source, then in the order they were sent, whatever came first.
            index_R = expert_R.argsort(stable=True)
            self._index = index_R, inverse(index_R)

    def enter(self, x: Tensor) -> Tensor:
        if not self._etp.alone:
            # Uneven: an all-gather of unlike sizes is not to be had everywhere.
            x = exchange(x.expand(self._etp.size, *x.shape).flatten(0, 1), self._etp, self._sizes, self._each)
        return x if self._index is None else reorder(x, *self._index)

    def leave(self, y_RD: Tensor) -> Tensor:
        if self._index is not None:
            y_RD = reorder(y_RD, *reversed(self._index))
        if self._etp.alone:
            return y_RD
        parts = exchange(y_RD, self._etp, self._each, self._sizes)
        return parts.view(self._etp.size, self._own, *y_RD.shape[1:]).sum(dim=0)

    @property
    def _each(self) -> list[int]:
        return [self._own] * self._etp.size
