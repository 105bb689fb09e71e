"""What ranks tell each other of themselves, through the store: a connection that no training call blocks."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from threefold.engine.arrival import Report, Waiting

_LISTEN = 3  # pulses in which every living rank is heard


class Posts:
    """A store that fails is noted in `lost`, never raised: the watchdog must speak all the more then."""

    def __init__(self, store: Any, rank: int, pulse_seconds: float) -> None:
        # A connection of its own: the main thread may block in the other one.
        self._store = store.clone() if hasattr(store, "clone") else store
        self._store.set_timeout(timedelta(seconds=max(5.0, 5 * pulse_seconds)))
        self.rank, self.pulse_seconds, self.lost = rank, pulse_seconds, ""

    def tell(self, report: Report) -> None:
        self._asked(lambda: self._store.set(f"watch/{self.rank}", report.to_json()))

    def read(self, rank: int) -> Report | None:
        key = f"watch/{rank}"
        found = self._asked(lambda: self._store.get(key) if self._store.check([key]) else None)
        return Report.from_json(found) if found else None

    def is_judge(self, case: str) -> bool:
        """One rank of a group a round: a thousand that all read a thousand reports would drown the store."""
        return self._asked(lambda: self._store.add(f"watch/case/{case}", 1)) in (1, None)

    def _asked(self, ask: Callable[[], Any]) -> Any:
        try:
            answer = ask()
            self.lost = ""
            return answer
        except (RuntimeError, OSError) as error:
            self.lost = str(error).splitlines()[0]
            return None

    def concerned(self, waiting: Waiting) -> tuple[int, ...]:
        """The group, and whoever its ranks wait for in turn."""
        known: set[int] = set()
        new = set(waiting.ranks)
        while new:
            known |= new
            reports = [self.read(rank) for rank in new]
            new = {rank for report in reports if report and report.waits for rank in report.waits.ranks} - known
        return tuple(sorted(known))

    def listen(
        self, ranks: tuple[int, ...], least: float, pulse: Callable[[], None]
    ) -> tuple[dict[int, Report | None], dict[int, float]]:
        """What ranks say now, and those silent for `least` seconds and while we listened, with their silence.

        A rank that holds the GIL for a while, as when it writes a checkpoint, is silent too, but not for so long.
        """
        before = {rank: self.read(rank) for rank in ranks}
        for _ in range(_LISTEN):
            time.sleep(self.pulse_seconds)
            pulse()
        after = {rank: self.read(rank) for rank in ranks}
        silent: dict[int, float] = {}
        for rank, report in after.items():
            old = before[rank]
            if report and old and old.pulse == report.pulse and not report.left and rank != self.rank:
                gone = time.time() - report.said_at
                if gone >= least:
                    silent[rank] = gone
        return after, silent
