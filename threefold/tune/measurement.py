"""What one trial of a plan gave, and the interface of whoever measures it.

`engine_measurer.py` runs our engine on this machine, `log_measurer.py` reads the logs of jobs that ran elsewhere. Tests
give a measurer of their own with planted step times.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

from threefold.plan.plan import Plan

Failure = Literal["oom", "hang", "crash"]

SAME_WORK = 0.001  # relative difference of useful tokens, and fraction of dropped ones, from which work was left out


@dataclass(frozen=True, slots=True)
class Window:
    """The steps of a trial: `steps` are timed after `warmup`, fewer where `seconds` are over."""

    warmup: int
    steps: int
    seconds: float = 1e9
    is_fresh: bool = False  # measured in new processes, as a run of its own
    is_traced: bool = False  # a trace is taken behind the timed steps
    name: str = ""  # of the trial, by which its job and its log are found

    @property
    def first_step(self) -> int:
        return self.warmup + 1


@dataclass(frozen=True, slots=True)
class Measurement:
    """The steps of one trial, or how it failed."""

    steps: tuple[float, ...] = ()  # seconds of the timed steps
    losses: tuple[float, ...] = ()  # of all steps from the first one on
    skipped: int = 0  # steps that were not finite and changed nothing
    dropped: float = 0.0  # largest fraction of tokens that experts left out
    peak_bytes: int | None = None
    useful_tokens: float | None = None  # of the first step
    flops: float | None = None  # of the model in the first step
    images: float | None = None  # of the first step
    is_image_free: bool = False  # a vision-language model saw no image in any step
    effects: tuple[dict[str, Any], ...] = field(default=())  # settings, and whether they took effect
    error: str = ""
    wall: str = ""  # that the trace shows, where one was taken
    wall_evidence: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """The typical step."""
        return statistics.median(self.steps)

    @property
    def is_finite(self) -> bool:
        return all(math.isfinite(loss) for loss in self.losses)

    @property
    def failure(self) -> Failure | None:
        if not self.error:
            return None
        if "out of memory" in self.error.lower():
            return "oom"
        return "hang" if self.error.startswith("no result within") else "crash"

    def lacks_effect(self, paths: set[str]) -> list[str]:
        """The given fields of the plan that were observed to have no effect, with the evidence."""
        found = []
        for name in sorted(path.partition(".")[2] for path in paths if path.startswith("knobs.")):
            seen = [one for one in self.effects if str(one["knob"]).partition(".")[0] == name]
            if seen and all(one.get("took_effect") is False for one in seen):
                found.append(f"knobs.{name}: {seen[0]['evidence']}")
        return found

    def left_out(self, baseline: "Measurement") -> str:
        """Work that the baseline does and this trial does not, in words; empty where there is none."""
        if self.dropped > baseline.dropped + SAME_WORK:
            return f"{self.dropped:.1%} of the tokens were dropped, {baseline.dropped:.1%} in the baseline"
        if self.useful_tokens and baseline.useful_tokens:
            ratio = self.useful_tokens / baseline.useful_tokens
            if ratio < 1 - SAME_WORK:
                return f"a step has {self.useful_tokens:.0f} useful tokens, {baseline.useful_tokens:.0f} before"
        if self.images is not None and baseline.images and self.images < baseline.images:
            return f"a step has {self.images:.0f} images, {baseline.images:.0f} before"
        return ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Measurement":
        """The measurement of a ledger. Raises ValueError or TypeError for what `to_json` does not write."""
        lists = ("steps", "losses", "effects", "wall_evidence")
        fields: dict[str, Any] = {name: tuple(v) if name in lists else v for name, v in values.items()}
        found = cls(**fields)
        texts = (found.error, found.wall, *found.wall_evidence)
        numbers = (found.skipped, found.dropped, *found.losses)
        perhaps = (found.peak_bytes, found.useful_tokens, found.flops, found.images)
        effects = [effect.get("knob") if isinstance(effect, dict) else None for effect in found.effects]
        if not (
            all(isinstance(one, str) for one in (*texts, *effects))
            and all(map(_is_number, numbers))
            and all(one is None or (_is_number(one) and 0 <= one < 1e300) for one in perhaps)
            and all(_is_number(one) and 0 < one < 1e9 for one in found.steps)
        ):
            raise ValueError("a value has a wrong type, or is no number of a step")
        return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Trial:
    """A trial that will be measured."""

    plan: Plan
    window: Window


class AwaitingLogs(Exception):  # noqa: N818 - it is no error: jobs were written, and their logs are not there yet
    """Trials that run elsewhere have no log yet, or one whose job has not ended."""

    def __init__(self, count: int, script: str, is_under_way: bool = False) -> None:
        super().__init__(f"{count} jobs wait to be run: {script}")
        self.count, self.script, self.is_under_way = count, script, is_under_way


class Measurer(Protocol):
    """Runs trials. A crash, an OOM or a hang comes back as a measurement with an error."""

    session: str  # trials of one session follow each other without a gap; empty: this process is one
    has_traces: bool  # a trial can be traced, and shows its wall

    def prepare(self, trials: Sequence[Trial]) -> None:
        """Told before the trials of a race or a confirmation, in their order."""
        ...

    def measure(self, plan: Plan, window: Window) -> Measurement: ...

    def now(self) -> float:
        """Seconds on a clock that only this measurer's trials need to share."""
        ...

    def close(self) -> None: ...
