"""Writing where the reader or the disk may be gone: on a terminal or pipe, and in the folder of a run."""

import errno
import os
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from threefold.findings import Finding

_READER_GONE = (errno.EPIPE, errno.EIO)  # a pipe whose reader closed it, a terminal that is gone


def write_and_flush(out: TextIO | None, text: str) -> None:
    """Write and flush a text, and ignore a reader that is gone: it is no reason to end a run.

    Later writes to such a stream are discarded, also those of other code and those at Python's exit.
    """
    if out is None:  # the process was started without this stream
        return
    try:
        out.write(text)
        out.flush()
    except OSError as error:
        if error.errno in _READER_GONE:
            _redirect_to_null(out)


def _redirect_to_null(out: TextIO) -> None:
    with suppress(OSError):  # the stream has no file descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, out.fileno())
        os.close(null)


def unwritable_finding(path: Path, error: OSError) -> Finding:
    """The finding about a file or folder of the run that cannot be written."""
    problem = f"cannot be written: {error.strerror or error}"
    return Finding(
        rule="run-writable", at=str(path), problem=problem, advice="free space, or choose another --run folder"
    )
