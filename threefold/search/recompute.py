"""A memory budget becomes the cheapest set of recomputed modules that meets it, by estimate."""

from dataclasses import replace

from threefold.cost.memory.by_stack import memory
from threefold.cost.rates import rates_of
from threefold.cost.time.step import step_time
from threefold.findings import Finding, FindingsError
from threefold.plan.parse import change
from threefold.plan.plan import Plan
from threefold.remedies.recompute_sets import every_set
from threefold.rules.all import blockers, judge
from threefold.units import format_bytes


def resolve_recompute(plan: Plan) -> tuple[Plan, list[Finding]]:
    """The plan with names in place of a budget, and what was chosen; raises a finding where nothing meets it."""
    budget = plan.recompute_budget
    if budget is None:
        return plan, []
    need = {names: _peak(plan, names) for names in every_set(plan)}
    anyway, refusing = _broken(plan, ()), set[str]()
    meets = [names for names, peak in need.items() if peak <= budget]
    for names in sorted(meets, key=lambda names: (_seconds(plan, names), len(names), need[names])):
        if not (broken := _broken(plan, names) - anyway):
            return change(plan, {"knobs.recompute": list(names) or None}), [_chosen(plan, names, need[names])]
        refusing |= broken
    least = next(names for names in sorted(need, key=lambda names: need[names]) if _broken(plan, names) <= anyway)
    raise FindingsError([_too_small(plan, refusing, least, need[least])])


def _with(plan: Plan, names: tuple[str, ...]) -> Plan:
    return replace(plan, knobs=replace(plan.knobs, recompute=names))


def _peak(plan: Plan, names: tuple[str, ...]) -> float:
    return memory(_with(plan, names)).peak_bytes


def _seconds(plan: Plan, names: tuple[str, ...]) -> float:
    return step_time(_with(plan, names), rates_of(plan)).step_seconds


def _broken(plan: Plan, names: tuple[str, ...]) -> set[str]:
    """Rules, whatever field they speak of. What is broken with everything kept as well is for `check` to say."""
    found = change(plan, {"knobs.recompute": list(names) or None})
    return {finding.rule for finding in blockers(judge(found))}


def _chosen(plan: Plan, names: tuple[str, ...], peak: float) -> Finding:
    what = ", ".join(names) or "nothing"
    return Finding(
        rule="recompute-chosen",
        at="knobs.recompute",
        severity="warning",
        problem=f"{plan.knobs.recompute[0]} recomputes {what}: an estimated peak of {format_bytes(peak)}",
        fix={"knobs.recompute": list(names)},
        kind="fix",
        advice="write the names to keep them whatever later estimates say",
    )


def _too_small(plan: Plan, refusing: set[str], least: tuple[str, ...], peak: float) -> Finding:
    """`least`: the set with the smallest peak of those that break no rule."""
    why = f"the sets that meet it break a rule ({', '.join(sorted(refusing))})" if refusing else "no set meets it"
    smallest = (
        f"of those that break no rule {', '.join(least) or 'the empty one'} needs the least, {format_bytes(peak)}"
    )
    return Finding(
        rule="recompute-chosen",
        at="knobs.recompute",
        problem=f"{plan.knobs.recompute[0]}: {why}; {smallest}",
        advice="a larger budget, a smaller microbatch, offload, or more ranks",
    )
