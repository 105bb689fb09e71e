"""What refuses a plan, memory aside: that the search prices itself."""

from dataclasses import replace

from threefold.findings import Finding
from threefold.plan.plan import Plan
from threefold.rules.all import PREDICTED, RULES
from threefold.rules.stacks import LIMITS

PRICED = PREDICTED | {"states-fit-memory"}  # rules that judge what the search prices
# Rules that refuse a model on a stack, whatever the layout.
UNTRAINED = frozenset({"stack-runs-family", "bridge-trains-family", "ernie-has-shared-experts"})


def faults(plan: Plan) -> list[Finding]:
    """Errors of every rule that holds for the plan's target, but for those of predicted memory.

    What the target cannot run or switches off counts: `check` only warns of it, and whoever runs the plan refuses it.
    """
    wanted = (rule for rule in RULES.values() if rule.holds_for(plan) and _refuses(rule.slug, plan))
    return [replace(found, severity="error", rule=rule.slug) for rule in wanted for found in rule.check(plan)]


def untrained(plan: Plan) -> list[Finding]:
    """Why the plan's target cannot train its model at all."""
    return [fault for fault in faults(plan) if fault.rule in UNTRAINED]


def _refuses(slug: str, plan: Plan) -> bool:
    return slug not in PRICED and (RULES[slug].severity == "error" or slug in LIMITS[plan.target])
