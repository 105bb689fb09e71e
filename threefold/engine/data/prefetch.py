"""Batches made ahead, in a thread."""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
Place = tuple[int, int]  # step, microbatch


class Prefetch(Generic[T]):
    """Makes what comes after `place`, at most `depth` ahead. An exception is raised where its batch is taken."""

    def __init__(self, make: Callable[[int, int], T], places: Iterator[Place], depth: int) -> None:
        self._queue: queue.Queue[tuple[Place, T | None, BaseException | None]] = queue.Queue(depth)
        self._stop = threading.Event()
        args = (make, places, self._queue, self._stop)
        # The thread knows nothing of this object, so that dropping it without `close` ends the thread as well.
        self._thread = threading.Thread(target=_work, args=args, name="threefold-prefetch", daemon=True)
        self._thread.start()

    def take(self) -> tuple[Place, T]:
        place, made, error = self._queue.get()
        if error is not None:
            raise error
        assert made is not None
        return place, made

    def close(self) -> None:
        self._stop.set()
        with contextlib.suppress(queue.Empty):
            while True:
                self._queue.get_nowait()
        self._thread.join(timeout=10)

    def __del__(self) -> None:
        self._stop.set()


def _work(
    make: Callable[[int, int], T],
    places: Iterator[Place],
    done: "queue.Queue[tuple[Place, T | None, BaseException | None]]",
    stop: threading.Event,
) -> None:
    for place in places:
        made, error = None, None
        try:
            made = make(*place)
        except BaseException as problem:
            error = problem
        while not stop.is_set():
            with contextlib.suppress(queue.Full):
                done.put((place, made, error), timeout=0.1)
                break
        if stop.is_set() or error is not None:
            return
