"""Copies of hot experts on other ranks change only where rows are computed: the oracle holds for every load.

On both of its sides the router is as uneven as `job.load` says.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle_layouts import COPIES, FOUR, MTP1, Case, case

from threefold.engine.build import options_of
from threefold.engine.verify.forked_ranks import run_ranks
from threefold.engine.verify.oracle import compare_with_one_rank, run_rank
from threefold.plan.load import WORKLOADS
from threefold.plan.plan import Plan
from threefold.rules.all import check, errors
from threefold.rules.stacks import ENGINE_LIMITS

FP64 = 1e-10  # as in test_oracle.py


def copied(name: str, family: str, gpus: int, load: str = "zipf", often: bool = False, **more: Any) -> Case:
    knobs, job = {**COPIES, **more.pop("knobs", {})}, {"load": load, **more.pop("job", {})}
    return case(name, family, gpus, often, knobs=knobs, job=job, **more)


CASES = [
    *(copied(f"load {load}", "qwen3_moe", 2, load, load in ("burst", "ragged-sources"), ep=2) for load in WORKLOADS),
    copied("ep of four", "qwen3_moe", 4, "ragged-sources", ep=4, knobs={"expert_copies": 2}),
    copied("edp", "qwen3_moe", 4, "hot-rank", True, ep=2),
    copied("etp with biases", "gpt_oss", 4, "hot-rank", True, ep=2, etp=2),
    copied("fsdp", "qwen3_moe", 4, ep=2, knobs={"data_parallel": "fsdp"}),
    copied("hsdp", "qwen3_moe", 8, ep=2, replicate=2, knobs={"data_parallel": "hsdp"}, job={"global_batch": 8}),
    copied(
        "overlap, delayed wgrad", "deepseek_v3", 2, ep=2, often=True, knobs={"ep_overlap": True, "delay_wgrad": True}
    ),
    copied("pipeline", "qwen3_moe", 4, pp=2, ep=2, job={"global_batch": 8}),
    copied("vpp and mtp", "deepseek_v3", 4, pp=2, vpp=2, ep=2, spec={**MTP1, **FOUR}),
    copied("full recompute", "qwen3_moe", 2, ep=2, knobs={"recompute": ["full"]}),
    copied("recompute by name", "deepseek_v3", 2, ep=2, knobs={"recompute": ["moe_act", "layernorm"]}),
    copied("recompute of moe", "deepseek_v3", 2, ep=2, knobs={"recompute": ["moe"]}),
    copied("offload", "qwen3_moe", 2, ep=2, knobs={"activation_offload": ["expert_fc1", "moe_act"]}),
    copied("fused experts", "qwen3_moe", 2, ep=2, knobs={"expert_fusion": True}),
    copied("capacity", "qwen3_moe", 2, ep=2, job={"capacity_factor": 1.5}),
    copied("states on the host", "qwen3_moe", 4, ep=2, knobs={"optimizer_offload": 1.0}),
    copied("adapters", "qwen3_moe", 2, ep=2, job={"lora_rank": 4}),
    copied("muon", "qwen3_moe", 4, ep=2, job={"optimizer": "muon"}),
    copied("every second step", "qwen3_moe", 4, "drift", ep=2, knobs={"expert_balance_every": 2}),
]


@pytest.mark.parametrize(
    "one", [pytest.param(one, id=one.name, marks=() if one.often else pytest.mark.slow) for one in CASES]
)
def test_copies_of_experts_are_one_rank(one: Case) -> None:
    torch.set_num_threads(1)
    plan = one.plan
    assert [f for f in errors(check(plan)) if f.rule not in ENGINE_LIMITS] == []
    found = compare_with_one_rank(plan)
    assert found.problems == ()
    assert found.near_ties == 0
    assert found.largest <= FP64, found


def test_copies_are_used() -> None:
    """Without this the comparison would hold of a step that copies nothing."""
    [one] = [one for one in CASES if one.name == "load hot-rank"]

    def num_calls(plan: Plan) -> list[int]:
        options = replace(options_of(plan), expert_backend="loop")
        ranks = run_ranks(2, run_rank, plan, 3, torch.float64, options)
        return [rank.calls["ep", "all_to_all"] for rank in ranks]

    plain = replace(one.plan, knobs=replace(one.plan.knobs, expert_balance="none"))
    # In each of three steps two weights of two layers go out, and their gradients come back.
    assert [a - b for a, b in zip(num_calls(one.plan), num_calls(plain), strict=True)] == [3 * 2 * 2 * 2] * 2
