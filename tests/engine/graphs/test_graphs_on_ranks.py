"""CUDA graph scopes beside tensor and context parallelism, pipelines, EP overlap and delayed weight gradients.

Ranks on gloo with a stand-in for the recorder give the gradients of one eager rank. Every rank must have replayed what
the plan asks for, and nothing may have run eagerly instead.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle_layouts import FOUR, MTP1, NO_OVERLAP, TIED, Case, case
from test_graphs import batches, graphed_on_ranks, pair

from threefold.engine.autograd.delayed_wgrad import WgradQueue
from threefold.engine.autograd.linear import use_main_grad_linears
from threefold.engine.dispatch.static_blocks import StaticRows
from threefold.engine.schedule import microbatch_runners as runners
from threefold.engine.verify import oracle
from threefold.plan.plan import Plan

EVERY = ("attn", "moe_router", "moe_preprocess")
FULL = ("full_iteration",)
OVERLAP, DELAY = {"ep_overlap": True}, {"ep_overlap": True, "delay_wgrad": True}
EIGHT = {"global_batch": 8}  # enough microbatches for pairs of recorded ones


def with_graphs(layout: Case, scopes: tuple[str, ...] = EVERY) -> Plan:
    return replace(layout.plan, knobs=replace(layout.plan.knobs, graphs=scopes))


@pytest.fixture(autouse=True)
def _tallied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks record with the stand-in, and fail at their end unless they have replayed every scope."""
    monkeypatch.setattr(runners, "make_model_graphs", graphed_on_ranks)
    inner = oracle._record_weights_and_states

    def check_tally(parts: Any, results: Any) -> None:
        graph_stats = parts.runner.graph_stats
        if dist.get_world_size() > 1 and parts.chunks:
            asked = {scope for model in parts.chunks.values() for scope in model.options.graphs}
            assert set(graph_stats.replays) == asked
            assert not graph_stats.fallbacks, graph_stats.summary()
        inner(parts, results)

    monkeypatch.setattr(oracle, "_record_weights_and_states", check_tally)


def compare(plan: Plan) -> None:
    torch.set_num_threads(1)
    found = oracle.compare_with_one_rank(plan)
    assert found.problems == ()
    assert found.largest <= 1e-10, found  # fp64, as in the oracle


def slow(layout: Case) -> Any:
    return pytest.param(layout, marks=pytest.mark.slow)


LAYOUTS = [
    case("tp cp", "qwen3_moe", 4, tp=2, cp=2, ep=2),
    slow(case("tp overlap", "gpt_oss", 2, tp=2, knobs={"tp_overlap": True})),
    slow(case("tp with latents", "deepseek_v3", 2, tp=2, spec=MTP1)),
    slow(case("tp by the delta rule", "qwen3_next", 2, tp=2)),
    slow(case("cp p2p", "gpt_oss", 4, cp=4)),
    slow(case("cp all-gather", "deepseek_v3", 2, cp=2, knobs={"cp_comm": "all_gather"})),
    slow(case("cp a2a", "gpt_oss", 2, cp=2, knobs={"cp_comm": "a2a"})),
    case("cp latents", "deepseek_v3", 2, cp=2, knobs={"cp_exchange": "latents"}),
    slow(case("cp passes states", "qwen3_next", 2, cp=2)),
    slow(case("etp", "mixtral", 2, etp=2)),
    slow(case("recompute", "deepseek_v3", 2, tp=2, knobs={"recompute": ("layernorm", "mla_up_proj", "core_attn")})),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda one: one.name)
def test_collectives_are_replayed(layout: Case) -> None:
    compare(with_graphs(layout))


SCHEDULES = [
    slow(case("overlap", "deepseek_v3", 2, ep=2, knobs=OVERLAP, job=EIGHT)),
    case("overlap, delayed", "deepseek_v3", 2, ep=2, knobs=DELAY, job=EIGHT),
    slow(case("overlap, delayed, tp", "qwen3_moe", 4, ep=2, tp=2, knobs=DELAY, job=EIGHT)),
    slow(case("overlap, delayed, late weights", "qwen3_moe", 2, ep=2, knobs={**DELAY, **NO_OVERLAP}, job=EIGHT)),
    case("zero-bubble", "qwen3_moe", 2, pp=2, schedule="zero-bubble", job=EIGHT, spec=TIED),
    slow(case("zero-bubble, chunks", "deepseek_v3", 2, pp=2, vpp=2, schedule="zero-bubble", job=EIGHT, spec=FOUR)),
    slow(case("dualpipev", "qwen3_moe", 2, pp=2, vpp=2, schedule="dualpipev", job=EIGHT, spec=FOUR)),
    slow(case("overlap, chunks", "qwen3_moe", 4, pp=2, vpp=2, ep=2, knobs=DELAY, job=EIGHT, spec=FOUR)),
]


@pytest.mark.parametrize("layout", SCHEDULES, ids=lambda one: one.name)
def test_delayed_weight_gradients_are_replayed(layout: Case) -> None:
    compare(with_graphs(layout))


WHOLE = [
    slow(case("dp", "deepseek_v3", 2)),
    case("tp cp", "qwen3_moe", 4, tp=2, cp=2),
    slow(case("dp without overlap", "qwen3_next", 2, knobs=NO_OVERLAP)),
]


@pytest.mark.parametrize("layout", WHOLE, ids=lambda one: one.name)
def test_a_whole_microbatch_is_replayed_on_several_ranks(layout: Case) -> None:
    compare(with_graphs(layout, FULL))


def blocks(name: str, family: str, ranks: int, factor: float, **more: Any) -> Case:
    job = {"capacity_factor": factor, "capacity_scope": "rank"} | more.pop("job", {})
    return case(name, family, ranks, job=job, **more)


DROPLESS = [
    blocks("ep", "qwen3_moe", 2, 2.0, ep=2),
    slow(blocks("ep tp cp", "deepseek_v3", 4, 4.0, ep=4, tp=2, cp=2, spec=MTP1)),
    slow(blocks("ep with etp and biases", "gpt_oss", 4, 2.0, ep=2, etp=2)),
    slow(blocks("ep edp, recompute", "qwen3_moe", 4, 2.0, ep=2, knobs={"recompute": ("moe", "layernorm")})),
]


@pytest.mark.parametrize("layout", DROPLESS, ids=lambda one: one.name)
def test_a_whole_microbatch_with_ep_is_replayed_and_drops_nothing(layout: Case) -> None:
    compare(with_graphs(layout, FULL))


def test_rows_without_room_are_run_again_without_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capacity that half of the microbatches exceed: replays and fallbacks, and the gradients of one rank."""

    def count(parts: Any, results: Any) -> None:
        if dist.get_world_size() > 1:
            stats = parts.runner.graph_stats
            assert stats.replays["full_iteration"], stats.summary()
            assert stats.fallbacks, stats.summary()
        inner(parts, results)

    monkeypatch.undo()
    monkeypatch.setattr(runners, "make_model_graphs", graphed_on_ranks)
    inner = oracle._record_weights_and_states
    monkeypatch.setattr(oracle, "_record_weights_and_states", count)
    compare(with_graphs(blocks("ep", "qwen3_moe", 2, 1.05, ep=2, job={"global_batch": 16}), FULL))


@pytest.mark.slow
def test_rows_without_room_that_are_not_counted_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutation: without the count the replay with dropped rows stands, and its gradients are not one rank's."""
    place = StaticRows.place

    def uncounted(self: StaticRows, *args: Any) -> Any:
        placed = place(self, *args)
        self.overflow.zero_()
        return placed

    monkeypatch.setattr(StaticRows, "place", uncounted)
    plan = with_graphs(blocks("ep", "qwen3_moe", 2, 1.05, ep=2, job={"global_batch": 16}), FULL)
    assert oracle.compare_with_one_rank(plan).largest > 1e-6


def test_weight_gradients_wait_for_the_schedule() -> None:
    """The queue of a schedule holds one entry for each weight, and computes nothing before it is finished."""
    plain, graphed = pair("qwen3_moe", ("attn",))
    for run in (graphed, plain):
        use_main_grad_linears(run.model)
    for seed in range(3):
        found = []
        for run in (graphed, plain):
            run.model.zero_grad(set_to_none=True)
            queue = WgradQueue()
            (batch,) = batches(run.model, 1, seed)
            with queue:
                with run.model_graphs.microbatch():
                    loss = run.model(batch.tokens_BS, batch.labels_BS).loss
                loss.backward()
            weights = [block.mixer.out.weight for block in run.model.blocks()]
            assert all(weight.grad is None for weight in weights)
            queue.finish()
            found.append({name: p.grad.clone() for name, p in run.model.named_parameters()})
        assert found[0].keys() == found[1].keys()
        for name, value in found[1].items():
            assert torch.equal(found[0][name], value), name
    graph_stats = graphed.model_graphs.graph_stats
    assert graph_stats is not None
    assert graph_stats.replays["attn"] == 2
