"""How many rows go where: counted on the device, needed on the host. The one place where the host learns it.

Shapes: E experts, e experts held here, X ranks of ep, Y ranks of etp.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from threefold.engine.mesh import Group
from threefold.engine.shard.collectives import all_gather, all_to_all

# (number of sizes, total, exact) -> sizes. Not exact: the total is what even routing would give.
Source = Callable[[int, int, bool], list[int]]
# No context variable: a recompute asks from the thread of the backward.
_sources: list[Source] = []


@contextmanager
def sizes_from(source: Source) -> Iterator[None]:
    """Sizes are what `source` says: for tensors without values, and for loads that are not the router's."""
    _sources.append(source)
    try:
        yield
    finally:
        _sources.remove(source)


def even(parts: int, total: int, exact: bool = True) -> list[int]:
    """A source: balanced."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def host_sizes(count_X: Tensor, total: int) -> list[int]:
    """`count_X`, which adds up to `total`, on the host; it waits for the device."""
    return _sources[-1](len(count_X), total, True) if _sources else count_X.tolist()


@dataclass(frozen=True, slots=True)
class Splits:
    to: list[int]  # rows to each rank of ep
    came: list[int]  # rows from each
    slices: list[int]  # rows that each rank of etp has then


class Counts:
    """Of one dispatch: exchanged and brought to the host while other work goes on, waited for when first read."""

    def __init__(self, count_E: Tensor, num_rows: int, ep: Group, etp: Group) -> None:
        self._sent_E, self._num_rows, self._ep, self._etp = count_E, num_rows, ep, etp
        # [rank of etp][rank of ep][expert held here]: rows as they lie when all have come.
        self.count_YXe = count_E.new_empty(etp.size, *count_E.shape)
        self._came_E = self.count_YXe[etp.rank]
        self._pending = all_to_all(self._came_E, count_E, ep)
        self._host: Tensor | None = None
        self._event: Any = None
        self._splits: Splits | None = None
        if count_E.is_cuda and not _sources:
            # A stream of its own: the host then waits for the counts, not for all work queued before.
            with _beside(count_E.device):
                self._finish()

    def read(self) -> Splits:
        if self._splits is None:
            self._splits = self._say()
        return self._splits

    def _say(self) -> Splits:
        if self._host is None:
            self._finish()
        ep = self._ep.size
        if _sources:
            came = _sources[-1](ep, self._num_rows, False)
            return Splits(_sources[-1](ep, self._num_rows, True), came, [sum(came)] * self._etp.size)
        assert self._host is not None
        if self._event is not None:
            self._event.synchronize()
        sizes = self._host.tolist()
        return Splits(sizes[:ep], sizes[ep : 2 * ep], sizes[2 * ep :])

    def _finish(self) -> None:
        self._pending.wait()
        if not self._etp.alone:
            all_gather(self.count_YXe.flatten(), self._came_E.clone(), self._etp).wait()
        by_rank = [self._sent_E.view(self._ep.size, -1), self._came_E.view(self._ep.size, -1), self.count_YXe]
        sizes = torch.cat([counts.sum(dim=1) for counts in by_rank])
        if not sizes.is_cuda or _sources:
            self._host = sizes
            return
        self._host = torch.empty(sizes.shape, dtype=sizes.dtype, pin_memory=True)
        self._host.copy_(sizes, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextmanager
def _beside(device: torch.device) -> Iterator[None]:
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
