"""A measurer with planted step times, seeded noise and drift, for tests of `threefold tune`. It runs nothing."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from threefold.plan.plan import Plan
from threefold.tune.measurement import Measurement, Trial, Window

Factor = Callable[[Plan], float]
START_SECONDS = 2.0  # that a trial takes beside its steps


@dataclass
class FakeMeasurer:
    """A machine on which a step takes `step_seconds` times the factor of its plan.

    Noise of a trial and of a step are standard deviations of logarithms. The machine gets slower by `drift` an hour,
    and swings by `swing` with a period of four minutes.
    """

    factor: Factor = lambda plan: 1.0
    seed: int = 0
    step_seconds: float = 0.1
    noise: float = 0.01
    step_noise: float = 0.02
    drift: float = 0.0
    swing: float = 0.0
    error: Callable[[Plan], str] = lambda plan: ""
    loss: Factor = lambda plan: 1.0
    facts: Callable[[Plan], Mapping[str, Any]] = lambda plan: {}
    on_measured: Callable[[int], None] = lambda count: None  # before a trial begins, with the number of those before
    time: float = 0.0
    plans: list[str] = field(default_factory=list)
    session: str = ""
    has_traces: bool = True

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)

    def measure(self, plan: Plan, window: Window) -> Measurement:
        self.on_measured(len(self.plans))
        self.plans.append(plan.hash)
        if error := self.error(plan):
            self.time += START_SECONDS
            return Measurement(error=error)
        of_trial = math.exp(self._draw.gauss(0, self.noise))
        speed = self.step_seconds * self.factor(plan) * of_trial * self._machine()
        steps = [speed * math.exp(abs(self._draw.gauss(0, self.step_noise))) for _ in range(window.steps)]
        self.time += START_SECONDS + sum(steps) + window.warmup * speed
        count = window.warmup + window.steps
        losses = tuple(self.loss(plan) * (2.0 + 3.0 / (1 + step)) for step in range(count))
        known: dict[str, Any] = {"useful_tokens": float(plan.tokens_per_step), "peak_bytes": 2**30, "flops": 1e12}
        return Measurement(steps=tuple(steps), losses=losses, **{**known, **self.facts(plan)})

    def prepare(self, trials: Sequence[Trial]) -> None:
        pass

    def now(self) -> float:
        return self.time

    def close(self) -> None:
        pass

    def _machine(self) -> float:
        return (1 + self.drift * self.time / 3600) * (1 + self.swing * math.sin(2 * math.pi * self.time / 240))
