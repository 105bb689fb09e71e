"""Measures trials with our engine on this machine, in processes that stay alive between trials.

`api/tunings.py` makes an `EngineMeasurer`. Plans that need other variables of the environment, or another set of cores,
get processes of their own.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from threefold.findings import FindingsError
from threefold.plan.plan import Plan
from threefold.profile.analyze import profile_traces
from threefold.tune.measurement import Measurement, Trial, Window

if TYPE_CHECKING:
    from threefold.launch.plan_session import PlanSession

FIRST_LIMIT_SECONDS = 600.0  # of the first trial, which may compile kernels and read data
LIMIT_FACTOR, LEAST_LIMIT_SECONDS = 6.0, 90.0  # a later trial hangs after so many times what it should take


class EngineMeasurer:
    """Trials on this machine, or on the nodes on which `launcher` starts processes. Files lie in `folder`.

    With a `rank`, that rank of the plan runs here alone, with rehearsed peers: its compute is measured, communication
    and the pipeline bubble are predicted, and there are no losses.
    """

    session = ""
    has_traces = True

    def __init__(self, folder: Path, rank: int | None = None, launcher: Sequence[str] = ()) -> None:
        from threefold.launch.plan_session import PlanSession

        self._start = PlanSession
        self._session: PlanSession | None = None
        self._key: tuple[Any, ...] = ()
        self._folder, self._rank, self._launcher = folder, rank, launcher
        self._longest = 0.0  # seconds that a step of a trial took on average, start and build included

    def measure(self, plan: Plan, window: Window) -> Measurement:
        key = (plan.cluster.gpus, plan.knobs.max_connections, plan.run.cores)
        if self._session is None or window.is_fresh or key != self._key:
            self.close()
            self._session = self._start_session(plan)
            self._key = key
        trace = self._folder / "trace" if window.is_traced and self._rank is None else None
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
            images=result["work"].get("images"),
            is_image_free=bool(result["work"].get("is_image_free", False)),
            effects=tuple(result["effects"]),
            wall=wall,
            wall_evidence=evidence,
        )

    def prepare(self, trials: Sequence[Trial]) -> None:
        pass

    def _start_session(self, plan: Plan) -> "PlanSession":
        if self._rank is not None:
            module = ("-m", "threefold.dryrun.measured.measure", str(self._rank))
            return self._start(self._folder, 1, _environment(plan), module)
        return self._start(self._folder, plan.cluster.gpus, _environment(plan), launcher=self._launcher)

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
