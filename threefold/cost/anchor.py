"""An estimate anchored to one measurement: what a neighboring run took over its own estimate is carried over in part.

How much of it, and what is then left of the error, was read off pairs of published runs by what the two have in common
(`anchors` in `calibration.json`, written by `tools/fit_rates.py`). `api/anchors.py` reads the measurement, and
`threefold estimate --like` and `plan --like` call `anchored`.
"""

import json
import math
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources

from threefold.cost.estimate import Estimate, estimate
from threefold.cost.rates import calibration
from threefold.plan.plan import Plan

NEAR = 2  # fields in which a near run differs at most
MOST_FIELDS = 6  # that are named as different


@dataclass(frozen=True, slots=True)
class Anchor:
    """A run that was measured."""

    name: str
    plan: Plan
    seconds: float  # of a step


@dataclass(frozen=True, slots=True)
class Carried:
    """A measured part of errors that two plans with something in common share."""

    common: str  # what they share, in words
    weight: float  # of the logarithm of measured over predicted seconds, the part that both have
    band: float  # relative error that holds 80 % of the pairs


@cache
def _carried() -> tuple[Carried, ...]:
    text = resources.files("threefold.cost").joinpath("calibration.json").read_text(encoding="utf-8")
    return tuple(Carried(name, one["weight"], one["band"]) for name, one in json.loads(text)["anchors"].items())


def likeness(plan: Plan, other: Plan) -> str:
    """The most that two plans share, as `calibration.json` names it."""
    same_model, same_chip = plan.model.name == other.model.name, plan.chip.name == other.chip.name
    same_precision = plan.knobs.precision == other.knobs.precision
    if same_model and same_chip and same_precision:
        num_fields = len(differing_fields(plan, other))
        if num_fields > NEAR:
            return "model, chip and precision"
        return "all but two settings" if num_fields else "all settings"
    if same_model and same_chip:
        return "model and chip"
    return "model" if same_model else "chip" if same_chip else "neither model nor chip"


def differing_fields(plan: Plan, other: Plan) -> tuple[str, ...]:
    """Fields of the two plans that differ, without the release."""
    one, two = dict(plan.written), dict(other.written)
    return tuple(
        sorted(path for path in one.keys() | two if one.get(path) != two.get(path) and path != "stack.release")
    )


def anchored(guess: Estimate, plan: Plan, anchor: Anchor) -> Estimate:
    """The estimate of a plan, moved and with the band that the measurement allows."""
    common = likeness(plan, anchor.plan)
    rule = next((rule for rule in _carried() if rule.common == common), None)
    if rule is None:
        return guess
    predicted = estimate(anchor.plan).time.step_seconds
    moved = math.exp(rule.weight * math.log(anchor.seconds / predicted))
    wide = guess.seconds_band[1] / guess.time.step_seconds - 1
    # The pairs were calibrated plans: what lies outside of them keeps its wider band in proportion.
    band = wide * min(1.0, rule.band / calibration("megatron-bridge").band)
    seconds = guess.time.step_seconds * moved
    fields = differing_fields(plan, anchor.plan)
    named = ", ".join(fields[:MOST_FIELDS]) + (
        f" and {len(fields) - MOST_FIELDS} more" if len(fields) > MOST_FIELDS else ""
    )
    basis = (
        f"like {anchor.name}, which took {anchor.seconds / predicted - 1:+.0%} over its estimate of {predicted:.4g} s: "
        f"{rule.weight:.0%} of that is carried over ({moved - 1:+.1%}), for both share {common}"
        f"{f'; they differ in {named}' if fields else ''}"
    )
    time = replace(
        guess.time, step_seconds=seconds, terms={name: value * moved for name, value in guess.time.terms.items()}
    )
    return replace(
        guess,
        time=time,
        tokens_per_second_per_gpu=guess.tokens_per_second_per_gpu / moved,
        model_tflops_per_gpu=guess.model_tflops_per_gpu / moved,
        mfu=guess.mfu / moved,
        seconds_band=(seconds / (1 + band), seconds * (1 + band)),
        basis=basis,
    )
