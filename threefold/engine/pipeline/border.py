"""What crosses from one chunk to the next, on another rank or on the same one.

Not in `collectives`: these calls have two ranks of the group, not all, and many are under way at once.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from threefold.engine.mesh import Group

Beat = Callable[[str], object]


class Border:
    """Tensors of one shape between this rank and `peer` (a place in the group), one for a microbatch."""

    def __init__(
        self,
        what: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        group: Group,
        peer: int,
        beat: Beat,
    ) -> None:
        self.what, self.shape, self.dtype, self.device = what, tuple(shape), dtype, device
        self.group, self.peer, self.beat = group, peer, beat
        self._under_way: dict[int, tuple[Any, Tensor]] = {}
        self._sent: deque[tuple[Any, Tensor]] = deque()

    @property
    def crosses(self) -> bool:
        """Whether it leads to another rank; else tensors are handed over."""
        return self.peer != self.group.rank

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def send(self, x: Tensor) -> None:
        self.check(x)
        # A finished one keeps its tensor as long as nobody asks.
        while self._sent and (len(self._sent) >= self.group.size or self._sent[0][0].is_completed()):
            self._settle()
        x = x.contiguous()
        self._sent.append((dist.isend(x, group=self.group.handle, group_dst=self.peer), x))

    def receive(self, microbatch: int) -> None:
        """Start; the tensor is only made now, so that memory follows what is in flight."""
        out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        work = dist.irecv(out, group=self.group.handle, group_src=self.peer)
        self._under_way[microbatch] = work, out

    def hand_over(self, microbatch: int, x: Tensor) -> None:
        self.check(x)
        self._under_way[microbatch] = None, x

    def take(self, microbatch: int) -> Tensor:
        work, out = self._under_way.pop(microbatch)
        if work is not None:
            self.beat(f"{self.what} of microbatch {microbatch} from rank {self.group.ranks[self.peer]}")
            work.wait()
        return out

    def settle(self) -> None:
        while self._sent:
            self._settle()

    def _settle(self) -> None:
        self.beat(f"{self.what} to rank {self.group.ranks[self.peer]}")
        work, _ = self._sent.popleft()
        work.wait()

    def check(self, x: Tensor) -> None:
        """The other side has made room for just this: anything else would be read wrongly, or never arrive."""
        if tuple(x.shape) != self.shape or x.dtype != self.dtype:
            found = f"{tuple(x.shape)} {x.dtype}"
            raise ValueError(f"{self.what}: {found} is not the agreed {self.shape} {self.dtype}")
