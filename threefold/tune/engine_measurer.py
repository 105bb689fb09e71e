"""Measures trials with our engine on this machine, in processes that stay alive between trials.

`cli/tune.py` makes an `EngineMeasurer`. Plans that need other variables of the environment, or another set of cores,
get processes of their own.
"""

import time
from pathlib import Path
from typing import Any

from threefold.findings import FindingsError
from threefold.plan.plan import Plan
from threefold.profile.analyse import profile_traces
from threefold.tune.measurement import Measurement, Window

FIRST_LIMIT_SECONDS = 600.0  # of the first trial, which may compile kernels and read data
LIMIT_FACTOR, LEAST_LIMIT_SECONDS = 6.0, 90.0  # a later trial hangs after so many times what it should take


class EngineMeasurer:
    """Trials on this machine. Files of the processes lie in `folder`."""

    def __init__(self, folder: Path) -> None:
        from threefold.engine.tune.plan_session import PlanSession

        self._start = PlanSession
        self._session: PlanSession | None = None
        self._key: tuple[Any, ...] = ()
        self._folder = folder
        self._longest = 0.0  # seconds that a step of a trial took on average, start and build included

    def measure(self, plan: Plan, window: Window) -> Measurement:
        key = (plan.cluster.gpus, plan.knobs.max_connections, plan.run.cores)
        if self._session is None or window.is_fresh or key != self._key:
            self.close()
            self._session = self._start(self._folder, plan.cluster.gpus, _environment(plan))
            self._key = key
        trace = self._folder / "trace" if window.is_traced else None
        steps = {"warmup": window.warmup, "steps": window.steps, "seconds": window.seconds}
        began = time.monotonic()
        result = self._session.measure(
            dict(plan.written), {**steps, "trace": str(trace) if trace else None}, self._limit(window)
        )
        if "error" in result:
            return Measurement(error=str(result["error"]))
        taken = (time.monotonic() - began) / (window.warmup + len(result["steps"]))
        self._longest = max(self._longest, taken)
        wall, evidence = _wall(trace, plan) if trace else ("", ())
        return Measurement(
            steps=tuple(result["steps"]),
            losses=tuple(result["losses"]),
            skipped=result["skipped"],
            dropped=result["dropped"],
            peak_bytes=result["peak_bytes"],
            useful_tokens=result["work"]["useful_tokens"],
            flops=result["work"]["flops"],
            effects=tuple(result["effects"]),
            wall=wall,
            wall_evidence=evidence,
        )

    def now(self) -> float:
        return time.time()

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def _limit(self, window: Window) -> float:
        if not self._longest:
            return FIRST_LIMIT_SECONDS
        steps = window.warmup + window.steps
        return max(LEAST_LIMIT_SECONDS, LIMIT_FACTOR * self._longest * steps)


def _environment(plan: Plan) -> dict[str, str]:
    connections = plan.knobs.max_connections
    return {} if connections is None else {"CUDA_DEVICE_MAX_CONNECTIONS": str(connections)}


def _wall(folder: Path, plan: Plan) -> tuple[str, tuple[str, ...]]:
    """The wall that the trace shows; none where it cannot be read, so that the estimate's wall serves."""
    try:
        found = profile_traces(sorted((folder / "profile").glob("rank-*.json.gz")), plan)
    except FindingsError:
        return "", ()
    return found.diagnosis.dominant, tuple(found.diagnosis.evidence[found.diagnosis.dominant])
