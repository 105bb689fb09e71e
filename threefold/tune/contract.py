"""The contract of a tuning: what must stay the same from the first trial to the last, and when it is resumed.

Trials of another plan, machine, software or timing window would be taken for answers to this question. Layout, knobs,
microbatch and how the run is kept may change between trials; everything else of the plan is the contract.
"""

from collections.abc import Mapping
from typing import Any

import threefold
from threefold.findings import Finding, FindingsError, shown
from threefold.machine.inventory import Machine
from threefold.plan.plan import Plan
from threefold.plan.same_run import listed, model_facts
from threefold.tune.measurement import Window

ALL_RANKS = "all"
CHANGEABLE = ("layout.", "knobs.", "run.")
CHANGEABLE_FIELDS = ("job.micro_batch",)


def is_changeable(path: str) -> bool:
    """Whether a trial may change the field: the result of training does not depend on it, but for rounding."""
    return path.startswith(CHANGEABLE) or path in CHANGEABLE_FIELDS


def contract_of(
    plan: Plan, here: Machine | None, screen: Window, confirm: Window, seed: int, ranks: str = ALL_RANKS
) -> dict[str, Any]:
    """Everything that trials share, as JSON reads it back. `here` is None where jobs run elsewhere: their logs say on
    what. `ranks` says which ones run."""
    fixed = {path: list(v) if isinstance(v, tuple) else v for path, v in plan.written if not is_changeable(path)}
    return {
        "plan": plan.hash,
        "fixed_fields": fixed,
        "model": model_facts(plan),
        "routing": plan.job.routing,
        "data": list(plan.job.data) if isinstance(plan.job.data, tuple) else plan.job.data,
        "benchmark_only": plan.is_benchmark_only,
        "tokens_per_step": plan.tokens_per_step,
        "hardware": _hardware(here) if here else {"chip": plan.cluster.chip, "gpus": plan.cluster.gpus},
        "software": {"threefold": threefold.__version__, **({"python": here.python, **here.versions} if here else {})},
        "timing": {
            "screening_steps": [screen.first_step, screen.warmup + screen.steps],
            "confirmed_steps": [confirm.first_step, confirm.warmup + confirm.steps],
        },
        "seed": seed,
        "ranks": ranks,
    }


def _hardware(here: Machine) -> dict[str, Any]:
    return {"chip": here.chip, "gpus": [gpu.name for gpu in here.gpus], "system": here.system}


def check_same_contract(before: Mapping[str, Any], now: Mapping[str, Any], folder: str) -> None:
    """Raise one finding that names every difference."""
    old, new = _flat(before), _flat(now)
    differ = [
        f"{name} was {shown(old.get(name))}, now {shown(new.get(name))}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]
    if differ:
        problem = f"the folder holds the tuning of another contract: {listed(differ)}"
        advice = "choose another --out folder, or give the plan and the machine that it was started with"
        raise FindingsError([Finding(rule="same-tuning", at=folder, problem=problem, advice=advice)])


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found
