"""Keeps a new folder to the command that fills it: two imports, exports or fine-tunings would mix their files.

`convert.py` and `threefold finetune` enter `claimed_folder`. The claim is a lock on the folder itself, which leaves no
file, and which the kernel drops with the process.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from threefold.engine.weights.imported_weights import convertible_finding
from threefold.findings import FindingsError

_CHOOSE = "choose another --out folder"


@contextmanager
def claimed_folder(out: Path) -> Iterator[bool]:
    """Make the folder, or take an empty one, and keep other commands out. Yields whether it was there before.

    Where the block raises, a folder that it made and that is empty is removed.
    """
    check_is_free(out)
    was_there = out.is_dir()
    try:
        out.mkdir(parents=True, exist_ok=True)
        handle = os.open(out, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        problem = f"cannot be written: {error.strerror or error}"
        raise FindingsError([convertible_finding(out, problem, f"free space, or {_CHOOSE}")]) from None
    try:
        if not _is_claimed(handle, out):
            raise FindingsError([convertible_finding(out, "another command is filling the folder", _CHOOSE)])
        check_is_free(out)  # by now, for sure
        try:
            yield was_there
        except BaseException:
            if not was_there:
                with suppress(OSError):  # it is not empty, or gone
                    out.rmdir()
            raise
    finally:
        os.close(handle)


def check_is_free(out: Path) -> None:
    """Raise unless the folder is empty or not there."""
    try:
        problem = "the folder is not empty" if any(out.iterdir()) else ""
    except FileNotFoundError:
        return
    except OSError as error:
        problem = f"this is no folder that can be used: {error.strerror or error}"
    if problem:
        raise FindingsError([convertible_finding(out, problem, _CHOOSE)])


def _is_claimed(handle: int, out: Path) -> bool:
    """Whether the folder is locked by this command now; False also where it was removed meanwhile."""
    with suppress(FileNotFoundError):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            pass
        return os.path.samestat(os.fstat(handle), out.stat())
    return False
