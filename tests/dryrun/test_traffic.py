"""The traffic ledger against the engine: every collective of a training step on real ranks, counted and weighed."""

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
from plans import build
from tiny_models import spec_of

from threefold.cost import local_parameters
from threefold.cost.traffic.by_stack import traffic
from threefold.cost.traffic.threefold import step
from threefold.engine import build as engine
from threefold.engine.data_parallel.protocol import data_parallel_settings
from threefold.engine.dist.collectives import CollectiveCall, observe_collectives
from threefold.engine.dist.mesh import Mesh
from threefold.engine.layers import cross_entropy as loss
from threefold.engine.moe.copies import ExpertCopies
from threefold.engine.schedule.microbatch_runners import Pipelined
from threefold.engine.step import train_step
from threefold.engine.verify.forked_ranks import run_ranks
from threefold.engine.verify.oracle import synthetic_batch
from threefold.plan.plan import Plan
from threefold.rules.all import check

Ledger = Counter[tuple[str, str, int]]  # group, operation, bytes of a call: how often, over all ranks
BASE: dict[str, Any] = {
    "model": "tiny-qwen3-moe",
    "target": "threefold",
    "cluster.chip": "cpu",
    "job.seq_len": 16,
    "job.global_batch": 4,
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

    def note(call: CollectiveCall) -> None:
        seen[call.group.name, call.operation, call.num_bytes] += 1

    mesh = Mesh(plan.layout, rank)
    parts = engine.build(plan, mesh, with_data=False)
    batches = [synthetic_batch(plan, 0, m, mesh.coordinate("dp")) for m in range(plan.num_microbatches)]
    with observe_collectives(note):
        result = train_step(parts, batches, 1e-3, plan.job)
        parts.data.finish_param_sync()
    assert result.applied
    if isinstance(parts.runner, Pipelined):
        for num_bytes, count in parts.runner.pipeline.traffic():
            seen["pp", "send", num_bytes] += count
    return seen


def on_rank_with_copies(rank: int, plan: Plan) -> Ledger:
    """The same of a step that fills all slots for copies of experts."""
    with patch.object(ExpertCopies, "fills_all_slots", True):
        return on_rank(rank, plan)


@pytest.mark.parametrize(
    "fields", [{"etp": 2}, {"job_lora_rank": 4, "job_lora_targets": ["experts"], "knobs_expert_copies": 2}]
)
def test_copies_of_experts(fields: dict[str, Any]) -> None:
    """The router chooses, so that only calls of copies are known. Rows may have the bytes of a weight by chance."""
    family, fields = "gpt_oss" if "etp" in fields else "qwen3_moe", {"job_routing": "learned", **fields}
    plan = plan_of(family, 4, ep=2, knobs_expert_balance="replicate", **fields)
    plain = replace(plan, knobs=replace(plan.knobs, expert_balance="none"))
    calls = {call: number for call, number in (predicted(plan) - predicted(plain)).items() if number}
    # Two layers on four ranks: four weights and as many gradients, or two frozen weights beside four that train.
    assert sum(calls.values()) == 2 * 4 * (4 + 4 if family == "gpt_oss" else 6 + 4)
    seen = sum(run_ranks(4, on_rank_with_copies, plan), Counter())
    assert all(seen[call] >= number for call, number in calls.items()), (calls, seen)


def predicted(plan: Plan) -> Ledger:
    """The ledger is of an average rank."""
    found: Ledger = Counter()
    for entry in traffic(plan):
        calls = entry.count * plan.layout.gpus
        assert entry.bytes == int(entry.bytes)
        assert calls == pytest.approx(round(calls), abs=1e-6)  # a float that was divided and multiplied again
        found[entry.axis, entry.operation, int(entry.bytes)] += round(calls)
    return found


ODD: dict[str, Any] = {"odd": True}
MTP: dict[str, Any] = {"num_nextn_predict_layers": 2}
TIED: dict[str, Any] = {"tie_word_embeddings": True}
FOUR: dict[str, Any] = {"num_hidden_layers": 4}
CASES = {
    # Every axis alone.
    "dp": plan_of("qwen3_moe", 2, ODD, job_micro_batch=2),
    "tp": plan_of("qwen3_moe", 2, tp=2),
    "tp, keys as values": plan_of("gemma4_text", 4, tp=2, ep=2),
    "tp, norms over all heads, copied keys": plan_of("minimax_m2", 4, tp=4, ep=2),
    "cp": plan_of("qwen3_moe", 2, ODD, cp=2),
    "ep": plan_of("qwen3_moe", 2, ODD, ep=2),
    "etp": plan_of("qwen3_moe", 2, etp=2),
    "pp": plan_of("qwen3_moe", 2, ODD, pp=2),
    # Tensor parallel: latents, key/value heads that two or all ranks hold alike, a dense model.
    "tp latents, MTP": plan_of("deepseek_v3", 4, MTP | {"q_lora_rank": 20}, tp=2, ep=2, job_seq_aux_loss=0.01),
    "tp kv copies": plan_of("qwen3", 4, tp=4),
    "tp one kv head": plan_of("qwen3_moe", 4, {"num_key_value_heads": 1}, tp=4, ep=2, etp=2, job_micro_batch=2),
    "tp dense, tied": plan_of("llama", 4, ODD, tp=2),
    "tp rings": plan_of("qwen3_next", 2, tp=2, knobs_tp_overlap=True),
    "tp rings, latents": plan_of("deepseek_v3", 4, tp=4, knobs_tp_overlap=True),
    # Context parallel: every kind, and one a layer.
    "cp all_gather, latents": plan_of("deepseek_v3", 2, ODD, cp=2, knobs_cp_comm="all_gather"),
    "cp a2a, sinks": plan_of("gpt_oss", 2, ODD, cp=2, knobs_cp_comm="a2a"),
    "cp a2a+p2p": plan_of(
        "qwen3_moe", 4, {"num_key_value_heads": 4}, cp=4, ep=2, knobs_cp_comm="a2a+p2p", cluster_domain=2
    ),
    "cp a2a+p2p in one domain": plan_of("qwen3_moe", 2, cp=2, knobs_cp_comm="a2a+p2p"),
    "cp by layer": plan_of("mixtral", 2, cp=2, knobs_cp_comm=["a2a", "p2p"]),
    "cp delta states": plan_of("qwen3_next", 4, cp=2, tp=2, ep=2),
    "cp delta heads": plan_of("qwen3_next", 2, ODD, cp=2, knobs_cp_comm="a2a", job_micro_batch=2),
    "cp mamba states": plan_of("nemotron_h", 4, cp=2, tp=2, ep=2),
    "cp mamba groups": plan_of("nemotron_h", 2, {"num_key_value_heads": 4}, cp=2, knobs_cp_comm="a2a"),
    "tp sparse latents": plan_of("deepseek_v32", 2, tp=2),
    "tp pp, streams": plan_of("deepseek_v4", 4, tp=2, pp=2),
    # Latents that travel in place of keys and values; without a rank of queries their hidden states do.
    "latents p2p": plan_of("deepseek_v3", 2, ODD, cp=2, knobs_cp_exchange="latents", knobs_precision="bf16"),
    "latents all_gather": plan_of(
        "deepseek_v3", 4, cp=4, knobs_cp_exchange="latents", knobs_cp_comm="all_gather", job_micro_batch=2
    ),
    "latents a2a": plan_of(
        "deepseek_v3", 4, {"q_lora_rank": None}, cp=2, tp=2, knobs_cp_exchange="latents", knobs_cp_comm="a2a"
    ),
    "latents a2a+p2p": plan_of(
        "deepseek_v3", 4, MTP, cp=4, knobs_cp_exchange="latents", knobs_cp_comm="a2a+p2p", knobs_cp_inner=2
    ),
    # Experts: folded over all of cp, rows that do not divide, biases on two grids, a capacity.
    "ep over cp": plan_of("deepseek_v3", 4, cp=4, ep=4, job_z_loss=0.001, job_aux_loss=0.0),
    "ep uneven rows": plan_of("gpt_oss", 6, cp=3, ep=3, job_seq_len=30),
    "ep x etp uneven rows": plan_of("gpt_oss", 8, ep=2, etp=2, job_seq_len=7, job_global_batch=8),
    "ep capacity": plan_of("qwen3_moe", 4, tp=2, ep=2, job_capacity_factor=1.0, job_seq_len=32),
    # Pipelines: every schedule, uneven strings, embeddings on two stages.
    "pp vpp": plan_of("qwen3_moe", 4, FOUR, pp=2, vpp=2, ep=2),
    "pp uneven, MTP, tied": plan_of("deepseek_v3", 4, MTP | TIED | FOUR, pp=2, tp=2, stages="Et|tttmmL"),
    "pp MTP apart": plan_of("deepseek_v3", 6, MTP | FOUR, pp=3, cp=2, stages="Ett|ttm|mL"),
    "pp zero-bubble": plan_of("llama", 2, pp=2, schedule="zero-bubble"),
    "pp dualpipev, tied": plan_of(
        "qwen3_moe", 4, TIED | FOUR, pp=2, vpp=2, schedule="dualpipev", ep=2, job_global_batch=8
    ),
    # All together, and sixteen bits.
    "tp x cp x pp folded into ep": plan_of("qwen3_moe", 8, tp=2, cp=2, pp=2, ep=4, job_seq_aux_loss=0.01),
    "tp x dp, etp x ep": plan_of("mixtral", 8, tp=2, ep=2, etp=2, job_micro_batch=2, job_global_batch=8),
    "bf16": plan_of("qwen3_moe", 4, tp=2, ep=2, knobs_precision="bf16"),
    "fp8 rows": plan_of(
        "qwen3_moe", 4, {"hidden_size": 128}, tp=2, ep=2, knobs_precision="fp8-rowwise", knobs_fp8_dispatch=True
    ),
    "bf16 gradients": plan_of("qwen3_next", 4, cp=2, ep=2, knobs_precision="bf16", knobs_grad_dtype="bf16"),
}


def on_rank_each(rank: int, plans: dict[str, Plan]) -> dict[str, Ledger]:
    return {name: on_rank(rank, plan) for name, plan in plans.items()}


@cache
def observations(world: int) -> dict[str, Ledger]:
    """One set of ranks for all plans of a size: starting them takes longer than a step."""
    plans = {name: plan for name, plan in CASES.items() if plan.layout.gpus == world}
    ranks = run_ranks(world, on_rank_each, plans)
    return {name: sum((rank[name] for rank in ranks), Counter()) for name in plans}


def differences(seen: Ledger, wanted: Ledger) -> dict[tuple[str, str, int], tuple[int, int]]:
    assert wanted
    return {key: (seen[key], wanted[key]) for key in seen | wanted if seen[key] != wanted[key]}


SLOW = ("tp latents, MTP",)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES])
def test_what_ranks_send_is_what_the_ledger_says(name: str) -> None:
    plan = CASES[name]
    assert not [finding for finding in check(plan) if finding.severity == "error"]
    assert not differences(observations(plan.layout.gpus)[name], predicted(plan))


def test_small_buckets_and_chunks_of_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that tiny models never reach, lowered alike on both sides."""
    elements, logits = 3000, 100
    monkeypatch.setattr(
        engine, "data_parallel_settings", lambda *a: replace(data_parallel_settings(*a), bucket_elements=elements)
    )
    monkeypatch.setattr(local_parameters, "BUCKET_ELEMENTS", elements)
    monkeypatch.setitem(loss._CHUNK_BYTES, "cpu", logits)
    monkeypatch.setitem(step._LOGITS_BYTES, "cpu", logits)
    plan = plan_of("deepseek_v3", 4, MTP | FOUR, tp=2, ep=2, job_seq_len=300, job_global_batch=2)
    assert len([entry for entry in traffic(plan) if (entry.axis, entry.operation) == ("tp", "all_reduce")]) == 4
    seen: Ledger = sum(run_ranks(4, on_rank, plan), Counter())
    assert not differences(seen, predicted(plan))


def test_the_busiest_rank_returns_more() -> None:
    """16 tokens of 32 numbers, top 3 of 8 experts on two ranks, two layers: half of 48 rows leave, twice that back."""
    plan = plan_of("qwen3_moe", 2, ep=2, job_micro_batch=2, job_global_batch=4, job_seq_len=8)
    sent = {entry.bytes: entry.count for entry in traffic(plan, skew=2.0) if entry.axis == "ep"}
    rows, weights, counts = 24 * 32 * 4, 24 * 4, 4 * 8
    # Forward there and gradients of results there; results back and gradients of rows back.
    assert sent == {rows: 2 * 2, 2 * rows: 2 * 2, weights: 2, 2 * weights: 2, counts: 2}
