"""Step times of the two sides per unit of work, their ratio, and how certain it is.

The interval of a run covers the noise from step to step in its steady window. It does not cover what differs from one
start to the next, such as another node or a warmer machine: two runs of one plan can differ by more.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from threefold.compare.sides import Side
from threefold.compare.statistics import Interval, median_interval, ratio_interval
from threefold.compare.work import Unit, Work
from threefold.profile.readers.run_record import Column

Verdict = Literal["slower", "faster", "no certain difference", "too few steps"]


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """The step time of one side."""

    level: Literal["estimated", "measured"]
    median: float
    interval: Interval | None  # of a plan, the band of its estimate
    num_steps: int  # in the steady window; 0 for a plan
    window: tuple[int, int] | None  # first and last step of it

    def to_json(self) -> dict[str, Any]:
        return {
            "level": self.level,
            "step_seconds": self.median,
            "interval": list(self.interval) if self.interval else None,
            "num_steps": self.num_steps,
            "window": list(self.window) if self.window else None,
        }


@dataclass(frozen=True, slots=True)
class Speed:
    """The time of B over that of A, for the same work."""

    a: StepSeconds
    b: StepSeconds
    unit: Unit
    ratio: float  # above 1: B is slower
    interval: Interval | None  # None where there are too few steps, and between two estimates
    is_predicted: bool  # both sides are estimates, which have no noise

    @property
    def verdict(self) -> Verdict:
        low, high = self.interval or ((self.ratio, self.ratio) if self.is_predicted else (0.0, 0.0))
        if high == 0:
            return "too few steps"
        return "slower" if low > 1 else "faster" if high < 1 else "no certain difference"

    def is_slower_by(self, percent: float) -> bool:
        """Whether B is certainly slower than A by more than so many percent."""
        low = self.interval[0] if self.interval else self.ratio if self.is_predicted else 0.0
        return low > 1 + percent / 100

    def to_json(self) -> dict[str, Any]:
        return {
            "a": self.a.to_json(),
            "b": self.b.to_json(),
            "per": self.unit,
            "ratio": self.ratio,
            "interval": list(self.interval) if self.interval else None,
            "verdict": self.verdict,
        }


def compare_speed(a: Side, b: Side, work_a: Work, work_b: Work, unit: Unit, window: tuple[int, int] | None) -> Speed:
    """Compare the step times of two sides that both have work."""
    samples = [work.seconds / work.amount(unit) for work in (work_a, work_b)]
    sides = [_step_seconds(side, work, window) for side, work in ((a, work_a), (b, work_b))]
    measured = [side.run is not None for side in (a, b)]
    if all(measured):
        ratio, interval = ratio_interval(samples[0], samples[1])
    else:
        ratio = float(np.median(samples[1]) / np.median(samples[0]))
        interval = _mixed_interval(sides, samples) if any(measured) else None
    return Speed(sides[0], sides[1], unit, ratio, interval, not any(measured))


def _step_seconds(side: Side, work: Work, window: tuple[int, int] | None) -> StepSeconds:
    if side.run is None:
        assert side.guess is not None
        return StepSeconds("estimated", side.guess.time.step_seconds, side.guess.seconds_band, 0, None)
    steps = side.run.columns["step"][side.run.is_steady(window)]
    seconds = work.seconds
    shown = int(steps[0]), int(steps[-1])
    return StepSeconds("measured", float(np.median(seconds)), median_interval(seconds), len(seconds), shown)


def _mixed_interval(sides: list[StepSeconds], samples: list[Column]) -> Interval | None:
    """The interval of a ratio between an estimate with its band and a measurement with its interval."""
    relative = []
    for side, sample in zip(sides, samples, strict=True):
        interval = median_interval(sample) if side.level == "measured" else side.interval
        if interval is None:
            return None
        center = float(np.median(sample)) if side.level == "measured" else side.median
        relative.append((interval[0] / center, interval[1] / center))
    ratio = float(np.median(samples[1]) / np.median(samples[0]))
    return ratio * relative[1][0] / relative[0][1], ratio * relative[1][1] / relative[0][0]
