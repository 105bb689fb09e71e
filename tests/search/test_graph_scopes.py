"""`plan` starts eager; where graphs were measured, it chooses scopes where the host is the bottleneck."""

from typing import Any

import pytest

from threefold.cost.estimate import estimate
from threefold.findings import Finding
from threefold.plan.parse import change
from threefold.plan.plan import Plan
from threefold.rules.all import check, errors, promoted
from threefold.search.neighbors import comparisons
from threefold.search.search import search
from threefold.spec.candidates import GRAPH_CANDIDATES

THREE = ("attn", "moe_router", "moe_preprocess")
MEASURED = {"stack.measured": ["graphs"]}  # without it a plan starts eager
DRAFT = {
    "model": "qwen3-30b-a3b", "target": "threefold", "cluster.chip": "h200", "cluster.gpus": 8, "layout.tp": 1,
    "layout.cp": 1, "layout.pp": 1, "layout.ep": 8, "job.micro_batch": 1, "job.global_batch": 256,
    "knobs.precision": "bf16",
}  # fmt: skip
SHORT = {**DRAFT, "job.seq_len": 1024, "knobs.data_parallel": "zero1"}
LONG = {**DRAFT, "job.seq_len": 16384, "model.num_layers": 24, "knobs.data_parallel": "zero1"}


def best(draft: dict[str, Any]) -> Plan:
    return search(draft, top=1).candidates[0].plan


def about_graphs(plan: Plan) -> list[Finding]:
    """Findings that some change of the scopes would cure."""
    return [one for one in check(plan) if any("knobs.graphs" in fix for fix in (one.fix or {}, *one.fixes))]


def test_a_plan_starts_eager_and_names_the_next_comparison() -> None:
    """Capture is no gain by itself: routing is compared with an eager run, and attention with routing alone."""
    found = search(SHORT, top=1)
    assert found.candidates[0].plan.knobs.graphs == ()
    (graphs,) = [one for one in found.comparisons if "knobs.graphs" in one.trial.changes]
    assert tuple(graphs.trial.changes["knobs.graphs"]) == THREE[1:]
    assert graphs.trial.effect
    assert graphs.trial.effect > 0
    assert graphs.trial.band
    assert graphs.candidate == GRAPH_CANDIDATES[1]
    routed = change(found.candidates[0].plan, {"knobs.graphs": list(THREE[1:])})
    (wider,) = [one for one in comparisons(routed, estimate(routed)) if "knobs.graphs" in one.trial.changes]
    assert (tuple(wider.trial.changes["knobs.graphs"]), wider.candidate) == (THREE, GRAPH_CANDIDATES[2])


def test_a_plan_that_waits_for_its_host_gets_scopes() -> None:
    plan = best({**SHORT, **MEASURED})
    assert plan.knobs.graphs == THREE
    eager = change(plan, {"knobs.graphs": []})
    assert estimate(eager).time_wall == "host"
    assert [one.rule for one in about_graphs(eager)] == ["host-wall"]
    assert change(eager, about_graphs(eager)[0].fix or {}).knobs.graphs == THREE  # routing alone leaves the wall
    assert about_graphs(plan) == []
    assert not errors(promoted(check(plan)))
    assert estimate(plan).time.step_seconds < estimate(eager).time.step_seconds
    assert estimate(plan).memory.stages[0].terms["graphs"] > 0


def test_a_plan_that_computes_gets_none() -> None:
    plan = best({**LONG, **MEASURED})
    assert plan.knobs.graphs == ()
    assert estimate(plan).time_wall == "compute"
    assert about_graphs(plan) == []


@pytest.mark.parametrize(
    ("fields", "scopes"),
    [
        ({"knobs.data_parallel": "fsdp"}, ()),  # weights move
        ({"knobs.dispatcher": "deepep"}, THREE[:2]),  # it sorts by itself
    ],
    ids=str,
)
def test_only_scopes_that_the_engine_records_are_chosen(fields: dict[str, Any], scopes: tuple[str, ...]) -> None:
    plan = best({**SHORT, **MEASURED, **fields})
    assert plan.knobs.graphs == scopes
    assert not errors(promoted(check(plan)))


ONE = {
    "model": "qwen3-30b-a3b", "model.num_layers": 8, "target": "threefold", "cluster.chip": "h200", "cluster.gpus": 1,
    "job.seq_len": 4096, "job.micro_batch": 1, "job.global_batch": 1, "knobs.precision": "bf16",
    "knobs.master_weights": False, "knobs.optimizer_dtype": "bf16", "knobs.grad_dtype": "bf16",
}  # fmt: skip


def test_one_gpu_records_the_whole_microbatch_where_that_saves_more() -> None:
    found = search({**ONE, **MEASURED}, top=1).candidates[0]
    plan, eager = found.plan, change(found.plan, {"knobs.graphs": []})
    assert plan.knobs.graphs == ("full_iteration",)
    assert plan.knobs.expert_fusion
    assert about_graphs(plan) == []
    assert not errors(promoted(check(plan)))
    # Measured with bf16 states: 61.9 ms, and 62.5 ms both eagerly and with three scopes (docs/log/graphs.md).
    three = estimate(change(plan, {"knobs.graphs": list(THREE)}))
    assert estimate(plan).time.step_seconds < min(three.time.step_seconds, estimate(eager).time.step_seconds)
    gain = estimate(eager).time.step_seconds / estimate(plan).time.step_seconds
    assert gain == pytest.approx(62.5 / 61.9, abs=0.01)
    (said,) = [one for one in found.reasons.profile if "CUDA graph" in one]
    assert "waits for the host" in said
    assert "it holds" in said


@pytest.mark.parametrize(
    "fields",
    [
        {"knobs.optimizer_offload": 1.0},  # states move while the graph would replay
        {"job.packing": True},
        {"job.seq_len": 262144},  # gaps between kernels are nothing beside them
    ],
    ids=str,
)
def test_one_gpu_runs_eagerly_or_with_scopes_elsewhere(fields: dict[str, Any]) -> None:
    plan = best({**ONE, **MEASURED, **fields})
    assert "full_iteration" not in plan.knobs.graphs
    assert not errors(promoted(check(plan)))
