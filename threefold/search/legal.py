"""What the rules refuse, memory aside: that the search prices itself."""

from threefold.findings import Finding
from threefold.plan.plan import Plan
from threefold.rules import memory
from threefold.rules.all import RULES


def faults(plan: Plan) -> list[Finding]:
    """Errors of every rule that holds for the plan's target, but for those of `rules/memory.py`."""
    wanted = (
        rule
        for rule in RULES.values()
        if rule.severity == "error" and rule.target in ("both", plan.target) and rule.home != memory.__name__
    )
    return [finding for rule in wanted for finding in _signed(rule.slug, list(rule.check(plan)))]


def _signed(slug: str, findings: list[Finding]) -> list[Finding]:
    return [Finding(one.at, one.problem, one.fix, one.advice, "error", slug) for one in findings]
