"""The agent: starts the ranks of one machine together, restarts them together after a failure, stops them together.

`threefold train --nproc` runs it. Ranks get torchrun's environment variables, so they need not know what started them.
Torch's own agent is not used, for three reasons: it kills a rank 30 seconds after a SIGTERM, whether its checkpoint is
written or not; it sends the survivors of a failure that same SIGTERM, which asks our ranks to save; and its ranks
outlive it when it is killed.
"""

import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from threefold.findings import Finding, FindingsError
from threefold.launch.output import unwritable_finding, write_and_flush
from threefold.launch.rank_process import HUNG, LOST_PEER, REFUSED, RankProcess, start_rank
from threefold.launch.stop_signals import SIGNAL_CODE, STOP_SIGNALS, install_handlers, stop_message

LOGS, POLL_SECONDS = "logs", 0.05
# How long rank 0 may continue after another rank refused. Mostly all refuse for one reason, which rank 0 has reported.
REFUSAL_SECONDS = 3.0


@dataclass
class Agent:
    """Runs `argv` in `nproc` processes. Rank 0 writes to the output of the agent, the others to `folder`/logs.

    Ranks start with SIGINT, SIGTERM and SIGHUP blocked, and unblock them when they can handle them.
    """

    argv: Sequence[str]
    nproc: int
    max_restarts: int
    folder: Path
    open_store: Callable[[], Any]  # a store of torch at a free port of this machine, for the ranks of one attempt
    out: TextIO | None = field(default_factory=lambda: sys.stderr)
    ranks: list[RankProcess] = field(default_factory=list)
    stop_signal: int | None = None  # the signal that asked the run to end

    def run(self) -> int:
        """Run to the end; returns 0, 1 where ranks refused, or 128 + the signal that ended them.

        Raises a finding where ranks kept dying.
        """
        store: Any = None
        try:
            with self._signals():
                for attempt in range(self.max_restarts + 1):
                    # A new one, because NCCL's notes about a collective that timed out have no prefix of the attempt.
                    # Ranks that find those of an earlier attempt wait for minutes on their way out.
                    store = self.open_store()
                    self._start(attempt, store.port)
                    failed = self._wait()
                    self._kill_all()
                    if failed is None:
                        return 0
                    code = self._handle_failure(failed, attempt)
                    if code is not None:
                        return code
            raise AssertionError("the last attempt returns or raises")
        finally:
            self._kill_all()
            del store  # the traceback of an error would keep its thread and port

    def _start(self, attempt: int, port: int) -> None:
        logs = self.folder / LOGS
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FindingsError([unwritable_finding(logs, error)]) from None
        for number in range(self.nproc):
            env = _environment(number, self.nproc, attempt, self.max_restarts, port)
            log = logs / f"rank-{number}.log" if number else None
            try:
                rank = start_rank(self.argv, env, number, log, blocks_signals=True)
            except OSError as error:
                raise FindingsError([unwritable_finding(log or logs, error)]) from None
            self.ranks.append(rank)
            if self.stop_signal:
                rank.process.send_signal(_to_forward(self.stop_signal))

    def _wait(self) -> RankProcess | None:
        """Wait until all ranks ended well (None) or one failed; returns the rank whose end explains most."""
        first_failure: float | None = None
        while not all(rank.has_ended for rank in self.ranks):
            blamed = self._blamed()
            if blamed is not None:
                first_failure = first_failure or time.monotonic()
                refused = blamed.process.returncode == REFUSED and blamed.number > 0
                if not refused or time.monotonic() > first_failure + REFUSAL_SECONDS:
                    break
            time.sleep(POLL_SECONDS)
        return self._blamed()

    def _blamed(self) -> RankProcess | None:
        failed = [rank for rank in self.ranks if rank.has_ended and rank.process.returncode]
        return min(failed, key=_blame_order, default=None)

    def _handle_failure(self, failed: RankProcess, attempt: int) -> int | None:
        """Report the failure; returns the exit code, or None to restart all ranks."""
        code = failed.process.returncode
        is_interrupted = self.stop_signal == signal.SIGINT and code != REFUSED
        if self.stop_signal and (is_interrupted or _ended_by(code, _to_forward(self.stop_signal))):
            write_and_flush(self.out, stop_message(self.stop_signal))  # asked for, though the ranks could not save
            return SIGNAL_CODE + self.stop_signal
        head = f"rank {failed.number} of {self.nproc} {failed.end_reason}"
        restarts = not self.stop_signal and code != REFUSED and attempt < self.max_restarts
        plan = f"; starting all ranks again ({attempt + 1} of {self.max_restarts} restarts)" if restarts else ""
        self._say(head + plan, *(f"  | {line}" for line in failed.log_tail()))
        self.ranks.clear()
        if restarts:
            return None
        if code == REFUSED:
            return 1
        raise FindingsError([_kept_dying(failed, attempt, bool(self.stop_signal))])

    def _say(self, *lines: str) -> None:
        write_and_flush(self.out, "".join(f"{line}\n" for line in lines))

    def _kill_all(self) -> None:
        for rank in self.ranks:
            if not rank.has_ended:
                rank.kill()
        for rank in self.ranks:
            rank.process.wait()

    def _signals(self) -> AbstractContextManager[None]:
        """Forward signals to the ranks inside the `with` block. The first Ctrl-C lets them save, the second kills."""

        def forward(number: int, frame: Any) -> None:
            is_second = number == signal.SIGINT and self.stop_signal == signal.SIGINT
            self.stop_signal = number
            for rank in self.ranks:
                if rank.process.poll() is None:
                    rank.process.send_signal(signal.SIGKILL if is_second else _to_forward(number))

        return install_handlers(dict.fromkeys(STOP_SIGNALS, forward))


def launch_ranks(
    argv: Sequence[str], nproc: int, max_restarts: int, folder: Path, open_store: Callable[[], Any]
) -> int:
    """Run `argv` as `nproc` ranks on this machine; returns the exit code."""
    return Agent(argv, nproc, max_restarts, folder, open_store).run()


def _environment(rank: int, size: int, attempt: int, restarts: int, port: int) -> dict[str, str]:
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "GROUP_RANK": 0,
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": attempt,
        "TORCHELASTIC_MAX_RESTARTS": restarts,
    }
    texts = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return texts | {name: str(value) for name, value in numbers.items()}


def _blame_order(rank: RankProcess) -> tuple[int, int]:
    """A sort key for ranks that ended at about the same time: the one whose end explains most comes first."""
    code = rank.process.returncode
    order = {REFUSED: 0, HUNG: 1, LOST_PEER: 4}
    return order.get(code, 2 if code < 0 else 3), rank.number


def _kept_dying(failed: RankProcess, attempt: int, stopping: bool) -> Finding:
    log = f"; the end of {failed.log}" if failed.log else ""
    times = "while it was asked to stop" if stopping else f"on start {attempt + 1} of {attempt + 1}"
    return Finding(
        rule="ranks-survive",
        at=f"rank {failed.number}",
        problem=f"{failed.end_reason} {times}",
        advice=f"read its output above{log}; the run resumes from its newest checkpoint when it is started again",
    )


def _to_forward(number: int) -> int:
    """The signal that ranks get. A lost terminal is the agent's; the ranks save, as after SIGTERM."""
    return signal.SIGTERM if number == signal.SIGHUP else number


def _ended_by(code: int, number: int) -> bool:
    """Return whether a process ended by this signal: killed by it, or by its handler of it."""
    return code in (-number, SIGNAL_CODE + number)
