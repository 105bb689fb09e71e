"""One run a folder: two would write over each other's saves."""

import fcntl
import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from threefold.findings import Finding, FindingsError

LOCK = "run.lock"
LEASE_SECONDS = 120.0  # in which file servers forget the locks of a machine that went down
ASK_SECONDS = 1.0


class RunLock:
    """Keeps a folder to this process until it is closed; the kernel closes it, however the process ends.

    A file system without locks is taken at its word: the run goes on without.
    """

    def __init__(self, folder: Path, say: Callable[[str], None], lease_seconds: float = LEASE_SECONDS) -> None:
        self.folder, self.say, self.lease_seconds = folder, say, lease_seconds
        self._file: TextIO | None = None

    def take(self) -> None:
        """Raises at once where a process of this machine has it; another machine may be gone, and its lock goes too."""
        self._file = file = (self.folder / LOCK).open("a+", encoding="utf-8")
        began = time.monotonic()
        told = False
        while not _taken(file):
            file.seek(0)
            holder = file.read().strip()
            elsewhere = holder and not holder.endswith(f" on {platform.node()}")
            if not elsewhere or time.monotonic() - began >= self.lease_seconds:
                self.close()
                raise FindingsError([self._finding(holder)])
            if not told:
                self.say(f"{holder} has {self.folder}; waiting whether it is gone")
            told = True
            time.sleep(ASK_SECONDS)

    def sign(self) -> None:
        """For whoever comes next: who has it."""
        with suppress(OSError):  # a full disk: what matters more will say so
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


def _taken(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no locks here
        return True
    return True
