"""The contract of a tuning, and labels of changes: training-equivalent, a new experiment, or benchmark-only.

A training-equivalent change leaves what is learned alone, but for the order of sums: layout, knobs, the microbatch. A
change of the formats in which numbers are rounded is a new experiment: it is tried where the user asks for it, and its
convergence remains to be shown. A change that makes a step faster because work is left out (forced balance, synthetic
or image-free data, dropped tokens, shorter sequences, fewer tokens, frozen parts) is benchmark-only: it is never
proposed, never measured and never wins.

Trials of another plan, machine, software or timing window would be taken for answers to this question. Layout, knobs,
microbatch and how the run is kept may change between trials; everything else of the plan is the contract.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import threefold
from threefold.compare.contract import PRECISION_FIELDS, flat
from threefold.compare.field_groups import differing_fields
from threefold.compare.work import plan_differences
from threefold.findings import Finding, FindingsError, shown
from threefold.machine.inventory import Machine
from threefold.plan.plan import Plan
from threefold.plan.same_run import listed, model_facts
from threefold.tune.measurement import Window

ALL_RANKS = "all"
CHANGEABLE = ("layout.", "knobs.", "run.")
CHANGEABLE_FIELDS = ("job.micro_batch",)


def is_changeable(path: str) -> bool:
    """Whether a trial may change the field: the result of training does not depend on it, but for rounding."""
    return path.startswith(CHANGEABLE) or path in CHANGEABLE_FIELDS


def contract_of(
    plan: Plan, here: Machine | None, screen: Window, confirm: Window, seed: int, ranks: str = ALL_RANKS
) -> dict[str, Any]:
    """Everything that trials share, as JSON reads it back. `here` is None where jobs run elsewhere: their logs say on
    what. `ranks` says which ones run."""
    fixed = {path: list(v) if isinstance(v, tuple) else v for path, v in plan.written if not is_changeable(path)}
    return {
        "plan": plan.hash,
        "fixed_fields": fixed,
        "model": model_facts(plan),
        "routing": plan.job.routing,
        "data": list(plan.job.data) if isinstance(plan.job.data, tuple) else plan.job.data,
        "benchmark_only": plan.is_benchmark_only,
        "tokens_per_step": plan.tokens_per_step,
        "hardware": _hardware(here) if here else {"chip": plan.cluster.chip, "gpus": plan.cluster.gpus},
        "software": {"threefold": threefold.__version__, **({"python": here.python, **here.versions} if here else {})},
        "timing": {
            "screening_steps": [screen.first_step, screen.warmup + screen.steps],
            "confirmed_steps": [confirm.first_step, confirm.warmup + confirm.steps],
        },
        "seed": seed,
        "ranks": ranks,
    }


def _hardware(here: Machine) -> dict[str, Any]:
    return {"chip": here.chip, "gpus": [gpu.name for gpu in here.gpus], "system": here.system}


def check_same_contract(before: Mapping[str, Any], now: Mapping[str, Any], folder: str) -> None:
    """Raise one finding that names every difference."""
    old, new = dict(flat(before)), dict(flat(now))
    differ = [
        f"{name} was {shown(old.get(name))}, now {shown(new.get(name))}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]
    if differ:
        problem = f"the folder holds the tuning of another contract: {listed(differ)}"
        advice = "choose another --out folder, or give the plan and the machine that it was started with"
        raise FindingsError([Finding(rule="same-tuning", at=folder, problem=problem, advice=advice)])


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
