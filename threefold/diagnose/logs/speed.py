"""A run's measured speed against the estimate of its plan, and what the log says that could explain the difference."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from threefold.cost.estimate import Estimate, estimate
from threefold.diagnose.deaths.catalogue import Death
from threefold.diagnose.logs.health import Health
from threefold.diagnose.logs.sightings import Sighting
from threefold.findings import FindingsError
from threefold.plan.parse import change
from threefold.plan.plan import Plan
from threefold.rules.all import blockers, check
from threefold.units import format_bytes

Notices = Mapping[str, tuple[Death, Sighting, int]]  # by slug: the entry, where it was first seen, how often
_LEAST_GAP = 0.1
_OTHER_WORK = 1.5  # TFLOP/s times seconds, against those of the plan: past it the plan is not what ran
_UNLEVEL = 1.3  # of the load-balancing loss


@dataclass
class Speed:
    """Seconds of a step, measured and estimated, and TFLOP/s of a GPU."""

    measured_seconds: float | None = None
    measured_tflops: float | None = None
    estimated_seconds: float | None = None
    estimated_tflops: float | None = None
    band: tuple[float, float] | None = None  # of the estimated seconds
    causes: list[str] = field(default_factory=list)  # each with its evidence

    @property
    def is_slow(self) -> bool:
        """Whether the run is slower than the band of its estimate."""
        if self.measured_seconds and self.band:
            return self.measured_seconds > self.band[1]
        if self.measured_tflops and self.estimated_tflops:
            return self.measured_tflops < (1 - 2 * _LEAST_GAP) * self.estimated_tflops
        return False

    def lines(self) -> list[str]:
        if self.estimated_tflops is None or self.band is None:
            return []
        if self.measured_tflops:
            head = f"{self.measured_tflops:.0f} of about {self.estimated_tflops:.0f} TFLOP/s a GPU"
        elif self.measured_seconds:
            head = f"{self.measured_seconds:.3g} s a step"
        else:
            return []
        head += f"; estimated {self.estimated_seconds:.3g} s a step ({self.band[0]:.3g} to {self.band[1]:.3g})"
        if problem := self._other_work():
            return [head, problem]
        if not self.is_slow:
            return [f"{head}: as estimated"]
        if not self.causes:
            return [f"{head}: slower; nothing in the log explains it: profile one step of the slowest rank"]
        return [f"{head}: the difference is consistent with", *(f"  {cause}" for cause in self.causes)]

    def _other_work(self) -> str:
        """Say that the log's own numbers are not those of a step of the plan: then speeds do not compare."""
        if not (self.measured_tflops and self.measured_seconds and self.estimated_tflops and self.estimated_seconds):
            return ""
        ratio = self.measured_tflops * self.measured_seconds / (self.estimated_tflops * self.estimated_seconds)
        if 1 / _OTHER_WORK <= ratio <= _OTHER_WORK:
            return ""
        return (
            f"  a GPU of the log does {ratio:.2g} times the work of a step of this plan (TFLOP/s times seconds): "
            "its number of GPUs, batch, length or model is another"
        )


def measured_speed(plan: Plan | None, health: Health, system: str | None, notices: Notices) -> Speed:
    speed = Speed(health.step_seconds, health.tflops)
    if plan is None or plan.chip.architecture == "cpu" or blockers(check(plan, notes=False)):
        return speed
    priced = _priced(plan)
    if priced is None:
        return speed
    if speed.measured_seconds is None and health.tokens_per_second:
        tokens = plan.job.seq_len * plan.job.global_batch
        # torchtitan's tps is that of one device; ours is that of all ranks.
        ranks = plan.cluster.gpus if system == "torchtitan" else 1
        speed.measured_seconds = tokens / (health.tokens_per_second * ranks)
    speed.estimated_seconds, speed.estimated_tflops = priced.time.step_seconds, priced.model_tflops_per_gpu
    speed.band = priced.seconds_band
    speed.causes = list(_causes(plan, priced, health, notices))
    return speed


def beyond_plan(plan: Plan, allocated: float | None) -> str:
    """Say that a rank had more memory allocated than the plan can account for; empty where it had not."""
    priced = _priced(plan) if allocated else None
    if priced is None or allocated is None or allocated <= (1 + _LEAST_GAP) * priced.bytes_band[1]:
        return ""
    low, high = priced.bytes_band
    return (
        f"the plan is estimated to allocate {format_bytes(low)} to {format_bytes(high)}: "
        f"{format_bytes(allocated - high)} are not of it: "
        "another plan ran, one rank gets most tokens (job.load), or something stays from step to step (a snapshot says)"
    )


def _priced(plan: Plan, skew: float = 1.0) -> Estimate | None:
    try:
        return estimate(plan, skew=skew)
    except (FindingsError, ValueError, ZeroDivisionError):
        return None


def _causes(plan: Plan, priced: Estimate, health: Health, notices: Notices) -> list[str]:
    said = []
    for slug, (death, first, count) in notices.items():
        text = f"{slug}: {first.text[:160]} ({first.file}:{first.line}"
        text += f", {count} times)" if count > 1 else ")"
        differs = any(_value(plan, path) != value for path, value in death.fields.items())
        if differs and (changed := _priced(change(plan, dict(death.fields)))):
            text += f"; with it the estimate is {changed.time.step_seconds:.3g} s"
        said.append(text)
    if health.balance and health.balance > _UNLEVEL:
        uneven = _priced(plan, skew=health.balance)
        text = f"routers that are not level: load-balancing loss {health.balance:.3g}"
        said.append(text + (f"; a skew like that costs {uneven.time.step_seconds:.3g} s" if uneven else ""))
    if health.num_outliers and health.num_steps and health.num_outliers > 0.02 * health.num_steps:
        said.append(f"{health.num_outliers} slow steps of {health.num_steps}: saving, evaluating, data or a late rank")
    if health.drift and health.drift > 0:
        said.append(f"steps that grew {health.drift:.0%} slower: clocks, memory that fragments, or data")
    if plan.knobs.recompute == ("full",):
        said.append("full recompute: narrow it where memory allows (`threefold estimate` prices it)")
    return said


def _value(plan: Plan, path: str) -> Any:
    group, _, name = path.partition(".")
    return getattr(getattr(plan, group, None), name, None)
