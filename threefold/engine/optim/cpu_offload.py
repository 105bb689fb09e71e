"""Optimizer states that live in host memory and visit the device for their update, piece by piece.

While one piece is updated the next is on its way in and the one before on its way out, each way on a stream of its own.
A model on the CPU is its own host: the states are where they belong, and the same steps run without a copy.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from threefold.engine.device import is_simulated

PIECE = 2**24  # elements: long enough to fill the link, short enough that three of them are little memory


class Host:
    """Whoever reads a host tensor outside of `visit` settles first."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @cached_property
    def _ways(self) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        return torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)

    def take(self, tensor: Tensor) -> Tensor:
        """A copy of it there."""
        there = self.zeros(tensor, tensor.dtype) if is_simulated() or self.device.type == "cuda" else tensor
        return there if is_simulated() else there.copy_(tensor)

    def zeros(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        if is_simulated():  # takes no memory of the device that a rehearsal looks at
            return torch.zeros((), dtype=dtype, device=self.device).expand(like.shape)
        if self.device.type == "cuda":
            return torch.zeros(like.shape, dtype=dtype, pin_memory=True)
        return torch.zeros_like(like, dtype=dtype)

    def visit(self, groups: Iterable[Sequence[Tensor]]) -> Iterator[list[Tensor]]:
        """Each group on the device; what is in it when the next is asked for is taken home."""
        if self.device.type != "cuda":
            yield from ([x.clone() if is_simulated() else x for x in group] for group in groups)
            return
        inward, outward = self._ways
        now = torch.cuda.current_stream(self.device)
        inward.wait_stream(outward)
        waiting: tuple[Sequence[Tensor], list[Tensor], torch.cuda.Event] | None = None
        gone: deque[torch.cuda.Event] = deque()
        for group in [*groups, None]:
            if len(gone) > 1:  # the host must not run ahead: every piece that is under way takes memory
                gone.popleft().synchronize()
            coming = None if group is None else (group, *self._bring(group, inward))
            if waiting is not None:
                home, here, arrived = waiting
                now.wait_event(arrived)
                yield here
                gone.append(self._take_home(home, here, now, outward))
            waiting = coming

    def _bring(self, group: Sequence[Tensor], inward: torch.cuda.Stream) -> tuple[list[Tensor], torch.cuda.Event]:
        with torch.cuda.stream(inward):
            here = [tensor.to(self.device, non_blocking=True) for tensor in group]
        arrived = torch.cuda.Event()
        arrived.record(inward)
        return here, arrived

    def _take_home(
        self, home: Sequence[Tensor], here: list[Tensor], now: torch.cuda.Stream, outward: torch.cuda.Stream
    ) -> torch.cuda.Event:
        outward.wait_stream(now)
        with torch.cuda.stream(outward):
            for target, source in zip(home, here, strict=True):
                target.copy_(source, non_blocking=True)
                # Made on the inward stream, used on two others: its memory is free when all three are past it.
                source.record_stream(now)
                source.record_stream(outward)
        gone = torch.cuda.Event()
        gone.record(outward)
        return gone

    def settle(self) -> None:
        if "_ways" in self.__dict__:
            self._ways[1].synchronize()


def chosen(sizes: Sequence[int], fraction: float) -> set[int]:
    """Which of them go to the host: whole ones, the largest first, as near to the fraction of all as they come."""
    left = fraction * sum(sizes)
    found = set()
    for place in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        if left > sizes[place] / 2:
            found.add(place)
            left -= sizes[place]
    return found
