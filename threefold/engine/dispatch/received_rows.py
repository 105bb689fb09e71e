"""Says which of the rows that a rank has received belong to which expert; with ETP it gathers and reduces them as well.

Rows arrive in blocks, one per source rank, each sorted by expert. They stay where they arrive: the experts read and
store them by the `order` that is made here, without a pass over memory, or sort them by it where their kernels cannot.
With expert tensor parallelism each rank of the etp group holds a slice of the width of each expert: it needs the rows
of the whole group, and its outputs are partial sums. The dispatchers make one `ReceivedRows` per microbatch.

Shapes: P rows received by this rank, R rows of the etp group, B blocks, e experts held here, F = e + 1, D model dim.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from threefold.engine.dist.collectives import all_to_all_rows
from threefold.engine.dist.mesh import Group
from threefold.engine.kernels.experts.sorted_rows import SortedRows


class ReceivedRows:
    """The row order of one dispatch.

    `sizes` are the rows that each rank of etp has received. `count_Be` are the rows of each expert in each block, for
    the blocks of all ranks of etp one after another. Blocks of a fixed size, `block_rows`, end with padding, which is
    sorted to the end.
    """

    def __init__(self, etp: Group, sizes: list[int], count_Be: Tensor, block_rows: int | None = None) -> None:
        self._etp, self._sizes, self._num_received = etp, sizes, sizes[etp.rank]
        self.count_e = count_Be.sum(dim=0)
        self.order: SortedRows | None = None  # None: sorted already
        if block_rows is not None:
            padding_B = block_rows - count_Be.sum(dim=1)
            self.order = order_of_blocks(torch.cat([count_Be, padding_B[:, None]], dim=1), sum(sizes), padded=True)
        elif min(count_Be.shape) > 1:
            self.order = order_of_blocks(count_Be, sum(sizes))

    def gather(self, x: Tensor) -> Tensor:
        """The rows of all ranks of etp, as they arrived there."""
        if self._etp.is_trivial:
            return x
        # The sizes are uneven, and not every backend has an all-gather of uneven sizes.
        copies = x.expand(self._etp.size, *x.shape).flatten(0, 1)
        return all_to_all_rows(copies, self._etp, self._sizes, self._own_sizes)

    def reduce(self, y_RD: Tensor) -> Tensor:
        """Output rows of this rank, summed over the ranks of etp."""
        if self._etp.is_trivial:
            return y_RD
        parts = all_to_all_rows(y_RD, self._etp, self._own_sizes, self._sizes)
        return parts.view(self._etp.size, self._num_received, *y_RD.shape[1:]).sum(dim=0)

    @property
    def _own_sizes(self) -> list[int]:
        return [self._num_received] * self._etp.size


def order_of_blocks(count_Be: Tensor, num_rows: int, padded: bool = False) -> SortedRows:
    """How rows that lie block by block, each sorted by expert, are sorted by expert: those of an expert by block, then
    as they lie. It needs no sort and no wait for the device. `padded`: the last column counts padding.

    Example: blocks with (2, 1) and (1, 1) rows of two experts lie as 0 0 1 0 1, and token_R is 0, 1, 3, 2, 4.
    """
    starts_Be, starts_eB = _starts(count_Be), _starts(count_Be.mT)
    row_R = torch.arange(num_rows, device=count_Be.device)
    token_R = _move(row_R, count_Be.mT, starts_Be.mT - starts_eB)
    back_R = _move(row_R, count_Be, starts_eB.mT - starts_Be)
    ends_e = count_Be.sum(dim=0).cumsum(0).to(torch.int32)[: -1 if padded else None]
    return SortedRows(token_R, token_R, back_R[:, None], ends_e, F.pad(ends_e, (1, 0)))


def _starts(count_XY: Tensor) -> Tensor:
    """The first row of each part, where the parts lie one behind the other."""
    return (count_XY.flatten().cumsum(0) - count_XY.flatten()).view_as(count_XY)


def _move(row_R: Tensor, count_XY: Tensor, shift_XY: Tensor) -> Tensor:
    """Each row shifted by as much as the part in which it lies."""
    part_R = torch.searchsorted(count_XY.flatten().cumsum(0), row_R, right=True)
    return (row_R + shift_XY.flatten()[part_R]).to(torch.int32)
