"""SIGTERM in verbs that start other processes or serve a page (`regress`, `tune`, `explore`)."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def end_on_sigterm() -> Iterator[None]:
    """Raise KeyboardInterrupt at SIGTERM, as at Ctrl-C, so that a trial under way or a server is ended too."""

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not in the main thread: whoever runs us stops us
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
