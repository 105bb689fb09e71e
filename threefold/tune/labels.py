"""Labels of changes: training-equivalent, a new experiment, or benchmark-only.

A training-equivalent change leaves what is learned alone, but for the order of sums: layout, knobs, the microbatch. A
change of the formats in which numbers are rounded is a new experiment: it is tried where the user asks for it, and its
convergence remains to be shown. A change that makes a step faster because work is left out (forced balance, synthetic
or image-free data, dropped tokens, shorter sequences, fewer tokens, frozen parts) is benchmark-only: it is never
proposed, never measured and never wins.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from threefold.compare.contract import PRECISION_FIELDS
from threefold.compare.field_groups import differing_fields
from threefold.compare.work import plan_differences
from threefold.plan.plan import Plan
from threefold.tune.contract import is_changeable

Kind = Literal["training-equivalent", "new experiment", "benchmark-only"]

# Relative difference of mean losses that rounding may make in the first steps, in which two curves of the same training
# still run together. Formats of eight bits were measured within a percent (docs/log/fp8.md).
EARLY_STEPS = 10
LOSS_TOLERANCE, ROUNDING_TOLERANCE = 0.005, 0.02
# And over the whole run: routers turn differences of the last bits into other experts, and the curves part. On the demo
# plan in fp32, microbatches of 1 and of 4 sequences agreed to 0.0001 for 14 steps, and to 0.007 in the mean of 55.
LATE_TOLERANCE = 0.03


@dataclass(frozen=True, slots=True)
class Label:
    """The label of a changed plan, and why it is not training-equivalent."""

    kind: Kind
    reasons: tuple[str, ...] = ()

    @property
    def can_be_tried(self) -> bool:
        return self.kind != "benchmark-only"


def label_change(baseline: Plan, other: Plan) -> Label:
    """Compare a plan with the baseline of the tuning."""
    reasons = tuple(dict.fromkeys(_reasons(baseline, other)))
    if reasons:
        return Label("benchmark-only", reasons)
    formats = [each.path for each in differing_fields(baseline, other) if each.path in PRECISION_FIELDS]
    if formats:
        return Label("new experiment", (f"{', '.join(formats)}: another rounding, whose convergence is to be shown",))
    return Label("training-equivalent")


def _reasons(baseline: Plan, other: Plan) -> Iterator[str]:
    yield from (f"{at}: {problem}" for at, problem in plan_differences(baseline, other))
    if other.tokens_per_step != baseline.tokens_per_step:
        yield f"a step has {other.tokens_per_step} tokens, {baseline.tokens_per_step} in the baseline"
    if other.is_benchmark_only and not baseline.is_benchmark_only:
        yield "its data or routing is that of a benchmark"
    for each in differing_fields(baseline, other):
        if not is_changeable(each.path):
            yield f"{each.path} is part of the contract"


@dataclass(frozen=True, slots=True)
class LossComparison:
    """Loss curves of two trials that saw the same data from the same seed."""

    num_steps: int
    baseline: float  # mean loss over all steps that both have
    other: float
    early_difference: float  # relative, over the first steps
    difference: float  # relative, over all steps
    tolerance: float  # of the early difference

    @property
    def agrees(self) -> bool:
        return abs(self.early_difference) <= self.tolerance and abs(self.difference) <= LATE_TOLERANCE

    def to_json(self) -> dict[str, Any]:
        return {
            "num_steps": self.num_steps,
            "baseline": self.baseline,
            "winner": self.other,
            "early_steps": min(EARLY_STEPS, self.num_steps),
            "early_difference": self.early_difference,
            "early_tolerance": self.tolerance,
            "difference": self.difference,
            "tolerance": LATE_TOLERANCE,
            "agrees": self.agrees,
        }


def compare_loss_curves(
    baseline: Sequence[float], other: Sequence[float], changed_fields: Sequence[str]
) -> LossComparison:
    """Compare the steps that both have. Curves that are not finite, or have no step in common, do not agree."""
    count = min(len(baseline), len(other))
    tolerance = ROUNDING_TOLERANCE if any(path in PRECISION_FIELDS for path in changed_fields) else LOSS_TOLERANCE
    means = [_mean(losses[:count]) for losses in (baseline, other)]
    early = [_mean(losses[: min(count, EARLY_STEPS)]) for losses in (baseline, other)]
    return LossComparison(
        count, means[0], means[1], early[1] / early[0] - 1 if early[0] else math.nan,
        means[1] / means[0] - 1 if means[0] else math.nan, tolerance,
    )  # fmt: skip


def _mean(losses: Sequence[float]) -> float:
    return math.fsum(losses) / len(losses) if losses else math.nan
