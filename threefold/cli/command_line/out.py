"""Where answers go: standard output and error as a shell may hand them over (closed, on a full disk, or with a reader
that leaves), and files beside them."""

import errno
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, TextIO, cast

from threefold.cli.command_line.terminal_line import colored, uses_color, working_line

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
