"""The traffic ledger against the engine: every collective of a training step on real ranks, counted and weighed."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.plans import build
from tests.ranks import run_ranks
from tests.tiny_models import spec_of
from threefold.cost.traffic import traffic
from threefold.engine import build as engine
from threefold.engine.mesh import Mesh
from threefold.engine.oracle import batch_of
from threefold.engine.runner import Piped
from threefold.engine.shard.collectives import Call, observed
from threefold.engine.step import train_step
from threefold.plan.plan import Plan

Ledger = Counter[tuple[str, str, int]]  # group, operation, bytes of a call: how often, over all ranks
BASE: dict[str, Any] = {
    "model": "tiny-qwen3-moe",
    "target": "threefold",
    "cluster.chip": "cpu",
    "job.seq_len": 16,
    "job.global_batch": 8,
    "job.routing": "forced-balance",
    "job.data": "synthetic",
    "job.aux_loss": 0.01,
    "knobs.precision": "fp32",
}


def plan_of(family: str, gpus: int, spec: dict[str, Any] | None = None, **fields: Any) -> Plan:
    """`tp=2` is layout.tp, `job_seq_len=32` is job.seq_len."""
    tables = ("job", "knobs", "cluster")
    named = {
        f"{name.partition('_')[0]}.{name.partition('_')[2]}" if name.startswith(tables) else f"layout.{name}": value
        for name, value in fields.items()
    }
    return replace(build({**BASE, "cluster.gpus": gpus, **named}), model=spec_of(family, **(spec or {})))


def on_rank(rank: int, plan: Plan) -> Ledger:
    """What one rank sends in one step."""
    seen: Ledger = Counter()

    def note(call: Call) -> None:
        seen[call.group.name, call.operation, call.num_bytes] += 1

    mesh = Mesh(plan.layout, rank)
    parts = engine.build(plan, mesh, with_data=False)
    batches = [batch_of(plan, 0, m, mesh.place("dp")) for m in range(plan.num_microbatches)]
    with observed(note):
        result = train_step(parts, batches, 1e-3, plan.job)
        parts.data.wait_gathered()
    assert result.applied
    if isinstance(parts.runner, Piped):
        for num_bytes, count in parts.runner.pipeline.traffic():
            seen["pp", "send", num_bytes] += count
    return seen


def predicted(plan: Plan) -> Ledger:
    """The ledger is of an average rank."""
    found: Ledger = Counter()
    for entry in traffic(plan):
        calls = entry.count * plan.layout.gpus
        assert entry.bytes == int(entry.bytes)
        assert calls == pytest.approx(round(calls), abs=1e-6)  # a float that was divided and multiplied again
        found[entry.axis, entry.operation, int(entry.bytes)] += round(calls)
    return found


CASES = {
    "dp": plan_of("qwen3_moe", 2),
    "tp": plan_of("qwen3_moe", 2, tp=2),
    "cp ring": plan_of("qwen3_moe", 2, cp=2),
    "ep": plan_of("qwen3_moe", 2, ep=2),
    "etp": plan_of("qwen3_moe", 2, etp=2),
    "pp": plan_of("qwen3_moe", 2, pp=2),
}


@pytest.mark.parametrize("name", CASES)
def test_what_ranks_send_is_what_the_ledger_says(name: str) -> None:
    plan = CASES[name]
    seen: Ledger = Counter()
    for rank in run_ranks(plan.layout.gpus, on_rank, plan):
        seen.update(rank)
    wanted = predicted(plan)
    assert seen == wanted, {key: (seen[key], wanted[key]) for key in seen | wanted if seen[key] != wanted[key]}
