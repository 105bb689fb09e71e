"""A tiny plan on the CPU, and a tuning of it with a fake measurer: what tests of `threefold tune` share."""

from pathlib import Path
from typing import Any

from tests.support.fake_measurer import FakeMeasurer
from tests.support.plans import build
from threefold.plan.plan import Plan
from threefold.tune.ledger import open_ledger
from threefold.tune.loop import Settings, Tuned, tune

FIELDS: dict[str, Any] = {
    "model": "tiny-qwen3-moe",
    "model.num_layers": 1,
    "cluster.chip": "cpu",
    "job.seq_len": 32,
    "job.global_batch": 8,
    "job.micro_batch": 2,
    "knobs.precision": "fp32",
    "knobs.recompute": ["layernorm"],
}
CONTRACT: dict[str, Any] = {"timing": {"confirmed_steps": [6, 55]}}


def plan_to_tune(**changes: Any) -> Plan:
    return build({**FIELDS, **changes})


def tuned(measurer: FakeMeasurer, folder: Path, budget: float = 1200.0, plan: Plan | None = None, **more: Any) -> Tuned:
    with open_ledger(folder) as ledger:
        settings = Settings(budget_seconds=budget, **more)
        return tune(plan or plan_to_tune(), CONTRACT, ledger, measurer, settings, lambda text: None)
