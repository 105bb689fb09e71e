"""Row counts of one all-to-all dispatch: exchanged between ranks and read by the host as split sizes.

The device counts rows per expert, but `all_to_all` wants its split sizes as Python integers. `AllToAllDispatcher` makes
a `RowCounts` when it knows the counts and asks it for `split_sizes()` only when it must send; the exchange and the copy
to the host run meanwhile. Example: with EP 2 and six rows, four of them for experts of rank 1, rank 0 has sent=[2, 4].

Shapes: E experts, e experts held here, X ranks of ep, Y ranks of etp.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from threefold.engine.context import context
from threefold.engine.dist.collectives import all_gather, all_to_all
from threefold.engine.dist.mesh import Group


@dataclass(frozen=True, slots=True)
class SplitSizes:
    """How many rows this rank exchanges with whom."""

    sent: list[int]  # rows to each rank of ep
    received: list[int]  # rows from each rank of ep
    etp_rows: list[int]  # rows that each rank of etp has received
    own_rows: int  # of these rows, those of experts that this rank owns


class RowCounts:
    """The counts of one dispatch. The host waits for them when it first asks for `split_sizes`."""

    def __init__(self, count_E: Tensor, num_rows: int, ep: Group, etp: Group, num_own: int | None = None) -> None:
        self._sent_E, self._num_rows, self._ep, self._etp = count_E, num_rows, ep, etp
        self._num_own = num_own  # of the experts held here, the first so many; None: all
        # Rows by [rank of etp][rank of ep they come from][expert held here], in the order in which they lie.
        self.count_YXe = count_E.new_empty(etp.size, *count_E.shape)
        self._received_E = self.count_YXe[etp.rank]
        self._pending = all_to_all(self._received_E, count_E, ep)
        self._host: Tensor | None = None
        self._event: Any = None
        self._splits: SplitSizes | None = None
        if count_E.is_cuda and context.size_source is None:
            # On a stream of its own, so that the host waits for the counts and not for all work queued before them.
            with _side_stream(count_E.device):
                self._copy_to_host()

    def split_sizes(self) -> SplitSizes:
        """The sizes on the host. The first call waits for the device."""
        if self._splits is None:
            self._splits = self._read_host()
        return self._splits

    def _read_host(self) -> SplitSizes:
        if self._host is None:
            self._copy_to_host()
        ep = self._ep.size
        source = context.size_source
        if source is not None:
            received = source(ep, self._num_rows, False)
            etp_rows = [sum(received)] * self._etp.size
            local = self._by_slot.shape[1]
            own_rows = sum(etp_rows) * (self._num_own or local) // local
            return SplitSizes(source(ep, self._num_rows, True), received, etp_rows, own_rows)
        assert self._host is not None
        if self._event is not None:
            self._event.synchronize()
        sizes = self._host.tolist()
        etp_rows = sizes[2 * ep : 2 * ep + self._etp.size]
        return SplitSizes(sizes[:ep], sizes[ep : 2 * ep], etp_rows, sizes[-1] if self._num_own else sum(etp_rows))

    @property
    def _by_slot(self) -> Tensor:
        """Rows by rank and expert held here."""
        return self.count_YXe.view(self._etp.size * self._ep.size, -1)

    def _copy_to_host(self) -> None:
        self._pending.wait()
        if not self._etp.is_trivial:
            all_gather(self.count_YXe.flatten(), self._received_E.clone(), self._etp).wait()
        by_rank = [self._sent_E.view(self._ep.size, -1), self._received_E.view(self._ep.size, -1), self.count_YXe]
        if self._num_own:
            by_rank.append(self._by_slot[:, : self._num_own].reshape(1, -1))
        sizes = torch.cat([counts.sum(dim=1) for counts in by_rank])
        if not sizes.is_cuda or context.size_source is not None:
            self._host = sizes
            return
        self._host = torch.empty(sizes.shape, dtype=sizes.dtype, pin_memory=True)
        self._host.copy_(sizes, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()


@cache
def _count_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextmanager
def _side_stream(device: torch.device) -> Iterator[None]:
    stream = _count_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
