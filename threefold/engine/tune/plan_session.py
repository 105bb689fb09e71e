"""Measures trials one after the other in processes that stay alive between them, because starting ranks takes longer
than measuring them.

`threefold/tune/engine_measurer.py` uses a `PlanSession`. A crash, a full memory or a hang is the result of the trial in
which it happened; the next trial starts new processes. All plans of a session have the same number of ranks.
"""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from threefold.engine.launch.rank_process import RankProcess, start_rank
from threefold.engine.tune.measure_plans import POLL_SECONDS, failure_reason, rank_variables

RANK_MODULE = ["-m", "threefold.engine.tune.session_rank"]


class PlanSession:
    """The processes of a number of ranks, started with the first trial and after each failure."""

    def __init__(self, folder: Path, ranks: int, env: Mapping[str, str]) -> None:
        self.folder, self.ranks, self.env = folder, ranks, dict(env)
        self._jobs, self._results = folder / "jobs.jsonl", folder / "results.jsonl"
        self._processes: list[RankProcess] = []
        self._num_jobs = 0

    def measure(self, fields: Mapping[str, Any], window: Mapping[str, Any], limit_seconds: float) -> dict[str, Any]:
        """The result of `run_trial` on the first rank, or `error`: why there is none."""
        if not self._processes:
            self._start()
        with self._jobs.open("a", encoding="utf-8") as jobs:
            jobs.write(json.dumps({"fields": dict(fields), "window": dict(window)}) + "\n")
        self._num_jobs += 1
        result = self._wait(limit_seconds)
        if "error" in result:  # memory that a failed plan left behind must not fail the next one
            self.close()
        return result

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.process.wait()
        self._processes = []

    def _start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        logs = [self.folder / f"rank-{rank}.log" for rank in range(self.ranks)]
        for path in (self._jobs, self._results, *logs):
            path.write_text("", encoding="utf-8")
        self._num_jobs = 0
        argv = [sys.executable, *RANK_MODULE, str(self._jobs), str(self._results)]
        for rank, variables in enumerate(rank_variables(self.ranks)):
            self._processes.append(start_rank(argv, {**self.env, **variables}, rank, logs[rank]))

    def _wait(self, limit_seconds: float) -> dict[str, Any]:
        began = time.monotonic()
        while True:
            ended = [process for process in self._processes if process.has_ended]
            text = self._results.read_text(encoding="utf-8")
            lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
            if len(lines) >= self._num_jobs:
                found: dict[str, Any] = json.loads(lines[self._num_jobs - 1])
                return found
            if ended:
                failed = next((process for process in ended if process.process.returncode), ended[0])
                return {"error": failure_reason(failed)}
            if time.monotonic() - began > limit_seconds:
                return {"error": f"no result within {limit_seconds:.0f} s"}
            time.sleep(POLL_SECONDS)
