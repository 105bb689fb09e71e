"""Heartbeats: what ranks tell each other through the store, over a connection that no training call blocks.

The watchdog's thread sends one `RankReport` each pulse under the key `watch/<rank>` and reads those of other ranks.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from threefold.launch.hang_diagnosis import OpenCollective, RankReport

_LISTEN_PULSES = 3  # every living rank sends at least one heartbeat in so many pulses


class Heartbeats:
    """Sends and reads heartbeats. An error of the store is noted in `store_error`, not raised: the watchdog goes on."""

    def __init__(self, store: Any, rank: int, pulse_seconds: float) -> None:
        # The main thread may block in its connection, so this one is a second.
        self._store = store.clone() if hasattr(store, "clone") else store
        self._store.set_timeout(timedelta(seconds=max(5.0, 5 * pulse_seconds)))
        self.rank, self.pulse_seconds, self.store_error = rank, pulse_seconds, ""

    def send(self, report: RankReport) -> None:
        self._try(lambda: self._store.set(f"watch/{self.rank}", report.to_json()))

    def read(self, rank: int) -> RankReport | None:
        key = f"watch/{rank}"
        found = self._try(lambda: self._store.get(key) if self._store.check([key]) else None)
        return RankReport.from_json(found) if found else None

    def claim_diagnosis(self, case: str) -> bool:
        """Whether this rank is the first to claim a case. A thousand ranks that all read a thousand reports would
        overload the store."""
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
