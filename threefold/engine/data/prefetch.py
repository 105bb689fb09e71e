"""Makes batches ahead of time in a background thread. `Loader` uses it when batches are asked for in order."""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
BatchIndex = tuple[int, int]  # (step, microbatch)


class Prefetcher(Generic[T]):
    """A thread that calls `make(step, microbatch)` for each index, at most `depth` calls ahead of `take`.

    An exception of `make` is raised by the `take` that would have returned its batch.
    """

    def __init__(self, make: Callable[[int, int], T], indices: Iterator[BatchIndex], depth: int) -> None:
        self._queue: queue.Queue[tuple[BatchIndex, T | None, BaseException | None]] = queue.Queue(depth)
        self._stop = threading.Event()
        args = (make, indices, self._queue, self._stop)
        # The thread has no reference to this object, so that dropping it without `close` ends the thread as well.
        self._thread = threading.Thread(target=_make_batches, args=args, name="threefold-prefetch", daemon=True)
        self._thread.start()

    def take(self) -> tuple[BatchIndex, T]:
        index, made, error = self._queue.get()
        if error is not None:
            raise error
        assert made is not None
        return index, made

    def close(self) -> None:
        self._stop.set()
        with contextlib.suppress(queue.Empty):
            while True:
                self._queue.get_nowait()
        self._thread.join(timeout=10)

    def __del__(self) -> None:
        self._stop.set()


def _make_batches(
    make: Callable[[int, int], T],
    indices: Iterator[BatchIndex],
    results: "queue.Queue[tuple[BatchIndex, T | None, BaseException | None]]",
    stop: threading.Event,
) -> None:
    for index in indices:
        made, error = None, None
        try:
            made = make(*index)
        except BaseException as problem:
            error = problem
        while not stop.is_set():
            with contextlib.suppress(queue.Full):
                results.put((index, made, error), timeout=0.1)
                break
        if stop.is_set() or error is not None:
            return
