"""Locks in a run's folder, which the kernel drops with the process that holds them.

`RunLock` keeps the folder to one run: two would overwrite each other's checkpoints. `train.py` makes it, and
`folder.py` acquires it when it opens the run. `ReadLease` keeps a checkpoint on disk while somebody reads it, in
whatever process: `open_checkpoint` takes it, and a run that removes old checkpoints (`run.keep`) leaves those that are
read to its next save.
"""

import fcntl
import os
import platform
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, TextIO

from threefold.engine.run.checkpoint_manifest import MANIFEST
from threefold.findings import Finding, FindingsError
from threefold.safe_files import open_regular, open_to_append

LOCK = "run.lock"
GONE = "checkpoint-is-there"  # the rule of the finding about a checkpoint that was removed meanwhile
LEASE_SECONDS = 120.0  # after which file servers drop the locks of a machine that went down
RETRY_SECONDS = 1.0
MAX_HOLDER = 200  # characters of the file that are shown


class RunLock:
    """Keeps a folder to this process until it is closed. The kernel closes it, however the process ends.

    On a file system without locks the run continues without one.
    """

    def __init__(self, folder: Path, say: Callable[[str], None], lease_seconds: float = LEASE_SECONDS) -> None:
        self.folder, self.say, self.lease_seconds = folder, say, lease_seconds
        self._file: TextIO | None = None

    def acquire(self) -> None:
        """Lock the folder, or raise a finding.

        A holder on this machine is alive, so this raises at once. A holder on another machine may be gone: this waits
        `lease_seconds` for its lock to be dropped.
        """
        self._file = file = open_to_append(self.folder / LOCK, "a+")
        began = time.monotonic()
        reported = False
        while not _try_lock(file):
            file.seek(0)
            holder = file.read(MAX_HOLDER).strip()
            elsewhere = holder and not holder.endswith(f" on {platform.node()}")
            if not elsewhere or time.monotonic() - began >= self.lease_seconds:
                self.close()
                raise FindingsError([self._finding(holder)])
            if not reported:
                self.say(f"{holder} has {self.folder}; waiting whether it is gone")
            reported = True
            time.sleep(RETRY_SECONDS)
        if not self._is_in_place():  # a start that failed removed it, and the folder perhaps, before this locked it
            self.close()
            self.folder.mkdir(parents=True, exist_ok=True)
            self.acquire()

    def _is_in_place(self) -> bool:
        """Return whether the locked file is the one that the next process would find."""
        assert self._file is not None
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), (self.folder / LOCK).stat())
        except FileNotFoundError:
            return False

    def write_holder(self) -> None:
        """Write this process into the lock file, for the message of the next process that wants the lock."""
        with suppress(OSError):  # a full disk, which the next write of the run reports
            if self._file:
                self._file.truncate(0)
                self._file.write(f"process {os.getpid()} on {platform.node()}\n")
                self._file.flush()

    def close(self) -> None:
        if self._file:
            with suppress(OSError):
                self._file.close()
        self._file = None

    def _finding(self, holder: str) -> Finding:
        advice = (
            f"wait for its end, or choose another --run folder; if it is gone for sure, delete {LOCK} in the folder"
        )
        problem = f"a run is under way in the folder{f': {holder}' if holder else ''}"
        return Finding(rule="run-is-alone", at=str(self.folder), problem=problem, advice=advice)


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

    def __reduce__(self) -> NoReturn:
        raise TypeError("a lease stays in its process: in another one its number names another file")

    def __del__(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint, for all readers at once, unless one has it open."""
    aside = folder.with_name(folder.name + ".partial")  # what a kill leaves of it, the next start removes
    shutil.rmtree(aside, ignore_errors=True)
    if _rename_unless_read(folder, aside):
        shutil.rmtree(aside, ignore_errors=True)


def _rename_unless_read(folder: Path, aside: Path) -> bool:
    try:
        handle = os.open(folder / MANIFEST, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # damaged: nobody reads it
        handle = None
    try:
        if handle is not None and not _try_lock(handle):
            return False
        folder.rename(aside)
        return True
    except OSError:
        return False
    finally:
        if handle is not None:
            os.close(handle)


def _try_lock(file: TextIO | int) -> bool:
    """Return whether the file is locked now; True also where the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _gone(folder: Path) -> FindingsError:
    problem = f"{folder.name} is gone: the run has newer checkpoints by now, or another machine has it"
    advice = "give the command again; a larger run.keep keeps more checkpoints"
    return FindingsError([Finding(rule=GONE, at=str(folder), problem=problem, advice=advice)])
