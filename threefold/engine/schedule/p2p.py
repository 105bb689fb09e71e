"""Pipeline point-to-point channels: hidden states and their gradients between neighboring chunks.

A `Stage` has up to four channels. The peer chunk is on another rank, or on the same one with a V-shaped schedule. These
calls are not in `dist/collectives.py`, because each involves only two ranks of the pp group and many are in flight at
once.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from threefold.engine.context import timed_wait
from threefold.engine.dist.mesh import Group

Heartbeat = Callable[[str], object]  # is told what a rank waits for, for the hang report


class P2PChannel:
    """Tensors of one shape between this rank and `peer` (a rank in the group), one for each microbatch."""

    def __init__(
        self,
        description: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        group: Group,
        peer: int,
        heartbeat: Heartbeat,
    ) -> None:
        self.description, self.shape, self.dtype, self.device = description, tuple(shape), dtype, device
        self.group, self.peer, self.heartbeat = group, peer, heartbeat
        self._received: dict[int, tuple[Any, Tensor]] = {}
        self._sent: deque[tuple[Any, Tensor]] = deque()

    @property
    def is_remote(self) -> bool:
        """Whether the peer is another rank; else tensors are passed by `put_local`."""
        return self.peer != self.group.rank

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def send(self, x: Tensor) -> None:
        self.check_shape(x)
        # A finished send holds its tensor until somebody waits for it.
        while self._sent and (len(self._sent) >= self.group.size or self._sent[0][0].is_completed()):
            self._wait_for_oldest_send()
        x = x.contiguous()
        self._sent.append((dist.isend(x, group=self.group.handle, group_dst=self.peer), x))

    def receive(self, microbatch: int) -> None:
        """Start to receive. The tensor is allocated only now, so that memory follows the microbatches in flight."""
        out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        work = dist.irecv(out, group=self.group.handle, group_src=self.peer)
        self._received[microbatch] = work, out

    def put_local(self, microbatch: int, x: Tensor) -> None:
        self.check_shape(x)
        self._received[microbatch] = None, x

    def get(self, microbatch: int) -> Tensor:
        work, out = self._received.pop(microbatch)
        if work is not None:
            self.heartbeat(f"{self.description} of microbatch {microbatch} from rank {self.group.ranks[self.peer]}")
            with timed_wait():
                work.wait()
        return out

    def wait_for_sends(self) -> None:
        while self._sent:
            self._wait_for_oldest_send()

    def _wait_for_oldest_send(self) -> None:
        self.heartbeat(f"{self.description} to rank {self.group.ranks[self.peer]}")
        work, _ = self._sent.popleft()
        with timed_wait():
            work.wait()

    def check_shape(self, x: Tensor) -> None:
        """The peer has allocated this shape and dtype: any other tensor would be misread or never arrive."""
        if tuple(x.shape) != self.shape or x.dtype != self.dtype:
            found = f"{tuple(x.shape)} {x.dtype}"
            raise ValueError(f"{self.description}: {found} is not the agreed {self.shape} {self.dtype}")
