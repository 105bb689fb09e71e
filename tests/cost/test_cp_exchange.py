"""Which exchange a plan that leaves `knobs.cp_exchange` open gets, and what the estimate says of both."""

from typing import Any

import plans
import pytest
from repository import ROOT

from threefold.cost.cp_exchange import resolve_exchange
from threefold.cost.estimate import estimate
from threefold.cost.traffic.by_stack import traffic
from threefold.plan.file import read_plan
from threefold.plan.parse import change
from threefold.plan.plan import Plan
from threefold.rules.all import judge

RECIPE = "deepseek-v3-128k-256xh100-fp8.toml"


def recipe(**knobs: Any) -> Plan:
    words = [f"knobs.{name}={value}" for name, value in knobs.items()]
    plan = read_plan(str(ROOT / "recipes" / RECIPE), ['target="threefold"', *words]).plan
    assert plan is not None
    return plan


def sent_bytes(plan: Plan, *links: str) -> float:
    calls = [entry for entry in traffic(plan) if entry.axis.startswith("cp ") and entry.link in links]
    return sum(entry.bytes * entry.count for entry in calls)


def test_latents_send_less_and_take_no_longer() -> None:
    latents, expanded = recipe(cp_exchange="latents"), recipe(cp_exchange="expanded")
    assert sent_bytes(expanded, "network") >= 50 * sent_bytes(latents, "network")
    assert sent_bytes(expanded, "network", "domain") >= 3 * sent_bytes(latents, "network", "domain")
    assert estimate(latents).time.step_seconds <= 1.03 * estimate(expanded).time.step_seconds
    assert estimate(latents).fits


def test_an_open_choice_is_written_down() -> None:
    chosen = resolve_exchange(recipe())
    assert dict(chosen.written)["knobs.cp_exchange"] == "latents"
    assert resolve_exchange(chosen) == chosen


def ring_in_a_rack(**knobs: Any) -> Plan:
    fields = {"cluster.chip": "gb200", "knobs.precision": "mxfp8", "knobs.dispatcher": "hybridep"}
    return change(recipe(cp_comm="p2p", **knobs), fields)


def test_a_ring_over_nvlink_exchanges_heads_where_they_fit() -> None:
    """Every rank expands every latent: NVLink carries the heads sooner."""
    assert resolve_exchange(ring_in_a_rack()).knobs.cp_exchange == "expanded"


def test_heads_that_do_not_fit_lose_against_latents_that_do() -> None:
    plan = change(ring_in_a_rack(), {"job.seq_len": 393_216, "knobs.recompute": ["layernorm", "moe", "mlp"]})
    assert not estimate(change(plan, {"knobs.cp_exchange": "expanded"})).fits
    assert resolve_exchange(plan).knobs.cp_exchange == "latents"


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "qwen3-30b-a3b", "layout.cp": 8},
        {"model": "deepseek-v3", "layout.cp": 1},
        {"model": "deepseek-v3", "layout.cp": 8, "target": "megatron-bridge"},
    ],
    ids=str,
)
def test_plans_without_a_choice_stay_as_they_are(fields: dict[str, Any]) -> None:
    plan = plans.build({"target": "threefold", "cluster.chip": "h100", "cluster.gpus": 64, **fields})
    assert resolve_exchange(plan) == plan


OPEN: dict[str, Any] = {
    "model": "tiny-deepseek-v3",
    "target": "threefold",
    "cluster.chip": "cpu",
    "cluster.gpus": 8,
    "job.seq_len": 64,
    "job.global_batch": 16,
    "job.mtp": 0,
    "layout.cp": 2,
    "knobs.precision": "fp32",
}


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"layout.pp": 4, "layout.vpp": 3}, "chunks-hold-layers"),
        ({"layout.pp": 4, "layout.stages": "Ettttt|L"}, "stages-match-model"),
        ({"layout.pp": 2, "layout.vpp": 3, "layout.schedule": "dualpipev"}, "schedule-fits-chunks"),
        ({"layout.vpp": 2}, "vpp-needs-pp"),
        ({"layout.vpp": 4, "layout.ep": 4, "knobs.ep_overlap": True}, "vpp-needs-pp"),
    ],
)
def test_a_plan_whose_chunks_are_wrong_is_left_to_the_rules(changes: dict[str, Any], rule: str) -> None:
    plan = resolve_exchange(plans.build({**OPEN, **changes}))
    assert plan.knobs.cp_exchange is not None
    assert rule in {finding.rule for finding in judge(plan)}
