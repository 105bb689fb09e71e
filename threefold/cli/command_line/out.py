"""Where answers go: standard output and error as a shell may hand them over (closed, on a full disk, or with a reader
that leaves), and files beside them."""

import errno
import io
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, TextIO, cast

_GONE = (errno.EPIPE, errno.EIO)  # the reader closed its pipe, as `| head` does; the terminal is no more


class Out:
    """A stream that goes on as nothing where nobody reads it, so that a verb ends with its own exit code."""

    def __init__(self, stream: TextIO, must_arrive: bool) -> None:
        self.stream, self.must_arrive = stream, must_arrive
        self.error: OSError | None = None
        self.before_write: Callable[[], None] | None = None  # erases what stands on the line of the terminal
        self.has_color = uses_color(stream)
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")  # names of files need not be text

    def write(self, text: str) -> int:
        if self.before_write:
            self.before_write()
        self._try(self.stream.write, colored(text) if self.has_color else text)
        return len(text)

    def flush(self) -> None:
        self._try(self.stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def _try(self, act: Callable[..., Any], *given: str) -> None:
        try:
            act(*given)
        except OSError as error:
            # Buffered text goes there too: Python writes it when it ends, and would fail again.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)
            if self.must_arrive and error.errno not in _GONE:
                self.error = error
                raise


@contextmanager
def standard_streams() -> Iterator[Out]:
    """Our own in place of Python's; gives the one of output."""
    out, err = Out(sys.stdout or _nowhere(), must_arrive=True), Out(sys.stderr or _nowhere(), must_arrive=False)
    with redirect_stdout(cast(TextIO, out)), redirect_stderr(cast(TextIO, err)):
        yield out


@contextmanager
def shown_at_work(verb: str) -> Iterator[None]:
    """Say on a terminal that a verb is at work while it prints nothing."""
    with working_line(verb) as line:
        streams = [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, Out)] if line else []
        for stream in streams:
            stream.before_write = line.erase if line else None
        try:
            yield
        finally:
            for stream in streams:
                stream.before_write = None


def drawn(verb: str, path: str, draw: Callable[[str], object]) -> int:
    """Draw an image that was asked for, say so, and give the exit code."""
    if not is_written(verb, path, lambda: draw(path)):
        return 1
    print(f"wrote {path}", file=sys.stderr)
    return 0


class UsageError(Exception):
    """A command line that is wrong in a way that its parser cannot see; `main` says it, and ends with 2."""


def print_json(value: Any, allow_nan: bool = True) -> None:
    json.dump(value, sys.stdout, indent=2, allow_nan=allow_nan)
    print()


def _nowhere() -> TextIO:
    return Path(os.devnull).open("w", encoding="utf-8")


def is_written(verb: str, path: str, write: Callable[[], object]) -> bool:
    """Write a file that was asked for beside the answer; False, and one line, where that fails or matplotlib lacks."""
    try:
        write()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        print(f"threefold {verb}: a picture needs matplotlib: pip install 'threefold[report]'", file=sys.stderr)
        return False
    except (OSError, ValueError) as error:  # ValueError: an image format that matplotlib does not know
        print(f"threefold {verb}: cannot write {path}: {getattr(error, 'strerror', None) or error}", file=sys.stderr)
        return False
    return True


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
