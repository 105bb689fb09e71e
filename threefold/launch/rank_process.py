"""One rank as a process of this machine: how it starts, how it ended, and the end of its log. The agent uses it.

The agent starts all ranks again after a hang, a lost peer or a fault, and gives up after a refusal, which would come
again on every start. Exit codes are those of sysexits.h.
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from threefold.launch.stop_signals import block_stop_signals

REFUSED = 78  # a finding that would come again on every start
HUNG = 75  # the watchdog ended the rank; another start may help
LOST_PEER = 76  # another rank went away first and has the cause
FAULT = 70  # an unexpected error, whose traceback is in the log


TAIL_LINES = 12
_END_REASONS = {
    HUNG: "gave up on a collective or phase that did not end",
    REFUSED: "cannot run what it was given",
    LOST_PEER: "lost a rank it was talking to",
    FAULT: "failed",
}
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass
class RankProcess:
    """A rank that was started, and whose process may have ended."""

    number: int
    process: subprocess.Popen[bytes]
    log: Path | None = None
    log_start: int = 0  # bytes that earlier attempts wrote
    children_killed: bool = False

    @property
    def has_ended(self) -> bool:
        """Return whether the process has ended. Processes that it started and left behind are killed then."""
        if self.process.poll() is None:
            return False
        if not self.children_killed:
            self.children_killed = True  # only once: later the process number may be another process's
            self.kill()
        return True

    def kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    @property
    def end_reason(self) -> str:
        """The end of the process, in words."""
        code = self.process.returncode
        if code in _END_REASONS:
            return _END_REASONS[code]
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def log_tail(self) -> list[str]:
        """The last lines that this attempt wrote to the log."""
        if self.log is None or not self.log.exists():
            return []
        with self.log.open("rb") as file:
            file.seek(max(self.log_start, self.log.stat().st_size - 20_000))
            return file.read().decode(errors="replace").splitlines()[-TAIL_LINES:]


def start_rank(
    argv: Sequence[str], env: dict[str, str], number: int, log: Path | None, blocks_signals: bool = False
) -> RankProcess:
    """Start `argv` as a rank that writes to `log`, or to the output of this process.

    With `blocks_signals`, SIGINT, SIGTERM and SIGHUP wait until the rank unblocks them (`stop_signals.py`).
    """
    log_start = log.stat().st_size if log and log.exists() else 0
    with log.open("ab") if log else nullcontext() as out:
        process = subprocess.Popen(
            list(argv),
            env=os.environ | env,
            stdout=out,
            stderr=subprocess.STDOUT if out else None,
            # Its children can be killed with it, and Ctrl-C reaches it through the agent only.
            start_new_session=True,
            preexec_fn=_before_exec(os.getpid(), blocks_signals),
        )
    return RankProcess(number, process, log, log_start)


def _before_exec(parent: int, blocks_signals: bool) -> Callable[[], None]:
    """A function for the child process: it blocks signals that the rank is to handle, and on Linux asks the kernel to
    kill the rank when the agent dies."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def prepare() -> None:
        if blocks_signals:
            block_stop_signals()
        if libc is None:
            return
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the agent died before the call above
            os._exit(1)

    return prepare
