"""Keeps a checkpoint on disk while somebody reads it, in whatever process: a lock on its manifest.

`open_checkpoint` takes a `ReadLease`, and a run that removes old checkpoints (`run.keep`) leaves those that are read to
its next save. The kernel drops a lock with the process that holds it. On a file system without locks nothing is kept.
"""

import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path

from threefold.engine.run.checkpoint_manifest import MANIFEST
from threefold.findings import Finding, FindingsError
from threefold.safe_files import open_regular

GONE = "checkpoint-is-there"  # the rule of the finding about a checkpoint that was removed meanwhile


class ReadLease:
    """A checkpoint that stays as long as this object does."""

    def __init__(self, folder: Path) -> None:
        """Raises a finding where the checkpoint is gone. One whose manifest cannot be opened is not held."""
        self._handle: int | None = None
        path = folder / MANIFEST
        try:
            with open_regular(path, within=folder) as file:
                self._handle = os.dup(file.fileno())
            with suppress(OSError):  # a file system without locks
                fcntl.flock(self._handle, fcntl.LOCK_SH)  # waits for a rename at most
            is_there = os.path.samestat(os.fstat(self._handle), path.stat())
        except FileNotFoundError:
            is_there = self._handle is None and folder.is_dir()
        except OSError:
            is_there = True
        if not is_there:
            raise _gone(folder)

    def __del__(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def remove_checkpoint(folder: Path) -> bool:
    """Remove a checkpoint, for all readers at once, unless one has it open. Returns whether it is gone."""
    aside = folder.with_name(folder.name + ".partial")  # what a kill leaves of it, the next start removes
    shutil.rmtree(aside, ignore_errors=True)
    if not _rename_unless_read(folder, aside):
        return False
    shutil.rmtree(aside, ignore_errors=True)
    return True


def _rename_unless_read(folder: Path, aside: Path) -> bool:
    try:
        handle = os.open(folder / MANIFEST, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # damaged: nobody reads it
        handle = None
    try:
        if handle is not None and _is_read(handle):
            return False
        folder.rename(aside)
        return True
    except OSError:
        return False
    finally:
        if handle is not None:
            os.close(handle)


def _is_read(handle: int) -> bool:
    """Whether a reader holds the manifest; if not, it is locked now."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    return False


def _gone(folder: Path) -> FindingsError:
    problem = f"{folder.name} is gone: the run has newer checkpoints by now, or another machine has it"
    advice = "give the command again; a larger run.keep keeps more checkpoints"
    return FindingsError([Finding(rule=GONE, at=str(folder), problem=problem, advice=advice)])
