"""What verbs that rehearse share: the plan as the engine runs it, and the loads of its experts. No torch until it runs."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from threefold.findings import Finding, FindingsError, in_order
from threefold.plan.parse import change
from threefold.plan.plan import Plan
from threefold.rules.all import blockers, check
from threefold.rules.stacks import ENGINE_LIMITS

if TYPE_CHECKING:
    from threefold.dryrun.loads import Loads

TARGET = "threefold"


def as_the_engine_runs(plan: Plan) -> tuple[Plan, list[str]]:
    """The plan with what the engine lacks put back to defaults, and what that was, in words; raises what is left."""
    said = []
    if plan.target != TARGET:
        said.append(f"target {plan.target} by {TARGET}: it is this engine that is rehearsed")
        plan = change(plan, {"target": TARGET})
    for finding in [f for f in check(plan) if f.rule in ENGINE_LIMITS and f.fix_data]:
        plan = change(plan, finding.fix_data or {})
        said.append(f"{finding.at}: {finding.problem}")
    if plan.job.packing:
        plan = change(plan, {"job.packing": None})
        said.append("job.packing: a sequence is rehearsed as one document")
    if plan.job.dynamic_length:
        plan = change(plan, {"job.dynamic_length": None})
        said.append("job.dynamic_length: every microbatch has its full length")
    wrong = [f for f in check(plan) if f.rule in ENGINE_LIMITS] + blockers(check(plan))
    if wrong:
        raise FindingsError(in_order(wrong))
    return plan, said


def loads_from(path: str | None, skew: float, plan: Plan) -> "tuple[Loads | None, str]":
    """How tokens fall on the experts, or what is wrong with what was given."""
    from threefold.dryrun.loads import Loads

    num_experts = plan.model.num_experts
    if skew != 1:
        if not 1 <= skew <= plan.layout.ep:
            return None, f"--skew {skew:g} is not between 1 and EP {plan.layout.ep}"
        rest = (plan.layout.ep - skew) / max(1, plan.layout.ep - 1)
        each = num_experts // plan.layout.ep
        return Loads((skew,) * each + (rest,) * (num_experts - each)), ""
    if path is None:
        return None, ""
    try:
        rows = json.loads(Path(path).read_text(encoding="utf-8"))
        if rows and isinstance(rows[0], list):  # of every layer
            rows = [sum(column) for column in zip(*rows, strict=True)]
        shares = tuple(float(load) for load in rows)
        if len(shares) != num_experts or min(shares) < 0 or not sum(shares):
            return None, f"--loads {path} has no {num_experts} loads, one an expert"
        return Loads(shares), ""
    except (OSError, ValueError, TypeError, IndexError, KeyError) as error:
        return None, f"--loads {path}: {error}"


def progress() -> Callable[[str], None] | None:
    """A line that is written over, where somebody looks."""
    if not sys.stderr.isatty():
        return None
    return lambda text: print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def end_progress() -> None:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)


def verdict_of(plan: Plan) -> list[Finding]:
    """What a rehearsal of every stage says about a plan; a warning names what was left out."""
    from threefold.dryrun.rehearse import rehearse

    runs, said = as_the_engine_runs(plan)
    try:
        found = rehearse(runs, say=progress())
    finally:
        end_progress()
    notes = [Finding(at=TARGET, problem=f"left out of the rehearsal: {text}", severity="warning", rule=PARTLY) for text in said]
    return [*found.findings, *notes]


PARTLY = "rehearsal-is-whole"
