"""What only a terminal gets: colors of findings, and a line that says that a command is still at work."""

import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

QUIET_SECONDS = 2.0  # a command that answers sooner says nothing about it
_COLORS = {"error": "1;31", "warning": "1;33", "note": "1;36"}
_HEAD = re.compile(r"^(error|warning|note)(\[[a-z0-9-]+\])", re.MULTILINE)
_FIX = re.compile(r"^  (fix:)", re.MULTILINE)
_ERASE = "\r\x1b[K"


def uses_color(stream: TextIO) -> bool:
    """Whether a stream is a terminal that shows colors and nobody asked for none (https://no-color.org)."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and stream.isatty()


def colored(text: str) -> str:
    """A text with the severities and fixes of its findings in color."""
    text = _HEAD.sub(lambda found: f"\x1b[{_COLORS[found[1]]}m{found[1]}\x1b[0m{found[2]}", text)
    return _FIX.sub("  \x1b[32m\\1\x1b[0m", text)


class WorkingLine:
    """A line on standard error, written over every second, which anything else that is printed erases first."""

    def __init__(self, verb: str, stream: TextIO) -> None:
        self.verb, self.stream = verb, stream
        self.lock, self.ended = threading.Lock(), threading.Event()
        self.start = self.last_output = time.monotonic()
        self.is_shown = False
        self.process = os.getpid()

    def erase(self) -> None:
        """Called before anything is printed."""
        if os.getpid() != self.process:  # a forked rank: the lock may have been held when it was forked
            return
        with self.lock:
            self.last_output = time.monotonic()
            if self.is_shown:
                self._write(_ERASE)
                self.is_shown = False

    def show(self) -> None:
        """Write the line where nothing was printed for a while."""
        with self.lock:
            now = time.monotonic()
            if not self.ended.is_set() and now - self.last_output >= QUIET_SECONDS:
                self._write(f"{_ERASE}threefold {self.verb}: working, {now - self.start:.0f} s")
                self.is_shown = True

    def run(self) -> None:
        while not self.ended.wait(1.0):
            self.show()

    def _write(self, text: str) -> None:
        try:
            self.stream.write(text)
            self.stream.flush()
        except (OSError, ValueError):  # the terminal is no more
            self.ended.set()


@contextmanager
def working_line(verb: str) -> Iterator[WorkingLine | None]:
    """Show that a verb works while it prints nothing. None where standard error is no terminal."""
    stream = sys.__stderr__
    if stream is None or not stream.isatty() or os.environ.get("TERM") == "dumb":
        yield None
        return
    line = WorkingLine(verb, stream)
    thread = threading.Thread(target=line.run, daemon=True)
    thread.start()
    try:
        yield line
    finally:
        line.ended.set()
        thread.join()
        line.erase()
