"""The lock of a run's folder: two runs in one folder would overwrite each other's checkpoints.

`train.py` makes it, and `folder.py` acquires it when it opens the run.
"""

import fcntl
import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from threefold.findings import Finding, FindingsError
from threefold.safe_files import open_to_append

LOCK = "run.lock"
LEASE_SECONDS = 120.0  # after which file servers drop the locks of a machine that went down
RETRY_SECONDS = 1.0
MAX_HOLDER = 200  # characters of the file that are shown


class RunLock:
    """Keeps a folder to this process until it is closed. The kernel closes it, however the process ends.

    On a file system without locks the run goes on without one.
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
        """Whether the locked file is the one that the next process would find."""
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


def _try_lock(file: TextIO) -> bool:
    """Whether the file is locked now; True also where the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True
