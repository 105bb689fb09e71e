"""Memory of CUDA graphs in the estimate of our own engine, against what an H200 held (docs/log/graphs.md)."""

from dataclasses import replace

import pytest
from plans import build

from threefold.cost.memory.by_stack import memory
from threefold.cost.memory.threefold.graphs.pools import largest_pool
from threefold.plan.plan import Plan
from threefold.units import GIB

THREE = ("attn", "moe_router", "moe_preprocess")
# The step of benchmarks/graphs.py.
MEASURED = {
    "model": "qwen3-30b-a3b",
    "target": "threefold",
    "cluster.chip": "h200",
    "cluster.gpus": 1,
    "model.num_layers": 8,
    "job.seq_len": 4096,
    "job.global_batch": 1,
    "job.aux_loss": 0.0,
    "knobs.precision": "bf16",
    "knobs.optimizer_dtype": "bf16",
    "knobs.grad_dtype": "bf16",
    "knobs.master_weights": False,
    "knobs.expert_fusion": True,
}


def graphed(plan: Plan, *scopes: str, budget: float | None = None) -> Plan:
    return replace(plan, knobs=replace(plan.knobs, graphs=scopes, graph_memory_gb=budget))


@pytest.mark.parametrize(("scopes", "held_gib"), [(THREE, 1.9), (("attn", "moe"), 11.8), (("full_iteration",), 12.9)])
def test_graphs_hold_what_a_gpu_held(scopes: tuple[str, ...], held_gib: float) -> None:
    plan = graphed(build(MEASURED), *scopes)
    assert largest_pool(plan) / GIB == pytest.approx(held_gib, rel=0.03)  # runs differ by as much: 1.84 to 1.95
    assert memory(plan).stages[0].terms["graphs"] == pytest.approx(largest_pool(plan))


def test_activations_in_graphs_count_once() -> None:
    eager = memory(build({**MEASURED, "job.global_batch": 4})).stages[0].terms
    terms = memory(graphed(build({**MEASURED, "job.global_batch": 4}), *THREE)).stages[0].terms
    assert eager["attention"] > 0.5 * GIB
    assert terms["attention"] < 0.01 * eager["attention"]  # rotary tables
    assert terms["graphs"] > eager["attention"]


def test_gradients_of_the_only_microbatch_of_one_rank_lie_in_its_graph() -> None:
    plan = build(MEASURED)
    assert memory(graphed(plan, "full_iteration")).stages[0].terms["gradients"] == 0.0
    several = build({**MEASURED, "cluster.gpus": 2, "job.global_batch": 2, "knobs.grad_dtype": "fp32"})
    both = [memory(one).stages[0].terms["gradients"] for one in (several, graphed(several, "full_iteration"))]
    assert both[0] == both[1] > 0.0


def test_every_microbatch_in_flight_has_graphs_and_the_budget_bounds_them() -> None:
    fields = {**MEASURED, "cluster.gpus": 4, "layout.pp": 4, "job.global_batch": 16, "model.num_layers": 16}
    plan = build({**fields, "knobs.grad_dtype": "fp32"})
    one, bounded = graphed(plan, *THREE), graphed(plan, *THREE, budget=1.5)
    held, of_bounded = (memory(each).stages[0].terms["graphs"] for each in (one, bounded))
    # Four microbatches are in flight on the first of four stages and one on the last, with four layers each.
    assert held == pytest.approx(4 * memory(one).stages[3].terms["graphs"]) == largest_pool(one)
    assert of_bounded == pytest.approx(held / 4)  # two would hold more than the budget
    assert held / 4 < 1.5 * GIB < held / 2
    assert memory(graphed(plan)).stages[0].terms["graphs"] == 0.0
    some_left = memory(bounded).stages[0].terms["attention"] / memory(graphed(plan)).stages[0].terms["attention"]
    assert some_left == pytest.approx(3 / 4, rel=0.01)  # rotary tables are outside too
