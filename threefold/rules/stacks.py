"""What the chosen stack can run. A warning here is an error where the plan is executed."""

from collections.abc import Iterator
from dataclasses import replace

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


@rule(severity="warning", rows="CF-ONE", target="threefold")
def engine_runs_one_rank(plan: Plan) -> Iterator[Finding]:
    """The threefold engine trains on one rank so far.

    Why: its parallel axes are planned and checked, but not built.
    Confirm: cluster.gpus.
    Fix: one rank, or target megatron-bridge.
    """
    if plan.cluster.gpus > 1:
        problem = f"{plan.cluster.gpus} ranks; the engine runs on one"
        yield Finding(at="cluster.gpus", problem=problem, advice="train on one rank, or choose another target")


_NOT_YET = {
    "recompute": (),
    "graphs": (),
    "activation_offload": (),
    "activation_offload_layers": 0,
    "optimizer_offload": 0.0,
    "ep_overlap": False,
}


@rule(severity="warning", rows="CF-ONE", target="threefold")
def engine_has_knob(plan: Plan) -> Iterator[Finding]:
    """The threefold engine has the knobs the plan turns.

    Why: precision below sixteen bits, recompute, offload, graphs and overlap are planned and priced, not built.
    Confirm: the names in the message.
    Fix: put them back to their defaults.
    """
    if plan.low_precision:
        problem = f"the engine does not multiply in {plan.knobs.precision} yet"
        yield Finding(at="knobs.precision", problem=problem, fix={"knobs.precision": "bf16"})
    for name, off in _NOT_YET.items():
        if getattr(plan.knobs, name) != off:
            problem = f"the engine has no {name} yet"
            yield Finding(at=f"knobs.{name}", problem=problem, fix={f"knobs.{name}": None})


ENGINE_LIMITS = ("stack-runs-family", "engine-runs-one-rank", "engine-has-knob")


def promoted(findings: list[Finding]) -> list[Finding]:
    """Findings as the engine sees them: what it cannot run is an error where a plan is executed."""
    return [replace(f, severity="error") if f.rule in ENGINE_LIMITS else f for f in findings]
