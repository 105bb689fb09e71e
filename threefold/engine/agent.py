"""Ranks of one machine: started together, watched, started again together after a failure, stopped together.

Ranks get torchrun's environment, so they need not know who started them. torch's own agent is not used here: it kills
a rank 30 seconds after a SIGTERM, whether its checkpoint is written or not; it sends the survivors of a failure that
same SIGTERM, which asks ours to save; and its ranks outlive it when it is killed.
"""

import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from threefold.engine.exits import HUNG, LONELY, REFUSED
from threefold.engine.log import write_to
from threefold.engine.process import Rank, start_rank
from threefold.engine.run import unwritable
from threefold.findings import Finding, FindingsError

LOGS, POLL_SECONDS = "logs", 0.05
INTERRUPT_SECONDS = 15.0  # for ranks to end after Ctrl-C before they are killed


@dataclass
class Agent:
    """`argv` in `nproc` processes. Rank 0 writes where the agent does, the others to `folder`/logs."""

    argv: Sequence[str]
    nproc: int
    max_restarts: int
    folder: Path
    out: TextIO | None = field(default_factory=lambda: sys.stderr)
    ranks: list[Rank] = field(default_factory=list)
    asked: int | None = None  # the signal that ends the run

    def run(self) -> int:
        """The exit code: 0, 1 where ranks refused, 128 + the signal that ended them; an error where they kept dying."""
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        try:
            with self._signals():
                for attempt in range(self.max_restarts + 1):
                    self._start(attempt, store.port)
                    failed = self._watch()
                    self._end()
                    if failed is None:
                        return 0
                    code = self._after(failed, attempt)
                    if code is not None:
                        return code
            raise AssertionError("the last attempt returns or raises")
        finally:
            self._end()
            del store  # or the traceback of an error keeps its thread and port

    def _start(self, attempt: int, port: int) -> None:
        logs = self.folder / LOGS
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FindingsError([unwritable(logs, error)]) from None
        for number in range(self.nproc):
            env = _environment(number, self.nproc, attempt, self.max_restarts, port)
            rank = start_rank(self.argv, env, number, logs / f"rank-{number}.log" if number else None)
            self.ranks.append(rank)
            if self.asked:
                rank.process.send_signal(self.asked)

    def _watch(self) -> Rank | None:
        """Until all ranks ended well, or one did not: the one to blame."""
        kill_at: float | None = None
        while True:
            ended = [rank for rank in self.ranks if rank.ended]
            failed = [rank for rank in ended if rank.process.returncode]
            if len(ended) == self.nproc or (failed and self.asked != signal.SIGINT):
                return min(failed, key=_blame, default=None)
            if self.asked == signal.SIGINT:
                kill_at = kill_at or time.monotonic() + INTERRUPT_SECONDS
                if time.monotonic() > kill_at:
                    self._end()
            time.sleep(POLL_SECONDS)

    def _after(self, failed: Rank, attempt: int) -> int | None:
        """The exit code, or None to start again."""
        code = failed.process.returncode
        if self.asked and (self.asked == signal.SIGINT or code == -self.asked):
            return 128 + self.asked  # as asked, though before the ranks could save
        head = f"rank {failed.number} of {self.nproc} {failed.how}"
        again = not self.asked and code != REFUSED and attempt < self.max_restarts
        plan = f"; starting all ranks again ({attempt + 1} of {self.max_restarts} restarts)" if again else ""
        self._say(head + plan, *(f"  | {line}" for line in failed.tail()))
        self.ranks.clear()
        if again:
            return None
        if code == REFUSED:
            return 1
        raise FindingsError([_kept_dying(failed, attempt, bool(self.asked))])

    def _say(self, *lines: str) -> None:
        write_to(self.out, "".join(f"{line}\n" for line in lines))

    def _end(self) -> None:
        for rank in self.ranks:
            if not rank.ended:
                rank.kill()
        for rank in self.ranks:
            rank.process.wait()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def forward(number: int, frame: Any) -> None:
            if number == signal.SIGINT and self.asked == signal.SIGINT:
                number = signal.SIGKILL  # asked twice
            else:
                self.asked = number
            for rank in self.ranks:
                if rank.process.poll() is None:
                    rank.process.send_signal(number)

        # SIGHUP: the terminal has gone, as after a lost connection. The work is kept.
        asks = {signal.SIGTERM: forward, signal.SIGINT: forward, signal.SIGHUP: _as_sigterm(forward)}
        before: dict[signal.Signals, Any] = {}
        with suppress(ValueError):  # not in the main thread: whoever runs us stops us
            for number, handler in asks.items():
                if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup: whoever started us means it
                    before[number] = signal.signal(number, handler)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def launch_here(argv: Sequence[str], nproc: int, max_restarts: int, folder: Path) -> int:
    """`argv` as `nproc` ranks on this machine; the exit code."""
    return Agent(argv, nproc, max_restarts, folder).run()


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


def _blame(rank: Rank) -> tuple[int, int]:
    """Of ranks seen dead together, the one whose end tells most."""
    code = rank.process.returncode
    tells = {REFUSED: 0, HUNG: 1, LONELY: 4}
    return tells.get(code, 2 if code < 0 else 3), rank.number


def _kept_dying(failed: Rank, attempt: int, stopping: bool) -> Finding:
    log = f"; the end of {failed.log}" if failed.log else ""
    times = "while it was asked to stop" if stopping else f"on start {attempt + 1} of {attempt + 1}"
    return Finding(
        rule="ranks-survive",
        at=f"rank {failed.number}",
        problem=f"{failed.how} {times}",
        advice=f"read what it said above{log}; the run goes on from its newest checkpoint when it is started again",
    )


def _as_sigterm(forward: Callable[[int, Any], None]) -> Callable[[int, Any], None]:
    return lambda number, frame: forward(signal.SIGTERM, frame)
