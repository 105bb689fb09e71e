"""What refuses a plan, memory aside: that the search prices itself."""

from dataclasses import replace

from threefold.findings import Finding
from threefold.plan.plan import Plan
from threefold.rules import memory
from threefold.rules.all import RULES
from threefold.rules.stacks import ENGINE_LIMITS


def faults(plan: Plan) -> list[Finding]:
    """Errors of every rule that holds for the plan's target, but for those of `rules/memory.py`.

    What our engine cannot run counts where the plan is for it: `check` only warns of it, `train` refuses it.
    """
    wanted = (
        rule
        for rule in RULES.values()
        if rule.target in ("both", plan.target) and rule.home != memory.__name__ and _refuses(rule.slug, plan)
    )
    return [replace(found, severity="error", rule=rule.slug) for rule in wanted for found in rule.check(plan)]


def _refuses(slug: str, plan: Plan) -> bool:
    return RULES[slug].severity == "error" or (plan.target == "threefold" and slug in ENGINE_LIMITS)
