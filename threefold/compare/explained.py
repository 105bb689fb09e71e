"""Which difference explains how much of the change between two sides, in seconds of a step and in bytes.

Between two plans it is the cost model's change, shared by `attribution.py`. Between two runs the model's shares are
scaled to A's measured step, and what they do not add up to is the rest: noise, versions, machines, and errors of the
model. Seconds are those of a step of A: B's are converted to the same work first.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from threefold.compare.attribution import Attribution, Contribution, attribute
from threefold.compare.contract import value_or_default
from threefold.compare.field_groups import PlansBetween, layout_faults
from threefold.compare.sides import Side
from threefold.compare.speed import Speed
from threefold.compare.work import plan_work
from threefold.cost.memory.by_stack import memory
from threefold.cost.rates import rates_of
from threefold.cost.time.step import step_time
from threefold.findings import FindingsError
from threefold.plan.plan import Plan

SKEW = "expert load"  # the name of what the runs' measured expert loads change, which is no field of a plan
SAME_SKEW = 0.01  # difference of two skews that is not looked at
LEAST_SHARE = 1e-6  # of the whole, below which a share is rounding


@dataclass(frozen=True, slots=True)
class Part:
    """What one group of fields adds to the change."""

    fields: dict[str, tuple[Any, Any]]  # values in A and in B by path
    amount: float
    terms: dict[str, float]  # the same by term of the cost model

    def to_json(self) -> dict[str, Any]:
        fields = {path: {"a": old, "b": new} for path, (old, new) in self.fields.items()}
        return {"fields": fields, "amount": self.amount, "terms": self.terms}


@dataclass(frozen=True, slots=True)
class Explained:
    """A change as a sum: what groups of fields contribute by the cost model, and a rest."""

    before: float
    after: float
    parts: tuple[Part, ...]  # largest first
    unexplained: float | None  # None between two plans: the parts are the whole change
    scale: float  # by which the cost model's shares were multiplied
    is_exact: bool  # Shapley values over all sets of groups; otherwise over drawn orders

    @property
    def change(self) -> float:
        return self.after - self.before

    def to_json(self) -> dict[str, Any]:
        return {
            "before": self.before,
            "after": self.after,
            "change": self.change,
            "parts": [part.to_json() for part in self.parts],
            "unexplained": self.unexplained,
            "scale": self.scale,
            "exact": self.is_exact,
        }


def explain_seconds(a: Side, b: Side, speed: Speed, dress: Callable[[Plan], Plan]) -> Explained | None:
    """Explain the change of the step time; None where a plan cannot be priced."""
    plan_a = a.plan
    if plan_a is None or a.guess is None or b.guess is None:
        return None
    whole = plan_work(plan_a, speed.unit)

    def price(plan: Plan, skew: float) -> dict[str, float]:
        here = dress(plan)
        terms = step_time(here, rates_of(here), _on(plan, skew)).terms
        return {name: seconds * whole / plan_work(plan, speed.unit) for name, seconds in terms.items()}

    shared = _attributed(a, b, price)
    if shared is None:
        return None
    before = speed.a.median
    scale = before / sum(shared.before.values()) if a.run is not None and b.run is not None else 1.0
    return _explained(shared, before, before * speed.ratio, scale, is_predicted=speed.is_predicted)


def explain_bytes(a: Side, b: Side, dress: Callable[[Plan], Plan]) -> Explained | None:
    """Explain the predicted change of the peak of memory on the fullest rank; None where a plan cannot be priced."""
    if a.guess is None or b.guess is None:
        return None
    shared = _attributed(a, b, lambda plan, skew: dict(memory(dress(plan), _on(plan, skew)).worst.terms))
    if shared is None:
        return None
    before, after = sum(shared.before.values()), sum(shared.after.values())
    return _explained(shared, before, after, 1.0, is_predicted=True)


def _on(plan: Plan, skew: float) -> float | None:
    """The skew that a run measured, as far as a plan can have it; None leaves it to the load of the plan."""
    return None if skew == 1.0 else min(skew, plan.layout.ep)


def _attributed(a: Side, b: Side, price: Callable[[Plan, float], dict[str, float]]) -> Attribution | None:
    """The shares of fields, and of the expert loads where two runs measured other ones: half of it with A's loads
    first, half with B's, so that all add up."""
    assert a.plan is not None
    assert b.plan is not None
    try:
        between = PlansBetween(a.plan, b.plan, layout_faults)
        first = attribute(between, lambda plan: price(plan, a.skew))
        if abs(a.skew - b.skew) <= SAME_SKEW:
            return first
        second = attribute(between, lambda plan: price(plan, b.skew))
    except FindingsError:  # a model of one side that is not found from the other's folder
        return None
    return _with_skew(first, second, (a.skew, b.skew))


def _with_skew(first: Attribution, second: Attribution, skews: tuple[float, float]) -> Attribution:
    terms = {
        name: (second.before[name] - first.before[name] + second.after[name] - first.after[name]) / 2
        for name in first.before
    }
    by_fields = {tuple(each.fields): each for each in second.contributions}
    halves = [
        Contribution(
            each.fields,
            {
                name: (each.terms.get(name, 0.0) + by_fields[tuple(each.fields)].terms.get(name, 0.0)) / 2
                for name in first.before
            },
        )
        for each in first.contributions
    ]
    loads = Contribution({SKEW: (round(skews[0], 3), round(skews[1], 3))}, terms)
    found = sorted([*halves, loads], key=lambda each: -abs(each.amount))
    return Attribution(first.before, second.after, tuple(found), first.is_exact)


def _with_defaults(fields: dict[str, tuple[Any, Any]]) -> dict[str, tuple[Any, Any]]:
    return {path: (value_or_default(path, old), value_or_default(path, new)) for path, (old, new) in fields.items()}


def _explained(shared: Attribution, before: float, after: float, scale: float, is_predicted: bool) -> Explained:
    least = LEAST_SHARE * max(abs(before), abs(after))
    parts = tuple(
        Part(
            _with_defaults(each.fields),
            scale * each.amount,
            {name: scale * value for name, value in each.terms.items() if value},
        )
        for each in shared.contributions
        if abs(scale * each.amount) > least
    )
    rest = None if is_predicted else after - before - sum(part.amount for part in parts)
    return Explained(before, after, parts, rest, scale, shared.is_exact)
