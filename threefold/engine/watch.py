"""The watchdog: names the collective that does not end, its group, and the ranks that did not come to it.

Every rank's thread tells the store each pulse where the rank stands. Whoever waits too long reads what the others
said, prints one finding and ends its process, so that the agent starts all ranks again. gloo and the store release the
GIL while they wait. NCCL does not block the host, so there a hang is a phase without progress: give `beat` a limit.
"""

import math
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from threefold.engine.arrival import Report, Waiting, behind, judge, seconds, spell
from threefold.engine.exits import HUNG
from threefold.engine.log import write_to
from threefold.engine.posts import Posts
from threefold.engine.shard.collectives import Call, observed
from threefold.findings import Finding

_PYTHON = str(Path(os.__file__).parent)


@dataclass(slots=True)
class _Line:
    """A communicator. Groups of the same ranks share one, whatever their names."""

    key: str
    ranks: tuple[int, ...]
    name: str
    count: int = 0


@dataclass(slots=True)
class _Open:
    line: _Line
    name: str
    operation: str
    number: int
    since: float
    judged: float = 0.0
    rounds: int = 0  # of judging it
    excused: float = 0.0  # when the late ranks were last seen to be late with leave

    def waiting(self, now: float) -> Waiting:
        line = self.line
        return Waiting(self.operation, self.number, line.key, self.name, line.ranks, now - self.since)


def _end(finding: Finding) -> None:
    write_to(sys.stderr, f"{finding}\n")
    os._exit(HUNG)  # the main thread may be stuck for good: nothing to unwind


class Watch:
    """`with Watch(...)` around training. `limit_seconds` is how long one collective may take."""

    def __init__(
        self,
        limit_seconds: float,
        store: Any,
        rank: int,
        size: int,
        alarm: Callable[[Finding], None] = _end,
    ) -> None:
        self.limit, self.rank, self.size, self.alarm = limit_seconds, rank, size, alarm
        self.pulse_seconds = min(1.0, limit_seconds / 5)
        self._posts = Posts(store, rank, self.pulse_seconds)
        self._lines: dict[Any, _Line] = {}
        self._open: dict[int, _Open] = {}
        self._lock = threading.Lock()
        self._made = 0
        # Seconds this process ran, counted by the thread: a process that is stopped and goes on has not waited.
        self._now = 0.0
        self._phase, self._moved = "", 0.0
        self._phase_limit: float | None = None
        self._pulse = 0
        self._main = threading.main_thread().ident
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._stack = ExitStack()

    def beat(self, where: str, limit: float | None = None) -> None:
        """A phase begins. With a limit, no progress for as long raises the alarm; until then others wait for this rank
        without complaint. `math.inf`: it may take as long as it likes. Without: others wait as long as for a call."""
        self._phase_limit = limit
        self._phase = where
        self._moved = self._now

    @contextmanager
    def during(self, where: str, limit: float = math.inf) -> Iterator[None]:
        """A phase within another, such as writing a checkpoint."""
        before = self._phase, self._phase_limit
        self.beat(where, limit)
        try:
            yield
        finally:
            self.beat(*before)

    def observe(self, call: Call) -> Callable[[], None]:
        with self._lock:
            line = self._lines.get(call.group.handle) or self._line(call)
            line.count += 1
            self._made = made = self._made + 1
            self._moved = self._now
            self._open[made] = _Open(line, call.group.name, call.operation, line.count, self._now)

        def ended() -> None:
            with self._lock:
                self._open.pop(made, None)
            self._moved = self._now

        return ended

    def _line(self, call: Call) -> _Line:
        ranks = call.group.ranks
        key = f"{ranks[0]}-{ranks[-1]}/{len(ranks)}/{zlib.crc32(repr(ranks).encode()):08x}"
        line = self._lines[call.group.handle] = _Line(key, ranks, call.group.name)
        return line

    def __enter__(self) -> "Watch":
        self._stack.enter_context(observed(self.observe))
        self._tell()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()
        self._stop.set()
        self._thread.join(timeout=10)
        if isinstance(error, RuntimeError) and self._open:  # a peer is gone, and the error does not say which
            call = self._oldest()
            if call:
                self._say_lost(call)
        self._tell(left=True)

    def _run(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            self._stop.wait(self.pulse_seconds)
            self._now += min(time.monotonic() - began, 2 * self.pulse_seconds)
            began = time.monotonic()
            self._tell()
            call = self._oldest()
            if call and self._now - call.since > self.limit and self._now - call.judged >= self.limit / 4:
                self._judge(call)
            elif self._phase_limit is not None and not call and self._now - self._moved > self._phase_limit:
                self._judge_phase()
            self._now += time.monotonic() - began

    def _oldest(self) -> _Open | None:
        with self._lock:
            return min(self._open.values(), key=lambda call: call.since, default=None)

    def _known(self) -> list[_Line]:
        with self._lock:
            return list(self._lines.values())

    def _tell(self, left: bool = False) -> None:
        """Cheap: one small value a pulse."""
        self._pulse += 1
        call = self._oldest()
        frame = sys._current_frames().get(self._main or 0)
        report = Report(
            pulse=self._pulse,
            said_at=time.time(),
            phase=self._phase,
            idle_seconds=self._now - self._moved,
            phase_limit=self._phase_limit,
            place=_place(frame),
            waits=call.waiting(self._now) if call else None,
            calls={line.key: line.count for line in self._known()},
            left=left,
        )
        self._posts.tell(report)

    def _judge(self, call: _Open) -> None:
        call.judged, call.rounds = self._now, call.rounds + 1
        waiting = call.waiting(self._now)
        if not self._posts.is_judge(f"{waiting.line}/{waiting.number}/{call.rounds}"):
            return
        reports, silent = self._posts.listen(self._posts.concerned(waiting), self.limit, self._tell)
        if call is not self._oldest():
            return
        verdict = judge(waiting, f"did not arrive within {seconds(self.limit)}", reports, silent, self.rank)
        if verdict.excused:
            call.excused = self._now
        elif self._now - call.excused > self.limit:  # once they are back, they have the whole limit again
            self.alarm(self._finding(str(waiting), verdict.problem))

    def _judge_phase(self) -> None:
        reports, silent = self._posts.listen(tuple(range(self.size)), self.limit, self._tell)
        phase, limit = self._phase, self._phase_limit
        if limit is None or self._now - self._moved <= limit:
            return
        lines = self._known()
        calls = {line.key: line.count for line in lines}
        names = {line.key: f"{line.name} ({spell(line.ranks)})" for line in lines}
        parts = [f"no progress for {seconds(limit)}, at {_place(sys._current_frames().get(self._main or 0))}"]
        parts += [f"rank {rank} has not been heard of for {seconds(gone)}" for rank, gone in silent.items()]
        parts += behind(calls, reports, names)
        at = f"{phase or 'training'} on rank {self.rank}"
        advice = "look at that line, or give the phase a longer limit"
        self.alarm(Finding(rule="phase-progresses", at=at, problem="; ".join(parts), advice=advice))

    def _say_lost(self, call: _Open) -> None:
        """Before the error goes on its way: who is no longer there."""
        waiting = call.waiting(self._now)
        reports, silent = self._posts.listen(waiting.ranks, 0.0, self._tell)
        gone = {rank for rank, report in reports.items() if report is None or report.left or rank in silent}
        if gone - {self.rank}:
            verdict = judge(waiting, "went away", reports, silent, self.rank)
            write_to(sys.stderr, f"{self._finding(str(waiting), verdict.problem)}\n")

    def _finding(self, at: str, problem: str) -> Finding:
        if self._posts.lost:
            problem += f"; the store of the run does not answer ({self._posts.lost})"
        advice = "the named ranks' logs say what they did; a longer limit if they were only slow"
        return Finding(rule="collective-arrives", at=at, problem=problem, advice=advice)


def _place(frame: FrameType | None) -> str:
    """The innermost line that is not torch's, Python's or the watchdog's own."""
    while frame is not None:
        file = frame.f_code.co_filename
        if f"{os.sep}torch{os.sep}" not in file and not file.startswith(_PYTHON) and file != __file__:
            return f"{Path(file).name}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
