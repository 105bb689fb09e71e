"""What the chosen stack can run. A warning here is an error where the plan is executed."""

from collections.abc import Iterator

from threefold.findings import Finding
from threefold.plan.plan import Plan
from threefold.rules.base import rule
from threefold.spec.stacks import STACKS


@rule(severity="warning", rows="CF-ONE")
def stack_runs_family(plan: Plan) -> Iterator[Finding]:
    """The chosen stack has the model's family.

    Why: a plan can be checked and priced for a model that its target cannot train yet.
    Confirm: the family of the model in `threefold models`.
    Fix: another target, or wait for the family.
    """
    if plan.model.family in STACKS[plan.target].families:
        return
    yield Finding(
        at="target",
        problem=f"{plan.target} does not train {plan.model.family} models yet",
        advice="the plan can be checked and shown; choose another target to run it",
    )
