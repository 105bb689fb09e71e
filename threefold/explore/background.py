"""Work that takes seconds, done in a process of its own while the page goes on answering.

`Background.ask(key, *arguments)` starts the work of a key and returns at once; asking again gives its state. One piece
of work runs at a time: another key ends the one before, and so does the time limit.
"""

import multiprocessing
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

LIMIT_SECONDS = 120.0
MOST_KEPT = 32
Result = dict[str, Any]


class Background:
    """Runs a function of a module, which has to be importable by name, and keeps its results."""

    def __init__(self, work: Callable[..., Result], limit_seconds: float = LIMIT_SECONDS) -> None:
        self._work, self._limit = work, limit_seconds
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Result] = OrderedDict()
        self._running: tuple[str, BaseProcess, Connection, float] | None = None

    def ask(self, key: str, *arguments: Any) -> Result:
        """The result with the state "done", or the state "working"; "failed" has the reason as `why`."""
        with self._lock:
            self._collect()
            if key in self._kept:
                return self._kept[key]
            if self._running is None or self._running[0] != key:
                self._stop()
                self._start(key, arguments)
            assert self._running is not None
            return {"state": "working", "seconds": round(time.monotonic() - self._running[3], 1)}

    def close(self) -> None:
        """End what runs."""
        with self._lock:
            self._stop()

    def _start(self, key: str, arguments: tuple[Any, ...]) -> None:
        context = multiprocessing.get_context("spawn")  # a fork of a process with threads can hang
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_work_into, args=(theirs, self._work, arguments), daemon=True)
        process.start()
        theirs.close()
        self._running = key, process, ours, time.monotonic()

    def _collect(self) -> None:
        """Keep the result of work that has ended or takes too long."""
        if self._running is None:
            return
        key, process, pipe, began = self._running
        if pipe.poll():
            try:
                found = {"state": "done", **pipe.recv()}
            except EOFError:
                found = {"state": "failed", "why": "it ended without a result"}
        elif time.monotonic() - began > self._limit:
            found = {"state": "failed", "why": f"it took more than {self._limit:.0f} s"}
        elif not process.is_alive():
            found = {"state": "failed", "why": "it ended without a result"}
        else:
            return
        self._stop()
        self._kept[key] = found
        if len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)

    def _stop(self) -> None:
        if self._running is None:
            return
        _, process, pipe, _ = self._running
        self._running = None
        pipe.close()
        process.terminate()
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join(5)


def _work_into(pipe: Connection, work: Callable[..., Result], arguments: tuple[Any, ...]) -> None:
    """What the process does; answers of the page go first."""
    os.nice(5)
    try:
        pipe.send(work(*arguments))
    except KeyboardInterrupt:  # Ctrl-C reaches every process of the terminal; the server ends us
        pass
    finally:
        pipe.close()
