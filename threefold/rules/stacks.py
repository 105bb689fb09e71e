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


_NOT_YET = {
    "fp8_params": False,
    "fp8_attention": False,
    "fp8_output": False,
}
# What the engine does in one way only: its default, and that way.
_NO_CHOICE: dict[str, tuple[object, str]] = {
    "permute_fusion": (True, "its kernels permute in one pass"),
    "loss_fusion": (True, "a chunk of logits becomes its loss and gradient at once"),
    "router_dtype": ("fp32", "routers compute in fp32"),
    "router_padding": (False, "experts get the rows that they have"),
}


@rule(severity="warning", rows="CF-ONE", target="threefold")
def engine_has_knob(plan: Plan) -> Iterator[Finding]:
    """The threefold engine has the knobs the plan turns.

    Why: some forms of FP8 are planned and priced, not built.
    Confirm: the names in the message.
    Fix: put them back to their defaults.
    """
    if plan.knobs.precision == "fp8-tensor":
        problem = "the engine has no delayed scaling (fp8-tensor)"
        yield Finding(at="knobs.precision", problem=problem, fix={"knobs.precision": "fp8-cs"})
    for name, off in _NOT_YET.items():
        if getattr(plan.knobs, name) != off:
            problem = f"the engine has no {name} yet"
            yield Finding(at=f"knobs.{name}", problem=problem, fix={f"knobs.{name}": None})


@rule(severity="warning", target="threefold")
def engine_has_a_choice(plan: Plan) -> Iterator[Finding]:
    """Knobs of what the threefold engine does in one way only are left alone.

    Why: they change nothing there, and their prices are those of other stacks; a run goes its one way all the same.
    Confirm: the names in the message.
    Fix: put them back to their defaults.
    """
    for name, (default, way) in _NO_CHOICE.items():
        if getattr(plan.knobs, name) != default:
            problem = f"the engine has no choice of {name}: {way}"
            yield Finding(at=f"knobs.{name}", problem=problem, fix={f"knobs.{name}": None})


@rule(severity="warning", rows="EX-DROP", target="threefold")
def engine_has_capacity(plan: Plan) -> Iterator[Finding]:
    """The threefold engine drops by expert, in microbatches of one length.

    Why: capacity per rank needs static buffers it has not; and where a microbatch is spread over TP x CP, which token
        came first is known only at full length.
    Confirm: job.capacity_scope, job.dynamic_length.
    Fix: capacity per expert, full sequences.
    """
    job = plan.job
    if job.capacity_factor is None:
        return
    if job.capacity_scope == "rank":
        problem = "the engine has no capacity per rank"
        yield Finding(at="job.capacity_scope", problem=problem, fix={"job.capacity_scope": None})
    if job.dynamic_length and plan.layout.tp * plan.layout.cp > 1:
        problem = "capacity with dynamic lengths over TP x CP"
        yield Finding(at="job.dynamic_length", problem=problem, fix={"job.dynamic_length": None})


ENGINE_LIMITS = ("stack-runs-family", "engine-has-knob", "engine-has-capacity", "engine-has-graphs")


def promoted(findings: list[Finding]) -> list[Finding]:
    """Findings as the engine sees them: what it cannot run is an error where a plan is executed."""
    return [replace(f, severity="error") if f.rule in ENGINE_LIMITS else f for f in findings]
