"""Removes what a start that failed has written, so that the corrected command finds the folder as it was.

`train.py` enters `removed_on_failure` on the first rank; `cli/train.py` calls `remove_empty_start` behind its agent.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from threefold.engine.run.folder import CHECKPOINTS, CONTRACT, PLAN
from threefold.engine.run.lock import LOCK
from threefold.launch.agent import LOGS

_OF_A_START = (PLAN, CONTRACT, LOCK, f"{PLAN}.partial", f"{CONTRACT}.partial")


class Start:
    """How far a start has come."""

    has_folder = False  # the lock of the folder is held by this run
    has_begun = False  # from now on nothing is removed


@contextmanager
def removed_on_failure(folder: Path) -> Iterator[Start]:
    """Where the block raises before it sets `has_begun`, remove the files that were not there before.

    Checkpoints, imported weights and logs are never touched, nor anything of a run that had started earlier, nor of
    one that holds the folder's lock.
    """
    was_there = folder.exists()
    before = {name for name in _OF_A_START if (folder / name).exists()}
    start = Start()
    try:
        yield start
    except BaseException:
        had_started = CONTRACT in before or (folder / CHECKPOINTS).exists()
        if not start.has_begun and not had_started:
            for name in _OF_A_START if start.has_folder else ():
                if name not in before:
                    with suppress(OSError):
                        (folder / name).unlink()
            with suppress(OSError):  # other files are in it, or it was never made
                if not was_there:
                    folder.rmdir()
        raise


def remove_empty_start(folder: Path) -> None:
    """Remove the logs of ranks that refused to start, and the folder where nothing else is in it."""
    with suppress(OSError):
        if {path.name for path in folder.iterdir()} <= {LOGS}:
            shutil.rmtree(folder / LOGS, ignore_errors=True)
            folder.rmdir()
