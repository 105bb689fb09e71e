"""Sorts the rows that a rank has received by local expert, and undoes it; with ETP it gathers and reduces as well.

Rows arrive in blocks, one per source rank, each sorted by expert; the experts want all rows of an expert together. With
expert tensor parallelism each rank of the etp group holds a slice of the width of each expert: it needs the rows of the
whole group, and its outputs are partial sums. The dispatchers make one `ReceivedRows` per microbatch.

Shapes: P rows received by this rank, R rows of the etp group by expert, B blocks, e experts held here, D model dim.
"""

import torch
from torch import Tensor

from threefold.engine.dispatch.rows import inverse_permutation, permute_rows
from threefold.engine.dist.collectives import all_to_all_rows
from threefold.engine.dist.mesh import Group


class ReceivedRows:
    """The row order of one dispatch.

    `sizes` are the rows that each rank of etp has received. `count_Be` are the rows of each expert in each block, for
    the blocks of all ranks of etp one behind the other.
    """

    def __init__(self, etp: Group, sizes: list[int], count_Be: Tensor) -> None:
        self._etp, self._sizes, self._num_received = etp, sizes, sizes[etp.rank]
        self.count_e = count_Be.sum(dim=0)
        self._index: tuple[Tensor, Tensor] | None = None
        if min(count_Be.shape) > 1:
            expert_X = torch.arange(count_Be.shape[1], device=count_Be.device).repeat(len(count_Be))
            expert_R = expert_X.repeat_interleave(count_Be.flatten(), output_size=sum(sizes))
            # A stable sort orders the rows of an expert by source rank, then as they were sent.
            index_R = expert_R.argsort(stable=True)
            self._index = index_R, inverse_permutation(index_R)

    def gather_and_sort(self, x: Tensor) -> Tensor:
        """The rows of all ranks of etp, sorted by local expert."""
        if not self._etp.is_trivial:
            # The sizes are uneven, and not every backend has an all-gather of uneven sizes.
            x = all_to_all_rows(
                x.expand(self._etp.size, *x.shape).flatten(0, 1), self._etp, self._sizes, self._own_sizes
            )
        return x if self._index is None else permute_rows(x, *self._index)

    def unsort_and_reduce(self, y_RD: Tensor) -> Tensor:
        """Output rows in the order of arrival, summed over the ranks of etp."""
        if self._index is not None:
            y_RD = permute_rows(y_RD, *reversed(self._index))
        if self._etp.is_trivial:
            return y_RD
        parts = all_to_all_rows(y_RD, self._etp, self._own_sizes, self._sizes)
        return parts.view(self._etp.size, self._num_received, *y_RD.shape[1:]).sum(dim=0)

    @property
    def _own_sizes(self) -> list[int]:
        return [self._num_received] * self._etp.size
