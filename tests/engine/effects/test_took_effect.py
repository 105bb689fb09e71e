"""Which settings took effect: for each of them a step where it does and one where it does not."""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_deepep
import pytest
import torch
from fake_cuda_graphs import StandIn
from observed_steps import effect_of, observe, run_observed
from tiny_runs import DEEPSEEK, tiny_plan, tiny_shard

from threefold.engine.autograd.delayed_wgrad import WgradQueue
from threefold.engine.build import Parts, options_of
from threefold.engine.context import context
from threefold.engine.data_parallel.buckets import Bucket
from threefold.engine.dispatch.async_exchange import AsyncExchange
from threefold.engine.effects.effect import StepEvidence, judge_effects
from threefold.engine.effects.recorder import RankEvidence, RunReport
from threefold.engine.graphs.graphed_part import ChunkGraphs
from threefold.engine.graphs.scopes import ModelGraphs
from threefold.engine.layers.norm import RMSNorm
from threefold.engine.run.folder import EFFECTS
from threefold.engine.schedule.microbatch_runners import Sequential
from threefold.engine.train import train
from threefold.engine.verify.forked_ranks import run_ranks
from threefold.plan.plan import Plan

EP = {"cluster.gpus": 2, "layout.ep": 2}
DP = {"cluster.gpus": 2}
TP = {"cluster.gpus": 2, "layout.tp": 2}
BF16, FP8 = {"knobs.precision": "bf16"}, {"knobs.precision": "fp8-blockwise"}
FSDP = {"knobs.data_parallel": "fsdp"}
ONE_MICROBATCH = {"job.global_batch": 4, "job.micro_batch": 2}  # on each of two ranks
FOUR_MICROBATCHES = {"job.global_batch": 8, "job.micro_batch": 1}
DELAY = {"knobs.delay_wgrad": True}
OVERLAP = {**EP, **FOUR_MICROBATCHES, "knobs.ep_overlap": True}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# The knob, fields with which it takes effect, fields with which it does not, and a word of the reason.
CASES: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("dispatcher", EP, {}, "every rank holds all experts"),
    ("ep_overlap", OVERLAP, {**OVERLAP, **ONE_MICROBATCH}, "a step has one microbatch"),
    ("delay_wgrad", OVERLAP | DELAY, EP | DELAY, "without knobs.ep_overlap"),
    ("expert_fusion", {"knobs.expert_fusion": True}, {"knobs.expert_fusion": True, **FP8}, "no fused kernels"),
    ("grad_accum_fusion", BF16, {}, "summed in the weights' dtype"),
    (
        "shared_expert_overlap",
        {**DEEPSEEK, **EP, "knobs.shared_expert_overlap": True},
        {**DEEPSEEK, "knobs.shared_expert_overlap": True},
        "no rows are exchanged",
    ),
    ("grad_reduce_overlap", DP, {}, "no other rank holds the same weights"),
    ("param_gather_overlap", DP, {}, "no other rank holds the same weights"),
    ("tp_overlap", TP | {"knobs.tp_overlap": True}, {"knobs.tp_overlap": True}, "layout.tp is 1"),
    (
        "recompute.mla_up_proj",
        {**DEEPSEEK, "knobs.recompute": ["mla_up_proj"]},
        {"knobs.recompute": ["mla_up_proj"]},
        "no layer of the model runs it",
    ),
    (
        "recompute.moe_act",
        {"knobs.recompute": ["moe_act"]},
        {"knobs.recompute": ["moe_act"], "knobs.expert_fusion": True},
        "no layer of the model runs it",
    ),
    (
        "recompute_save.core_attn",
        {"knobs.recompute": ["full"], "knobs.recompute_save": ["core_attn"]},
        {"knobs.recompute_save": ["core_attn"]},
        "took 0 outputs",
    ),
    (
        "activation_offload.moe_act",
        {"knobs.activation_offload": ["moe_act"]},
        {"knobs.activation_offload": ["moe_act"], "knobs.expert_fusion": True},
        "nothing of it is saved",
    ),
]


@pytest.mark.parametrize(("knob", "fields", "without", "why"), CASES, ids=[case[0] for case in CASES])
def test_a_setting_took_effect_or_the_reason_is_said(
    knob: str, fields: dict[str, Any], without: dict[str, Any], why: str
) -> None:
    assert effect_of(observe(fields), knob).took_effect is True
    missed = effect_of(observe(without), knob)
    assert missed.took_effect is False
    assert why in missed.evidence
    assert str(missed).startswith(f"knobs.{knob} = {missed.asked} had no effect")


def test_a_step_without_overlap_counts_exchanges_that_nothing_ran_beside() -> None:
    """Two exchanges a layer in each direction, one layer, two microbatches on each of two ranks."""
    plain = observe(EP | FOUR_MICROBATCHES | {"knobs.ep_overlap": False})
    (one, other) = plain.ranks
    # dispatch and combine, forward and backward; four microbatches of eight sequences on two ranks
    assert one.counts["exchange of rows", "alone"] == other.counts["exchange of rows", "alone"] == 4 * 4
    assert not one.counts["exchange of rows", "overlapped"]


def test_only_the_first_forward_and_the_last_backward_run_alone() -> None:
    overlapped = effect_of(observe(OVERLAP), "ep_overlap")
    # Each of the 2 ranks has 4 microbatches with 4 exchanges: 32. Nothing runs beside the 2 exchanges of the first
    # forward and the 2 of the last backward, on either rank: 8.
    assert overlapped.ran == "24 of 32 overlapped"


def test_gradient_reductions_wait_where_the_plan_says_so() -> None:
    for knob in ("grad_reduce_overlap", "param_gather_overlap"):
        report = observe(DP | {f"knobs.{knob}": False})
        assert not [effect for effect in report.effects if effect.knob == knob]
        counts = report.ranks[0].counts
        kind, late = {
            "grad_reduce_overlap": ("gradient reduction", "after it"),
            "param_gather_overlap": ("parameter gather", "awaited"),
        }[knob]
        assert {detail for of, detail in counts if of == kind} == {late}


def test_what_fsdp_does_is_not_known() -> None:
    effect = effect_of(observe(DP | FSDP), "grad_reduce_overlap")
    assert effect.took_effect is None


def with_package(rank: int, plan: Plan) -> RankEvidence:
    sys.modules["deep_ep"] = fake_deepep.package(fake_deepep.ElasticBuffer)
    return run_observed(rank, plan)


def test_deepep_took_effect_where_its_buffers_were_called() -> None:
    plan = tiny_plan({**EP, **BF16, "cluster.chip": "h100", "knobs.dispatcher": "deepep"})
    effect = effect_of(RunReport(plan, run_ranks(2, with_package, plan)), "dispatcher")
    assert effect.took_effect is True
    # Dispatch, combine and the gradients of both, of one layer, one microbatch on each of two ranks.
    assert effect.evidence == "DeepEpDispatcher 2 dispatches; 8 exchanges"


def on_stand_in_graphs(parts: Parts) -> Parts:
    return replace(parts, runner=Sequential(parts.model, ModelGraphs(parts.model, ChunkGraphs(StandIn))))


def test_graphs_took_effect_where_they_were_replayed() -> None:
    fields = {"knobs.graphs": ["attn", "moe_router"]}
    replayed = observe(fields, on_stand_in_graphs, steps_before=2)
    for scope in ("attn", "moe_router"):
        effect = effect_of(replayed, f"graphs.{scope}")
        assert effect.took_effect is True
        assert effect.evidence == "2 replays, 0 eager runs"  # one layer, two microbatches
    warming = effect_of(observe(fields, on_stand_in_graphs), "graphs.moe_router")
    assert (warming.took_effect, warming.ran) == (False, "eager")
    assert "there is no GPU" in effect_of(observe(fields), "graphs.attn").evidence


@pytest.mark.parametrize(("fused", "took", "ran"), [(False, True, "replayed"), (True, None, "nothing to record")])
def test_rows_are_sorted_in_a_graph_or_by_fused_experts(fused: bool, took: bool | None, ran: str) -> None:
    fields = {"knobs.graphs": ["moe_router", "moe_preprocess"], "knobs.expert_fusion": fused}
    report = observe(fields, on_stand_in_graphs, steps_before=2)
    effect = effect_of(report, "graphs.moe_preprocess")
    assert (effect.took_effect, effect.ran) == (took, ran)
    (of_rank,) = report.as_json()["graphs"]
    assert of_rank["replays"] == {"moe_router": 4} | ({} if fused else {"moe_preprocess": 4})


def graphs_on_the_first_rank_only(parts: Parts) -> Parts:
    graphs = ChunkGraphs(StandIn, warmup=2 if parts.mesh.rank == 0 else 99)
    return replace(parts, runner=Sequential(parts.model, ModelGraphs(parts.model, graphs, reduces_grads=True)))


def observed_third_step(rank: int, plan: Plan) -> RankEvidence:
    return run_observed(rank, plan, graphs_on_the_first_rank_only, steps_before=2)


def test_a_rank_that_did_not_replay_is_named() -> None:
    plan = tiny_plan({**DP, "knobs.graphs": ["attn"], "job.global_batch": 8})
    report = RunReport(plan, run_ranks(2, observed_third_step, plan))
    effect = effect_of(report, "graphs.attn")
    assert (effect.took_effect, effect.ran) == (True, "replayed on some ranks")
    assert effect.evidence.endswith("no replay on rank 1")
    assert [(one["rank"], sum(one["replays"].values()) > 0) for one in report.as_json()["graphs"]] == [
        (0, True),
        (1, False),
    ]
    said: list[str] = []
    report.say(said.append)
    assert any("graphs.attn was not replayed everywhere in step 3" in line for line in said)


def test_a_fallback_of_a_graph_has_its_reason() -> None:
    def change_a_weight(parts: Parts) -> Parts:
        parts = on_stand_in_graphs(parts)
        inner = parts.optimizer.step

        def step(*args: Any) -> None:
            inner(*args)
            for p in parts.model.parameters():
                p.data = p.data.clone()  # at another address

        parts.optimizer.step = step  # type: ignore[method-assign]
        return parts

    effect = effect_of(observe({"knobs.graphs": ["moe_router"]}, change_a_weight, steps_before=2), "graphs.moe_router")
    assert effect.took_effect is False
    assert "a parameter moved 2" in effect.evidence


def test_compile_took_effect_where_compiled_modules_ran() -> None:
    compilations = []

    def backend(graph: Any, inputs: Any) -> Any:
        compilations.append(graph)
        return graph

    def compiled(parts: Parts) -> Parts:
        next(module for module in parts.model.modules() if isinstance(module, RMSNorm)).compile(backend=backend)
        return parts

    plan = tiny_plan({"knobs.compile": True})
    options = replace(options_of(plan), compile=False)
    effect = effect_of(observe({"knobs.compile": True}, compiled, options=options, steps_before=1), "compile")
    assert effect.took_effect is True
    assert "RMSNorm 2" in effect.evidence  # one of them, in two microbatches
    assert len(compilations) == 1  # and none for the observed step
    assert effect_of(observe({"knobs.compile": True}, options=options), "compile").took_effect is False


def judged(fields: dict[str, Any], counts: dict[tuple[str, str], int]) -> dict[str, Any]:
    found = judge_effects(StepEvidence(tiny_plan(fields), Counter(counts), {}, {}))
    return {effect.knob: effect for effect in found}


def test_low_precision_on_a_cpu_is_emulated() -> None:
    effect = effect_of(observe(FP8), "precision")
    assert (effect.took_effect, effect.ran) == (False, "emulated")
    assert "there is no GPU" in effect.evidence
    on_gpu = {("device", "cuda"): 1, ("low-precision linears", "CublasBackend"): 12}
    assert judged(FP8, on_gpu)["precision"].took_effect is True
    some = judged(FP8, {**on_gpu, ("low-precision experts", "emulated"): 4})["precision"]
    assert (some.took_effect, some.ran) == (False, "4 of 16 emulated")


def test_kernels_of_experts_that_were_asked_for_by_kind() -> None:
    fields = {"knobs.expert_fusion": True, "knobs.expert_kernels": "triton"}
    on_cpu = effect_of(observe(fields), "expert_kernels")
    assert (on_cpu.took_effect, on_cpu.ran) == (False, "reference")
    assert "there is no GPU" in on_cpu.evidence
    counts = {("device", "cuda"): 1, ("expert kernels", "triton"): 2, ("expert kernels", "torch"): 2}
    assert judged(fields, counts)["expert_kernels"].took_effect is True


def test_kernels_of_the_delta_rule_that_were_asked_for() -> None:
    fields = {"model": "tiny-qwen3-next", "knobs.delta_kernels": "fla"}
    on_cpu = effect_of(observe(fields), "delta_kernels")
    assert (on_cpu.took_effect, on_cpu.ran) == (False, "torch")
    counts = {("device", "cuda"): 1, ("delta rule", "flash-linear-attention"): 3}
    assert judged(fields, counts)["delta_kernels"].took_effect is True
    assert "delta_kernels" not in judged({"knobs.delta_kernels": "fla"}, counts)  # a model without such layers


def test_rows_in_fp8_were_sent() -> None:
    fields = {**EP, **FP8, "knobs.fp8_dispatch": True}
    assert effect_of(observe(fields), "fp8_dispatch").took_effect is True
    assert judged(fields, {("device", "cpu"): 2})["fp8_dispatch"].took_effect is False


def test_the_output_layer_was_quantized() -> None:
    fields = {**FP8, "knobs.fp8_output": True}
    on_cpu = effect_of(observe(fields), "fp8_output")
    assert (on_cpu.took_effect, on_cpu.ran) == (False, "emulated")
    by_kernels = judged(fields, {("device", "cuda"): 1, ("low-precision head", "BlockwiseBackend"): 4})["fp8_output"]
    assert (by_kernels.took_effect, by_kernels.ran) == (True, "kernels")
    assert judged(fields, {("device", "cuda"): 1})["fp8_output"].took_effect is False


def test_the_kernel_of_attention_is_named() -> None:
    assert effect_of(observe({}), "attention").ran == "flash on the CPU"
    rings = effect_of(observe({"cluster.gpus": 2, "layout.cp": 2}), "attention")
    assert rings.ran == "tiles over 2 ranks, p2p"


def test_nothing_is_left_behind_an_observed_step() -> None:
    before = {name: vars(AsyncExchange)[name] for name in ("start_forward", "wait_forward")}
    finish, reduce = WgradQueue.finish, Bucket.start_reduce
    observe({"knobs.recompute": ["layernorm"], "knobs.activation_offload": ["core_attn"]})
    assert {name: vars(AsyncExchange)[name] for name in before} == before
    assert (WgradQueue.finish, Bucket.start_reduce) == (finish, reduce)
    assert context.event_counts is context.activation_observer is context.wait_timer is None
    assert context.saved_tensor_handlers == ()


def test_a_run_says_what_had_no_effect_and_writes_all_of_it(tmp_path: Path) -> None:
    said: list[str] = []
    fields = {
        "job.data": tiny_shard(tmp_path / "counting.tok"),
        "job.steps": 5,
        "knobs.recompute": ["layernorm", "mla_up_proj"],
        "knobs.graphs": ["attn"],
    }
    train(tiny_plan(fields), tmp_path / "run", said.append)
    lines = [line for line in said if "had no effect" in line]
    assert [line.partition(" = ")[0] for line in lines] == ["knobs.graphs.attn", "knobs.recompute.mla_up_proj"]
    (table,) = [text for text in said if text.startswith("recompute and offload in step 3")]
    assert "layernorm" in table
    report = json.loads((tmp_path / "run" / EFFECTS).read_text(encoding="utf-8"))
    assert (report["step"], report["ranks"]) == (3, 1)
    assert {effect["knob"] for effect in report["effects"]} >= {"dispatcher", "attention", "recompute.layernorm"}
    (row,) = report["activation_memory"]
    assert (row["name"], row["kind"], [rank["rank"] for rank in row["ranks"]]) == ("layernorm", "recompute", [0])
    assert row["kept_bytes"] > 0 < row["seconds"]
    assert report["own_times"]["steps"] == 2  # those behind the observed one
