"""Tries a change of a plan: what rules would find, and the bytes and seconds that it changes, with their bands.

`try_change` is the one place where a change is tried: `advise` and the fixes of rules, the search's steps around a plan
and the proposals of `tune` all call it, each with a judge of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from threefold.cost.estimate import gain, memory_band, time_band
from threefold.cost.memory.by_stack import memory
from threefold.findings import Finding, FindingsError
from threefold.plan.parse import change
from threefold.plan.plan import Plan
from threefold.units import format_bytes

Judge = Callable[[Plan], Sequence[Finding]]  # what speaks against the changed plan
NO_TIME = 0.0005  # of the throughput, below which a change is said to cost none
LITTLE = 0.01  # of the throughput, below which no figure is told: bands are wider
NOTHING_CHANGES = "frees 0 B, costs no time"


@dataclass(frozen=True)
class Trial:
    """A plan with some fields changed. What it costs is priced when it is asked for, of plans that can be priced."""

    changes: Mapping[str, Any]  # without those that put back to its default what nobody stated
    before: Plan
    plan: Plan | None  # None where the changes give no plan; the findings say why
    findings: tuple[Finding, ...]

    @property
    def is_legal(self) -> bool:
        return self.plan is not None and not self.findings

    @property
    def reason(self) -> str:
        """What speaks against it, in words."""
        return f"{self.findings[0].rule}: {self.findings[0].problem}" if self.findings else ""

    @cached_property
    def gain(self) -> float:
        """The gain of predicted throughput, as a fraction."""
        assert self.plan is not None
        return gain(self.before, self.plan)

    @cached_property
    def time_band(self) -> float:
        """How sure the two step times are, as a fraction."""
        assert self.plan is not None
        return max(time_band(self.before), time_band(self.plan))

    @cached_property
    def freed_bytes(self) -> float:
        assert self.plan is not None
        return memory(self.before).worst.device_bytes - memory(self.plan).worst.device_bytes

    @cached_property
    def freed_band(self) -> tuple[float, float]:
        """The bytes that are freed where both predictions are at the same end of their bands."""
        assert self.plan is not None
        ends = [self.freed_bytes * (1 + sign * memory_band(self.plan)) for sign in (-1, 1)]
        return min(ends), max(ends)

    @property
    def price(self) -> str:
        """What the change gives and takes, in words."""
        freed, lost = self.freed_bytes, -self.gain
        if abs(lost) <= NO_TIME:
            time = "costs no time"
        elif abs(lost) < LITTLE:
            time = f"{'costs' if lost > 0 else 'gains'} less than {LITTLE:.0%} of the throughput"
        elif lost > 0:
            time = f"costs {lost:.1%} of the throughput"
        else:
            time = f"gains {-lost:.1%} of throughput" if lost > -1 else "more than doubles the throughput"
        return f"{'frees' if freed >= 0 else 'takes'} {format_bytes(abs(freed))}, {time}"


def try_change(plan: Plan, changes: Mapping[str, Any], judge: Judge) -> Trial:
    """The changed plan, and what the judge says of it."""
    stated = {path: value for path, value in changes.items() if value is not None or path in plan.stated}
    try:
        other = change(plan, stated)
    except FindingsError as error:
        return Trial(stated, plan, None, tuple(error.findings))
    return Trial(stated, plan, other, tuple(judge(other)))
