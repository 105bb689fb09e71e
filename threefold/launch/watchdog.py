"""The watchdog: names the collective that does not end, its group, and the ranks that did not come to it.

`train.py` runs one around the training of every rank. A thread sends a heartbeat to the store each pulse. A rank that
waits too long in a collective reads the heartbeats of the others, prints one finding and ends its process, so that the
agent restarts all ranks. gloo and the store release the GIL while they wait, so the thread runs on. NCCL calls return
at once, so under NCCL a hang is a phase that makes no progress within the limit given to `enter_phase`.
"""

import math
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from threefold.findings import Finding
from threefold.launch.hang_diagnosis import (
    OpenCollective,
    RankReport,
    describe_lagging_ranks,
    diagnose,
    format_ranks,
    format_seconds,
)
from threefold.launch.output import write_and_flush
from threefold.launch.rank_process import HUNG

_LISTEN_PULSES = 3  # every living rank sends at least one heartbeat in so many pulses


class Heartbeats:
    """Sends and reads heartbeats. An error of the store is noted in `store_error` and not raised."""

    def __init__(self, store: Any, rank: int, pulse_seconds: float) -> None:
        # The main thread may block in its connection, so this one is a second.
        self._store = store.clone() if hasattr(store, "clone") else store
        self._store.set_timeout(timedelta(seconds=max(5.0, 5 * pulse_seconds)))
        self.rank, self.pulse_seconds, self.store_error = rank, pulse_seconds, ""

    def send(self, report: RankReport) -> None:
        self._try(lambda: self._store.set(f"watch/{self.rank}", report.to_json()))

    def read(self, rank: int) -> RankReport | None:
        key = f"watch/{rank}"
        text = self._try(lambda: self._store.get(key) if self._store.check([key]) else None)
        return RankReport.from_json(text) if text else None

    def claim_diagnosis(self, case: str) -> bool:
        """Return whether this rank is the first to claim a case. A thousand ranks that all read a thousand reports
        would overload the store."""
        return self._try(lambda: self._store.add(f"watch/case/{case}", 1)) in (1, None)

    def _try(self, request: Callable[[], Any]) -> Any:
        try:
            answer = request()
            self.store_error = ""
            return answer
        except (RuntimeError, OSError) as error:
            self.store_error = str(error).splitlines()[0]
            return None

    def ranks_involved(self, call: OpenCollective) -> tuple[int, ...]:
        """The ranks of the call, and all ranks that those wait for in turn."""
        known: set[int] = set()
        new = set(call.ranks)
        while new:
            known |= new
            reports = [self.read(rank) for rank in new]
            new = {rank for report in reports if report and report.open_call for rank in report.open_call.ranks} - known
        return tuple(sorted(known))

    def listen(
        self, ranks: tuple[int, ...], min_silence: float, send_own: Callable[[], None]
    ) -> tuple[dict[int, RankReport | None], dict[int, float]]:
        """The newest reports, and the silent ranks with the seconds of their silence.

        A rank is silent if it sent nothing during some pulses and for `min_silence` seconds in all. A rank that holds
        the GIL for a while, as when it writes a checkpoint, sends nothing either, but not for that long.
        """
        before = {rank: self.read(rank) for rank in ranks}
        for _ in range(_LISTEN_PULSES):
            time.sleep(self.pulse_seconds)
            send_own()
        after = {rank: self.read(rank) for rank in ranks}
        silent: dict[int, float] = {}
        for rank, report in after.items():
            old = before[rank]
            if report and old and old.pulse == report.pulse and not report.has_left and rank != self.rank:
                gone = time.time() - report.sent_at
                if gone >= min_silence:
                    silent[rank] = gone
        return after, silent


_PYTHON_LIBRARY = str(Path(os.__file__).parent)


@dataclass(slots=True)
class _Communicator:
    """A communicator and the number of calls on it. Groups of the same ranks share one, whatever their names."""

    key: str
    ranks: tuple[int, ...]
    name: str
    num_calls: int = 0


@dataclass(slots=True)
class _OpenCall:
    """A collective that this rank has started and not ended. Times are those of `Watchdog._now`."""

    communicator: _Communicator
    group_name: str
    operation: str
    number: int
    started: float
    diagnosed: float = 0.0  # time of the last diagnosis
    num_diagnoses: int = 0
    excused: float = 0.0  # when the late ranks were last seen in a phase that may take long

    def report(self, now: float) -> OpenCollective:
        on = self.communicator
        return OpenCollective(self.operation, self.number, on.key, self.group_name, on.ranks, now - self.started)


def _end_process(finding: Finding) -> None:
    write_and_flush(sys.stderr, f"{finding}\n")
    os._exit(HUNG)  # without cleanup: the main thread may be stuck for good


class Watchdog:
    """A context manager around training, inside of which `observe` sees each collective.

    `limit_seconds` is how long one collective may take.
    """

    def __init__(
        self,
        limit_seconds: float,
        store: Any,
        rank: int,
        size: int,
        alarm: Callable[[Finding], None] = _end_process,
    ) -> None:
        self.limit, self.rank, self.size, self.alarm = limit_seconds, rank, size, alarm
        self.pulse_seconds = min(1.0, limit_seconds / 5)
        self._heartbeats = Heartbeats(store, rank, self.pulse_seconds)
        self._communicators: dict[Any, _Communicator] = {}
        self._open: dict[int, _OpenCall] = {}
        self._lock = threading.Lock()
        self._num_calls = 0
        # Seconds that this process ran, counted by the thread: while a process is stopped it does not wait.
        self._now = 0.0
        self._phase, self._last_progress = "", 0.0
        self._phase_limit: float | None = None
        self._pulse = 0
        self._main = threading.main_thread().ident
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def enter_phase(self, name: str, limit: float | None = None) -> None:
        """Note that a phase begins, such as a step or the loading of data.

        With a limit, no progress for so many seconds raises the alarm, and other ranks wait for this one as long;
        `math.inf` sets no bound. Without a limit other ranks wait as long as for any collective.
        """
        self._phase_limit = limit
        self._phase = name
        self._last_progress = self._now

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase within another that may take as long as it likes, such as writing a checkpoint."""
        before = self._phase, self._phase_limit
        self.enter_phase(name, math.inf)
        try:
            yield
        finally:
            self.enter_phase(*before)

    def observe(self, call: Any) -> Callable[[], None]:
        """Note that a collective (`engine/dist/collectives.py`) starts; the returned function notes its end."""
        with self._lock:
            on = self._communicators.get(call.group.handle) or self._add_communicator(call)
            on.num_calls += 1
            self._num_calls = number = self._num_calls + 1
            self._last_progress = self._now
            self._open[number] = _OpenCall(on, call.group.name, call.operation, on.num_calls, self._now)

        def ended() -> None:
            with self._lock:
                self._open.pop(number, None)
            self._last_progress = self._now

        return ended

    def _add_communicator(self, call: Any) -> _Communicator:
        ranks = call.group.ranks
        key = f"{ranks[0]}-{ranks[-1]}/{len(ranks)}/{zlib.crc32(repr(ranks).encode()):08x}"
        added = self._communicators[call.group.handle] = _Communicator(key, ranks, call.group.name)
        return added

    def __enter__(self) -> "Watchdog":
        self._send_heartbeat()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join(timeout=10)
        if isinstance(error, RuntimeError) and self._open:  # a peer is gone, and the error does not name it
            call = self._oldest_call()
            if call:
                self._report_lost_peer(call)
        self._send_heartbeat(has_left=True)

    def _run(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            self._stop.wait(self.pulse_seconds)
            self._now += min(time.monotonic() - began, 2 * self.pulse_seconds)
            began = time.monotonic()
            self._send_heartbeat()
            call = self._oldest_call()
            if call and self._now - call.started > self.limit and self._now - call.diagnosed >= self.limit / 4:
                self._diagnose(call)
            elif self._phase_limit is not None and not call and self._now - self._last_progress > self._phase_limit:
                self._diagnose_phase()
            self._now += time.monotonic() - began

    def _oldest_call(self) -> _OpenCall | None:
        with self._lock:
            return min(self._open.values(), key=lambda call: call.started, default=None)

    def _known_communicators(self) -> list[_Communicator]:
        with self._lock:
            return list(self._communicators.values())

    def _send_heartbeat(self, has_left: bool = False) -> None:
        """Send one small value to the store, which is cheap enough for every pulse."""
        self._pulse += 1
        call = self._oldest_call()
        frame = sys._current_frames().get(self._main or 0)
        report = RankReport(
            pulse=self._pulse,
            sent_at=time.time(),
            phase=self._phase,
            idle_seconds=self._now - self._last_progress,
            phase_limit=self._phase_limit,
            source_line=_source_line(frame),
            open_call=call.report(self._now) if call else None,
            calls={on.key: on.num_calls for on in self._known_communicators()},
            has_left=has_left,
        )
        self._heartbeats.send(report)

    def _diagnose(self, call: _OpenCall) -> None:
        """Raise the alarm about a call that takes too long, unless the ranks it waits for are excused."""
        call.diagnosed, call.num_diagnoses = self._now, call.num_diagnoses + 1
        open_call = call.report(self._now)
        if not self._heartbeats.claim_diagnosis(f"{open_call.communicator}/{open_call.number}/{call.num_diagnoses}"):
            return
        ranks = self._heartbeats.ranks_involved(open_call)
        reports, silent = self._heartbeats.listen(ranks, self.limit, self._send_heartbeat)
        if call is not self._oldest_call():
            return
        diagnosis = diagnose(
            open_call, f"did not arrive within {format_seconds(self.limit)}", reports, silent, self.rank
        )
        if diagnosis.is_excused:
            call.excused = self._now
        elif self._now - call.excused > self.limit:  # after an excused phase the late ranks have the whole limit again
            self.alarm(self._finding(str(open_call), diagnosis.problem))

    def _diagnose_phase(self) -> None:
        """Raise the alarm about a phase of this rank without progress."""
        reports, silent = self._heartbeats.listen(tuple(range(self.size)), self.limit, self._send_heartbeat)
        phase, limit = self._phase, self._phase_limit
        if limit is None or self._now - self._last_progress <= limit:
            return
        known = self._known_communicators()
        calls = {on.key: on.num_calls for on in known}
        names = {on.key: f"{on.name} ({format_ranks(on.ranks)})" for on in known}
        line = _source_line(sys._current_frames().get(self._main or 0))
        parts = [f"no progress for {format_seconds(limit)}, at {line}"]
        parts += [f"rank {rank} has not been heard of for {format_seconds(gone)}" for rank, gone in silent.items()]
        parts += describe_lagging_ranks(calls, reports, names)
        at = f"{phase or 'training'} on rank {self.rank}"
        advice = "look at that line, or give the phase a longer limit"
        self.alarm(Finding(rule="phase-progresses", at=at, problem="; ".join(parts), advice=advice))

    def _report_lost_peer(self, call: _OpenCall) -> None:
        """Print which ranks are gone, before the error of the collective is raised further."""
        open_call = call.report(self._now)
        reports, silent = self._heartbeats.listen(open_call.ranks, 0.0, self._send_heartbeat)
        gone = {rank for rank, report in reports.items() if report is None or report.has_left or rank in silent}
        if gone - {self.rank}:
            diagnosis = diagnose(open_call, "went away", reports, silent, self.rank)
            write_and_flush(sys.stderr, f"{self._finding(str(open_call), diagnosis.problem)}\n")

    def _finding(self, at: str, problem: str) -> Finding:
        if self._heartbeats.store_error:
            problem += f"; the store of the run does not answer ({self._heartbeats.store_error})"
        advice = "the named ranks' logs say what they did; a longer limit if they were only slow"
        return Finding(rule="collective-arrives", at=at, problem=problem, advice=advice)


def _source_line(frame: FrameType | None) -> str:
    """The innermost line of a thread that lies neither in torch, nor in Python's library, nor in this file."""
    while frame is not None:
        file = frame.f_code.co_filename
        if f"{os.sep}torch{os.sep}" not in file and not file.startswith(_PYTHON_LIBRARY) and file != __file__:
            return f"{Path(file).name}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
