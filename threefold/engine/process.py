"""One rank as a process of this machine: how it starts, how it ended, what it said."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from threefold.engine.exits import FAULT, HUNG, LONELY, REFUSED

TAIL_LINES = 12
_WORDS = {
    HUNG: "gave up on a collective or phase that did not end",
    REFUSED: "cannot run what it was given",
    LONELY: "lost a rank it was talking to",
    FAULT: "failed",
}
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass
class Rank:
    number: int
    process: subprocess.Popen[bytes]
    log: Path | None = None
    log_start: int = 0  # bytes of earlier attempts
    swept: bool = False

    @property
    def ended(self) -> bool:
        """Whether it has; what it started and left behind ends then too."""
        if self.process.poll() is None:
            return False
        if not self.swept:
            self.swept = True  # once, at once: later the number may be another's
            self.kill()
        return True

    def kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    @property
    def how(self) -> str:
        """How it ended, in words."""
        code = self.process.returncode
        if code in _WORDS:
            return _WORDS[code]
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def tail(self) -> list[str]:
        if self.log is None or not self.log.exists():
            return []
        with self.log.open("rb") as file:
            file.seek(max(self.log_start, self.log.stat().st_size - 20_000))
            return file.read().decode(errors="replace").splitlines()[-TAIL_LINES:]


def start_rank(argv: Sequence[str], env: dict[str, str], number: int, log: Path | None) -> Rank:
    """`argv` as a rank that writes to `log`, or where this process does."""
    begin = log.stat().st_size if log and log.exists() else 0
    with log.open("ab") if log else nullcontext() as out:
        process = subprocess.Popen(
            list(argv),
            env=os.environ | env,
            stdout=out,
            stderr=subprocess.STDOUT if out else None,
            start_new_session=True,  # its children end with it, and Ctrl-C reaches it through us alone
            preexec_fn=_dies_with(os.getpid()),
        )
    return Rank(number, process, log, begin)


def _dies_with(parent: int) -> Callable[[], None] | None:
    """In the child: the kernel kills it when the agent dies, by whatever end."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before we could ask
            os._exit(1)

    return ask
