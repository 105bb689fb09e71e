"""Updates of parameters that run beside the next forward, which waits for each parameter just before its first use.

`AdamW` starts them where states are on the host. Data parallelism (`DataParallel.defer_updates`) lets them stay pending
and says which tensors they write: these wait by themselves before anything reads them (`pending_tensors.py`). On a GPU
the updates run on a stream of their own. On a CPU an update runs when it is waited for: there is nothing to gain, but a
wait that is missing shows in any test.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial

import torch
from torch import Tensor

from threefold.engine.device import is_simulated
from threefold.engine.optim.pending_tensors import mark_pending, mark_ready


class PendingUpdates:
    """The updates of one optimizer step, in the order of `names`.

    A gradient is held until its update was waited for. The stream that waits is the one on which gradients were
    allocated, so that their memory can be used again from then on.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.device = device
        self.positions: Mapping[str, int] = {name: n for n, name in enumerate(names)}
        self.is_deferred = False  # whether `start` returns while updates are pending
        self._tensors: Mapping[str, Sequence[Tensor]] = {}  # what deferred updates write, by name
        self._names = list(names)
        self._pending: deque[tuple[int, torch.cuda.Event | None, Tensor | None]] = deque()
        self._updates: Iterator[Tensor] = iter(())

    def defer(self, tensors: Mapping[str, Sequence[Tensor]]) -> None:
        """Let updates stay pending from now on. `tensors`, by name of the parameter, wait for its update when they are
        read; who defers waits for other memory that an update writes."""
        self.is_deferred, self._tensors = True, tensors

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        # A high priority: the kernels are short, and the link to the host waits for them.
        return torch.cuda.Stream(self.device, priority=-1)

    @cached_property
    def _gather_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    def hold(self, memory: Tensor) -> None:
        """Keep memory that the updates use from being used again before they are done, should its owner free it."""
        memory.record_stream(self._stream)

    def start(self, positions: Sequence[int], updates: Iterator[Tensor]) -> None:
        """Start the updates of the parameters at these positions, which rise. Each item that `updates` yields is the
        gradient of a parameter that was updated."""
        self.wait()
        if not positions:
            return
        if is_simulated() or self.device.type != "cuda":
            self._updates = updates
            self._pending.extend((position, None, None) for position in positions)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream):
                for position, grad in zip(positions, updates, strict=True):
                    updated = torch.cuda.Event()
                    updated.record(self._stream)
                    self._pending.append((position, updated, grad))
        if is_simulated() or not self.is_deferred:
            self.wait()
            return
        for position in positions:
            mark_pending(self._written_at(position), partial(self.wait_through, position))

    def _written_at(self, position: int) -> Sequence[Tensor]:
        return self._tensors.get(self._names[position], ())

    def is_pending(self, position: int) -> bool:
        """Whether an update at this position or before it was not waited for yet."""
        return bool(self._pending) and self._pending[0][0] <= position

    def wait_through(self, position: int) -> None:
        """Wait for the updates up to this position. The host goes on; the current stream waits."""
        if not self.is_pending(position):
            return
        last = None
        with torch.no_grad():
            while self._pending and self._pending[0][0] <= position:
                done, last, _ = self._pending.popleft()
                if last is None:
                    next(self._updates)
                mark_ready(self._written_at(done))
        if last is not None:
            torch.cuda.current_stream(self.device).wait_event(last)
        if not self._pending:
            next(self._updates, None)  # the end of the generator, which may have work there
            self._updates = iter(())

    def wait(self) -> None:
        """Wait for all updates."""
        self.wait_through(len(self.positions))

    def after(self, position: int) -> AbstractContextManager[object]:
        """Inside the `with` block, work that is started waits for the updates up to this position, and the current
        stream outside does not. A CPU waits here."""
        waited_for = next((event for at, event, _ in reversed(self._pending) if at <= position), None)
        if waited_for is None:
            self.wait_through(position)
            return nullcontext()
        self._gather_stream.wait_event(waited_for)
        return torch.cuda.stream(self._gather_stream)
