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
    plan = build(MEASURED)
    assert largest_pool(graphed(plan, *scopes)) / GIB == pytest.approx(held_gib, rel=0.1)  # the pools are whole blocks
    eager, with_graphs = (memory(one).peak_bytes for one in (plan, graphed(plan, *scopes)))
    assert 0 <= with_graphs - eager < 1.2 * GIB  # at most that was added to a peak of 42 GiB


def test_every_microbatch_in_flight_has_graphs_and_the_budget_bounds_them() -> None:
    fields = {**MEASURED, "cluster.gpus": 4, "layout.pp": 4, "job.global_batch": 16, "model.num_layers": 16}
    plan = build({**fields, "knobs.grad_dtype": "fp32"})
    one, bounded = graphed(plan, *THREE), graphed(plan, *THREE, budget=1.0)
    added, of_bounded = (memory(each).stages[0].terms["graphs"] for each in (one, bounded))
    # Four microbatches are in flight on the first of four stages, with four layers each.
    copies = 4 * 4 * 3 * 2 * plan.model.dim * plan.job.seq_len
    assert added == pytest.approx(copies)
    assert of_bounded == pytest.approx(copies * GIB / largest_pool(one))
    assert memory(graphed(plan)).stages[0].terms["graphs"] == 0.0
