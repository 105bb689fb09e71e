"""Step time and traffic: hand counts, simulated schedules, and properties of any estimate."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import build, make
from random_plans import random_fields
from repository import ROOT
from simulated_schedule import makespan

from threefold.cost.delta_rule import heads_in_delta_layers
from threefold.cost.estimate import WALLS, estimate
from threefold.cost.rank_params import trained_params
from threefold.cost.rates import Rates, calibration, rates_of
from threefold.cost.time.layer import layer_time
from threefold.cost.time.offload import EXPOSED_FRACTION, exposed_seconds, offloaded_bytes
from threefold.cost.time.outside_layers import loss_seconds
from threefold.cost.time.step import TERMS, step_time
from threefold.cost.traffic.by_stack import traffic
from threefold.plan.file import read_plan
from threefold.plan.parse import change
from threefold.plan.plan import OFFLOAD_MODULES, Plan
from threefold.rules.all import blockers, check, repair
from threefold.spec.model import MlaSpec

RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
RATES = calibration("megatron-bridge").rates
QWEN: dict[str, Any] = {
    "model": "qwen3-30b-a3b",
    "target": "megatron-bridge",
    "cluster.chip": "h100",
    "cluster.gpus": 16,
    "job.global_batch": 1024,
    "layout.ep": 16,
}


def tokens_rate(plan: Plan) -> float:
    return estimate(plan).tokens_per_second_per_gpu


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_has_a_finite_positive_estimate(path: Path) -> None:
    plan = read_plan(str(path)).plan
    assert plan is not None
    found = estimate(plan)
    terms = found.time.terms
    assert set(terms) == set(TERMS) == {term for wall in WALLS.values() for term in wall}
    assert all(math.isfinite(value) and value >= 0 for value in terms.values())
    assert sum(terms.values()) == pytest.approx(found.time.step_seconds)
    # The three figures of speed are one: tokens of a step over its seconds, and the FLOPs of a token.
    per_gpu = plan.job.global_batch * plan.job.seq_len / found.time.step_seconds / plan.cluster.gpus
    assert found.tokens_per_second_per_gpu == pytest.approx(per_gpu)
    assert 0 < found.mfu < 1
    assert found.mfu * found.peak_tflops == pytest.approx(found.model_tflops_per_gpu)
    assert found.wall in ("memory", *WALLS)
    assert found.seconds_band[0] < found.time.step_seconds < found.seconds_band[1]
    assert found.bytes_band[0] < found.memory.peak_bytes < found.bytes_band[1]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_estimates_are_pure(path: Path) -> None:
    first, second = read_plan(str(path)).plan, read_plan(str(path)).plan
    assert first is not None
    assert estimate(first).to_json() == estimate(first).to_json()
    assert first == second
    assert traffic(first) == traffic(first)


def ledger(plan: Plan) -> dict[tuple[str, str], list[tuple[float, float, str]]]:
    found: dict[tuple[str, str], list[tuple[float, float, str]]] = {}
    for entry in traffic(plan):
        found.setdefault((entry.axis, entry.operation), []).append((entry.bytes, entry.count, entry.link))
    return found


def test_traffic_of_expert_parallel_by_hand() -> None:
    """Qwen3-30B, EP 16 on two nodes, one microbatch of 4,096 tokens: dim 2,048, top 8, 48 layers."""
    found = ledger(build({**QWEN, "job.global_batch": 16}))
    away = 15 / 16  # of the chosen experts are on other ranks
    exchange = (4096 * 8 * away * 2048 * 2, 2 * 48, "network")  # bf16; forward and backward of each layer
    dense = 30_532_122_624 - 48 * 128 * 3 * 2048 * 768
    data = (pytest.approx(2 * dense * away), 1, "network")  # bf16 over DP 16; the experts have one copy: no EDP
    sums = (pytest.approx(4 * dense * away), 1, "network")  # gradients are reduced as they are summed, in fp32
    assert found == {
        ("ep", "dispatch"): [exchange],
        ("ep", "combine"): [exchange],
        ("dp", "reduce_scatter"): [sums],
        ("dp", "all_gather"): [data],
    }


def test_the_flex_dispatchers_send_a_token_once_to_a_node() -> None:
    """8 choices among 16 ranks: 7 others of the node are hit with 1 - (15/16)^8 each, the other node with 1 - 2^-8."""
    found = ledger(build({**QWEN, "knobs.dispatcher": "deepep", "job.global_batch": 16}))
    copies = 7 * (1 - (15 / 16) ** 8) + (1 - 0.5**8)
    assert found["ep", "dispatch"] == [(pytest.approx(4096 * copies * 2048 * 2), 96, "network")]


def test_the_busiest_rank_returns_more() -> None:
    plan = build({**QWEN, "job.global_batch": 16})
    even, busy = ({(e.axis, e.operation): e.bytes for e in traffic(plan, skew)} for skew in (1.0, 2.0))
    assert busy["ep", "combine"] == 2 * even["ep", "combine"]
    assert busy["ep", "dispatch"] == even["ep", "dispatch"]


LLAMA: dict[str, Any] = {
    "model": "llama3-8b",
    "target": "megatron-bridge",
    "cluster.chip": "h100",
    "cluster.gpus": 8,
    "job.seq_len": 8192,
    "job.global_batch": 4,
    "layout.tp": 2,
    "layout.cp": 2,
    "layout.pp": 2,
}


def test_traffic_of_a_dense_grid_by_hand() -> None:
    """Llama 3 8B on TP 2 x CP 2 x PP 2, four microbatches: dim 4,096, 8 key/value heads of 128, 32 layers."""
    found = ledger(build(LLAMA))
    shard, layers, count = 8192 // 2, 16, 4  # tokens of a CP rank, layers of a stage, microbatches
    half = 2 * 4096 * shard / 2  # of the hidden states, bf16: what the other TP rank lacks
    # Attention and MLP of each layer, and half of embedding with output layer on each of two stages.
    parts = (2 * layers + 0.5) * count
    assert found["tp", "all_gather"] == [(half, 3 * parts, "domain")]
    assert found["tp", "reduce_scatter"] == [(half, 2 * parts, "domain")]
    keys = 2 * (2 * 8 * 128) / 2 * shard  # keys and values, bf16, half the heads
    assert found["cp", "send_kv"] == [(keys, 3 * layers * count, "domain")]  # forward, again backward, gradients
    # One border between two stages, forward and backward: each rank sends once a microbatch.
    assert found["pp", "send"] == [(2 * 4096 * shard / 2, count, "domain")]
    params = 8_030_261_248 / 4  # the model card's 8.03B, over TP x PP
    assert found["dp", "reduce_scatter"] == [(pytest.approx(4 * params / 2, rel=1e-3), 1, "domain")]  # sums in fp32


def test_ways_of_context_parallel_by_hand() -> None:
    """The same grid: gathered keys travel once each way, all-to-all trades half of the heads."""
    shard, calls = 8192 // 2, 16 * 4
    keys, queries = 2 * (2 * 8 * 128) / 2 * shard, 2 * 4096 / 2 * shard
    gathered = ledger(build({**LLAMA, "knobs.cp_comm": "all_gather"}))
    assert gathered["cp", "all_gather"] == [(keys, 2 * calls, "domain")]
    assert gathered["cp", "reduce_scatter"] == [(keys, calls, "domain")]
    traded = ledger(build({**LLAMA, "knobs.cp_comm": "a2a"}))
    assert traded["cp", "all_to_all"] == [
        ((queries + keys) / 2, 2 * calls, "domain"),
        (queries / 2, 2 * calls, "domain"),
    ]


def test_sharded_weights_are_gathered_for_every_microbatch() -> None:
    plain = {**QWEN, "cluster.gpus": 32, "job.global_batch": 128}
    once, often = ledger(build(plain)), ledger(build({**plain, "knobs.data_parallel": "fsdp"}))
    assert [entry[1] for entry in once["edp", "all_gather"]] == [1]
    assert [entry[1] for entry in often["edp", "all_gather"]] == [2 * 4]  # forward and backward of four microbatches
    copies = ledger(build({**plain, "knobs.data_parallel": "hsdp", "layout.replicate": 2}))
    assert ("edp", "all_reduce") in copies
    assert ("edp", "all_gather") not in copies  # two expert copies in all: nothing left to shard


def uniform(pp: int, vpp: int, count: int) -> Plan:
    """A pipeline of equal stages: hardly any vocabulary, and links so fast that hops cost their latency alone."""
    plan = build(
        {
            **QWEN,
            "model.vocab": 128,
            "cluster.gpus": 8 * pp,
            "layout.ep": 8,
            "layout.pp": pp,
            "layout.vpp": vpp,
            "job.global_batch": 8 * count,
        }
    )
    return plan.on_chip(replace(plan.chip, domain_bandwidth=1e17, network_bandwidth=1e17))


@pytest.mark.parametrize(("pp", "vpp", "count"), [(2, 1, 4), (4, 1, 4), (4, 1, 16), (4, 2, 8), (4, 3, 8), (8, 2, 16)])
def test_bubble_matches_the_simulated_schedule(pp: int, vpp: int, count: int) -> None:
    plan = uniform(pp, vpp, count)
    rates = replace(RATES, adapter=1e17)
    layer = layer_time(plan, plan.model.layers[0], rates).total
    chunk = layer * 48 / pp / vpp
    simulated = makespan(pp, vpp, count, [chunk / 3] * (pp * vpp), [2 * chunk / 3] * (pp * vpp))
    drift = RATES.drift.get(plan.stack.release or "", 1.0)
    # 2 %: the output layer of 128 words and the latency of the hops, which the simulation has not.
    predicted = step_time(plan, rates).terms["bubble"] / drift
    assert predicted == pytest.approx(simulated - count * chunk * vpp, abs=0.02 * simulated)


def test_uneven_stages_wait_for_the_slowest() -> None:
    """With the output layer of DeepSeek-V3 on the last stage: within 5 % of the simulation, which knows the order."""
    plan = make(cluster_gpus=256, layout_vpp=1, layout_pp=4, layout_tp=1, job_global_batch=1024, knobs_ep_overlap=None)
    plan = change(plan, {"knobs.delay_wgrad": None, "job.mtp": 0})
    plan = plan.on_chip(replace(plan.chip, domain_bandwidth=1e17, network_bandwidth=1e17))
    times = {layer: layer_time(plan, layer, RATES).total for layer in set(plan.model.layers)}
    loads = [
        sum(times[plan.model.layers[i]] for i in chunk.layers) + chunk.loss * loss_seconds(plan, RATES)
        for chunk in plan.chunks
    ]
    simulated = makespan(4, 1, 16, [load / 3 for load in loads], [2 * load / 3 for load in loads])
    spent = step_time(plan, RATES).terms
    outside = sum(spent[name] for name in ("dp", "optimizer", "offload", "other"))
    assert sum(spent.values()) - outside == pytest.approx(simulated, rel=0.05)


def test_an_mtp_depth_is_in_the_terms_of_its_layers() -> None:
    """One more layer, a product that joins two embeddings, and a loss of its own; communication is not the loss."""
    fields = {**QWEN, "model": "deepseek-v3", "layout.ep": 8, "layout.tp": 2}
    without, deep = (build({**fields, "job.mtp": depths}) for depths in (0, 1))
    layer = layer_time(deep, deep.model.mtp_depth[0], RATES)
    before, after = (step_time(plan, RATES).terms for plan in (without, deep))
    scale = deep.num_microbatches * RATES.drift.get(deep.stack.release or "", 1.0)
    for name in ("experts", "attention", "elementwise", "quantize", "tp", "ep", "host"):
        assert after[name] - before[name] == pytest.approx(scale * getattr(layer, name), abs=1e-9)
    assert after["loss"] == pytest.approx(2 * before["loss"])
    assert layer.gemm < (after["gemm"] - before["gemm"]) / scale < 2 * layer.gemm


@pytest.mark.parametrize("sharding", ["zero1", "fsdp"])
def test_what_is_frozen_needs_no_gradients_of_weights(sharding: str) -> None:
    """Two of three GEMMs are left of forward and backward; nothing of the language model is reduced or updated."""
    fields = {**QWEN, "model": "qwen3-vl-30b-a3b", "job.images": 2.0, "knobs.data_parallel": sharding}
    both, frozen = (build({**fields, "job.freeze": parts}) for parts in ([], ["language"]))
    before, after = (step_time(plan, RATES).terms for plan in (both, frozen))
    assert after["gemm"] == pytest.approx(2 / 3 * before["gemm"])
    assert after["experts"] < 2 / 3 * before["experts"]  # nor are their gradients added up
    for name in ("attention", "elementwise", "ep", "vision"):
        assert after[name] == before[name]
    assert after["optimizer"] < 0.05 * before["optimizer"]
    assert after["loss"] < before["loss"]
    sent = {(one.axis, one.operation): one.total_bytes for one in traffic(frozen)}
    all_sent = {(one.axis, one.operation): one.total_bytes for one in traffic(both)}
    assert sent["dp", "reduce_scatter"] < 0.5 * all_sent["dp", "reduce_scatter"]
    gathered = sent["dp", "all_gather"] / all_sent["dp", "all_gather"]
    assert gathered == 1 if sharding == "fsdp" else gathered < 0.5


def test_a_frozen_step_overlaps_what_is_left() -> None:
    fields = {**QWEN, "model": "qwen3-vl-30b-a3b", "knobs.ep_overlap": True, "knobs.delay_wgrad": True}
    plain, late = (
        step_time(build({**fields, "job.freeze": ["language"], "knobs.delay_wgrad": delay}), RATES).terms["ep"]
        for delay in (False, True)
    )
    assert plain == late  # there are no gradients of weights to put beside an exchange


RESULTS = RECIPES[0].parent.parent / "benchmarks" / "results"


@pytest.mark.parametrize("shape", ["qwen3-30b-a3b", "deepseek-v3"])
@pytest.mark.parametrize("measured", ["recompute-h200", "recompute-fused-h200"])
def test_copies_show_as_they_were_measured(measured: str, shape: str) -> None:
    """Steps with tensors on the host, from the bytes that went there: within 2 % of every step timed on an H200."""
    rows = {row["name"]: row for row in json.loads((RESULTS / f"{measured}.json").read_text())["shapes"][shape]}
    plain = rows.pop("nothing")["ms"] / 1e3
    away = [row for name, row in rows.items() if name.startswith("offload ")]
    assert len(away) > 5
    for row in away:
        more = exposed_seconds(row["saved_gib"] * 2**30, 64e9 * Rates().host_copy, plain)
        assert plain + more == pytest.approx(row["ms"] / 1e3, rel=0.02)


ONE_H200 = {"target": "threefold", "cluster.chip": "h200", "cluster.gpus": 1, "job.seq_len": 4096}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {"model.num_layers": 4, "job.micro_batch": 4, "job.global_batch": 4},
    "deepseek-v3": {"model.num_layers": 3, "model.num_dense_layers": 1, "model.num_experts": 32, "job.mtp": 0},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("measured", ["recompute-h200", "recompute-fused-h200"])
def test_recomputed_experts_take_what_was_measured(measured: str, shape: str) -> None:
    """With the shared ones beside them, 9 to 11 % of forward and backward: to one and a half points."""
    rows = {row["name"]: row for row in json.loads((RESULTS / f"{measured}.json").read_text())["shapes"][shape]}
    fields = {**ONE_H200, "model": shape, "job.global_batch": 1, **SHAPES[shape]}
    plain = build({**fields, "knobs.expert_fusion": "fused" in measured})
    before, after = (step_time(plan, RATES) for plan in (plain, change(plain, {"knobs.recompute": ["moe"]})))
    passes = before.step_seconds - before.terms["optimizer"] - before.terms["other"]
    added = 100 * (after.step_seconds - before.step_seconds) / passes
    assert added == pytest.approx(rows["moe"]["added_percent"], abs=1.5)


def recompute_seconds(plan: Plan, *names: str) -> float:
    """The seconds that recompute of these modules adds to a step."""
    plain, more = (step_time(change(plan, {"knobs.recompute": each}), RATES) for each in ([], names))
    return more.step_seconds - plain.step_seconds


def test_what_lies_inside_a_recomputed_module_is_priced_with_it() -> None:
    plan = build({**ONE_H200, "model": "deepseek-v3", "job.global_batch": 1, **SHAPES["deepseek-v3"]})
    moe = recompute_seconds(plan, "moe")
    assert recompute_seconds(plan, "moe", "shared_experts", "moe_act") == moe
    assert moe > recompute_seconds(plan, "shared_experts", "moe_act") > recompute_seconds(plan, "moe_act") > 0


def test_fused_experts_have_no_activation_to_repeat() -> None:
    plan = build({**ONE_H200, "model": "qwen3-30b-a3b", "knobs.expert_fusion": True, **SHAPES["qwen3-30b-a3b"]})
    assert recompute_seconds(plan, "moe_act") == 0
    assert recompute_seconds(change(plan, {"knobs.expert_fusion": False}), "moe_act") > 0


def test_the_norm_behind_the_delta_rule_has_its_price() -> None:
    """Three passes over 4,096 tokens of 32 heads of 128, in every layer with the rule."""
    fields = {"model": "qwen3-next-80b-a3b", "model.num_layers": 4, "model.num_experts": 64, "job.global_batch": 1}
    plan = build({**ONE_H200, **fields, "knobs.recompute": ["gdn_norm_out"]})
    one = 3 * 2 * 32 * 128 * 4096 * RATES.passes / (plan.chip.memory_bandwidth * RATES.memory)
    for layer in plan.model.layers:
        assert layer_time(plan, layer, RATES).recompute == pytest.approx(one if layer.mixer == "delta" else 0)


def test_keys_that_an_indexer_did_not_choose_cost_as_much_as_in_dense_attention() -> None:
    """Our engine masks them. Elsewhere a query costs what its 2,048 keys cost: an eighth, at 32,768 tokens."""
    plan = build({**ONE_H200, "model": "glm-5.2", "job.seq_len": 32_768, "job.global_batch": 1})
    assert isinstance(plan.model.attention, MlaSpec)
    dense = replace(plan, model=replace(plan.model, attention=replace(plan.model.attention, indexer=None)))
    seconds = layer_time(dense, plan.model.layers[-1], RATES).attention
    assert layer_time(plan, plan.model.layers[-1], RATES).attention == pytest.approx(seconds)
    skipping = replace(plan, target="megatron-bridge")
    assert layer_time(skipping, plan.model.layers[-1], RATES).attention == pytest.approx(seconds / 8)


ALL_MODULES = [name for name in OFFLOAD_MODULES if name != "fused_group_mlp"]


@pytest.mark.parametrize("target", ["threefold", "megatron-bridge"])
def test_offloaded_activations_take_time(target: str) -> None:
    """Nearly nothing where both ways fit behind the compute, else what is longer of the copies."""
    fields = {**QWEN, "target": target, "cluster.chip": "h200", "cluster.gpus": 1, "layout.ep": 1, "job.seq_len": 16384}
    plain = build({**fields, "model.num_layers": 4, "job.global_batch": 1})
    before = step_time(plain, RATES)
    assert before.terms["offload"] == 0
    drift = RATES.drift.get(plain.stack.release or "", 1.0)
    compute = sum(size for name, size in before.terms.items() if name not in ("dp", "optimizer", "other")) / drift

    def shows(**changes: Any) -> float:
        """The part of the copies' time that is exposed."""
        plan = change(plain, {f"knobs.{name}": value for name, value in changes.items()})
        after = step_time(plan, RATES)
        assert after.step_seconds - after.terms["offload"] == pytest.approx(before.step_seconds)
        copies = 2 * offloaded_bytes(plan, plan.model.layers) / (plan.chip.host_bandwidth * RATES.host_copy)
        hidden = copies - after.terms["offload"] / drift
        assert hidden == pytest.approx(min(compute, (1 - EXPOSED_FRACTION) * copies))
        return 1 - hidden / copies

    assert shows(activation_offload=["moe_act"]) == pytest.approx(EXPOSED_FRACTION)
    assert shows(activation_offload_layers=1) == pytest.approx(EXPOSED_FRACTION)
    assert shows(activation_offload=ALL_MODULES) > EXPOSED_FRACTION
    assert shows(activation_offload_layers=4) > shows(activation_offload_layers=3) > EXPOSED_FRACTION
    assert shows(activation_offload_layers=9) == shows(activation_offload_layers=4)


def test_what_goes_to_the_host_is_what_memory_lacks() -> None:
    """On one stage with one microbatch in flight, for Megatron, whose estimate is a sum over layers."""
    plain = build({**QWEN, "model.num_layers": 8})
    for changes in ({"knobs.activation_offload": ALL_MODULES}, {"knobs.activation_offload_layers": 3}):
        away = change(plain, changes)
        saved = estimate(plain).memory.peak_bytes - estimate(away).memory.peak_bytes
        assert offloaded_bytes(away, away.model.layers) == pytest.approx(saved)


@pytest.mark.parametrize("dispatcher", ["alltoall", "deepep", "hybridep"])
@pytest.mark.parametrize("gpus", [16, 64])
def test_overlap_helps_where_communication_binds(dispatcher: str, gpus: int) -> None:
    """EP over two and more nodes: by prediction the exchange is what overlap hides, so it is never slower."""
    fields = {**QWEN, "cluster.gpus": gpus, "layout.ep": gpus, "knobs.dispatcher": dispatcher}
    plain, merged = build(fields), build({**fields, "knobs.ep_overlap": True})
    assert estimate(plain).time.terms["ep"] > 0
    assert estimate(merged).time.step_seconds <= estimate(plain).time.step_seconds
    assert estimate(merged).time.terms["ep"] < estimate(plain).time.terms["ep"]


def test_overlap_gains_what_was_published() -> None:
    """Qwen3-30B on 16 H100 with alltoall: 41.25 s without, 31.31 s with overlap; the band is the estimate's own."""
    slow, fast = (
        read_plan(str(RECIPES[0].parent / f"qwen3-30b-a3b-4k-16xh100-bf16-{name}.toml")).plan
        for name in ("no-overlap", "overlap")
    )
    assert slow is not None
    assert fast is not None
    gain = estimate(slow).time.step_seconds / estimate(fast).time.step_seconds
    assert gain - 1 == pytest.approx(41.25 / 31.31 - 1, rel=1 / 3)  # the bound on the size of a change


@pytest.mark.parametrize("times", [2, 4])
def test_more_gpus_with_the_same_work_keep_their_speed(times: int) -> None:
    """Twice the data-parallel ranks and batch: only the gradient ring is longer, which mostly hides."""
    wide = make(cluster_gpus=1024 * times, job_global_batch=8192 * times)
    assert tokens_rate(wide) == pytest.approx(tokens_rate(make()), rel=0.05)


def test_a_longer_batch_shrinks_the_bubble() -> None:
    short, long = (estimate(make(job_global_batch=batch)).time for batch in (2048, 16384))
    assert long.terms["bubble"] / long.step_seconds < short.terms["bubble"] / short.step_seconds / 4


@given(
    module=st.sampled_from(["layernorm", "core_attn", "moe_act", "moe", "mla_up_proj", "mlp", "full"]),
    gpus=st.sampled_from([16, 64]),
)
def test_recompute_is_never_free(module: str, gpus: int) -> None:
    plain = build({**QWEN, "model": "deepseek-v3", "cluster.gpus": gpus, "layout.ep": 16})
    again = change(plain, {"knobs.recompute": [module]})
    assert step_time(again, RATES).step_seconds > step_time(plain, RATES).step_seconds


@given(faster=st.floats(1.0, 8.0), fact=st.sampled_from(["memory_bandwidth", "domain_bandwidth", "network_bandwidth"]))
def test_a_faster_chip_is_never_slower(faster: float, fact: str) -> None:
    plan = make()
    better = plan.on_chip(replace(plan.chip, **{fact: faster * getattr(plan.chip, fact)}))
    assert step_time(better, RATES).step_seconds <= step_time(plan, RATES).step_seconds * (1 + 1e-9)


@pytest.mark.parametrize("target", ["megatron-bridge", "threefold"])
def test_full_recompute_of_some_layers_costs_their_part(target: str) -> None:
    """Half of the layers: half of the time that all of them add, in compute and in exchanges."""
    full = {"knobs.recompute": ["full"], "knobs.recompute_method": "block"}
    none, half, whole = (
        step_time(build({**QWEN, "target": target, **more}), RATES).terms
        for more in ({}, {**full, "knobs.recompute_layers": 24}, {**full, "knobs.recompute_layers": 48})
    )
    assert half["recompute"] == pytest.approx(whole["recompute"] / 2)
    assert half["ep"] - none["ep"] == pytest.approx((whole["ep"] - none["ep"]) / 2)


def test_muon_multiplies_whole_matrices() -> None:
    """Five steps for the two matrices of one expert: a square of 1,536 rows, its square, and a product with each."""
    plan = build({**QWEN, "target": "threefold", "cluster.gpus": 1, "layout.ep": 1})
    gate_up = 5 * (4 * 1536**2 * 2048 + 2 * 1536**3)
    muon, in_fp32 = {"job.optimizer": "muon"}, {"job.optimizer": "muon", "knobs.muon_dtype": "fp32"}
    adamw = step_time(plan, RATES).terms["optimizer"]
    # Half of the bf16 peak; for fp32 an eighth of the TF32 peak.
    for changes, rate in ((muon, 989.4e12 / 2), (in_fp32, 494.7e12 / 8)):
        added = step_time(change(plan, changes), RATES).terms["optimizer"] - adamw
        assert 1 < added * rate / (48 * 128 * gate_up) < 2


def test_remainders_of_masters_move_two_bytes_less() -> None:
    """28 bytes for a parameter with fp32 masters and moments, 26 with remainders of masters (Qwen3-30B-A3B, ZeRO-1)."""
    plan = build({**QWEN, "target": "threefold", "cluster.gpus": 1, "layout.ep": 1, "knobs.grad_dtype": "bf16"})
    split = change(plan, {"knobs.store_param_remainders": True})
    whole_seconds, split_seconds = (step_time(one, RATES).terms["optimizer"] for one in (plan, split))
    # The norm reads a gradient's two bytes once more.
    assert split_seconds / whole_seconds == pytest.approx(28 / 30)


STEP_ON_H200 = {
    "model": "qwen3-30b-a3b", "model.num_layers": 8, "target": "threefold", "cluster.chip": "h200", "cluster.gpus": 1,
    "job.global_batch": 1, "knobs.expert_fusion": True, "knobs.grad_dtype": "bf16",
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "dense_bytes", "expert_bytes"),
    [
        # fp32 masters and moments, 24 bytes both ways; the weight out, the gradient in, and for the norm once more
        ({}, 30, 28),
        ({"knobs.expert_fusion": False}, 30, 30),
        ({"knobs.master_weights": False, "knobs.optimizer_dtype": "bf16"}, 16, 14),
        ({"job.global_batch": 2}, 30, 30),  # gradients are added up behind the kernels that could sum their squares
        ({"job.global_batch": 2, "knobs.grad_dtype": "fp32"}, 34, 34),
        ({"knobs.grad_dtype": "fp32"}, 30, 28),  # those of one microbatch are not added to an fp32 sum
    ],
)
def test_gradients_are_read_by_the_update_and_by_their_norm(
    fields: dict[str, Any], dense_bytes: int, expert_bytes: int
) -> None:
    plan = build({**STEP_ON_H200, **fields})
    dense, experts = trained_params(plan)
    moved = dense_bytes * dense + expert_bytes * experts
    rate = 4.8e12 * calibration("threefold").rates.optimizer
    assert step_time(plan, rates_of(plan)).terms["optimizer"] == pytest.approx(moved / rate, rel=1e-6)


def test_kernels_of_the_delta_rule_have_prices_of_their_own() -> None:
    """Measured on one H200 for four sequences: docs/log/step-speed.md. One of them has a quarter of the heads, which is
    below what published rows show for a few."""
    plan = build({**STEP_ON_H200, "model": "qwen3-next-80b-a3b", "model.num_layers": 4, "job.mtp": 0})
    plan = change(plan, {"job.seq_len": 4096, "job.micro_batch": 4, "job.global_batch": 4})
    rates, chunks = rates_of(plan), 3 * 4096 / 64
    for size, seconds in ((4, rates.fla_chunk_seconds), (2, rates.fla_chunk_seconds / 2), (1, 15e-6)):
        plain = change(plan, {"job.micro_batch": size, "job.global_batch": size})
        by_fla = change(plain, {"knobs.delta_kernels": "fla"})
        saved = step_time(plain, rates).step_seconds - step_time(by_fla, rates).step_seconds
        assert saved == pytest.approx(chunks * (rates.chunk_seconds - seconds), rel=0.02)


@pytest.mark.parametrize("kind", ["a2a", "p2p"])
@pytest.mark.parametrize("by_layer", [False, True])
def test_spans_of_a_sequence_have_no_kernels_of_the_delta_rule(kind: str, by_layer: bool) -> None:
    fields = {"model": "qwen3-next-80b-a3b", "model.num_layers": 4, "cluster.gpus": 2, "layout.cp": 2, "job.mtp": 0}
    cp_comm = 4 * [kind] if by_layer else kind
    plan = build({**STEP_ON_H200, **fields, "knobs.cp_comm": cp_comm, "knobs.delta_kernels": "fla"})
    slower = replace(rates_of(plan), fla_chunk_seconds=10.0)
    assert (step_time(plan, slower) != step_time(plan, rates_of(plan))) is (kind == "a2a")


def test_a_list_by_layer_is_priced_by_the_layers_it_is_for() -> None:
    """Heads in layers of the delta rule, whose kernels then run, and a ring in the layer with attention."""
    fields = {"model": "qwen3-next-80b-a3b", "model.num_layers": 4, "cluster.gpus": 4, "layout.cp": 4, "job.mtp": 0}
    plan = build({**STEP_ON_H200, **fields, "knobs.delta_kernels": "fla"})
    by_layer = change(plan, {"knobs.cp_comm": list(heads_in_delta_layers(plan))})
    assert by_layer.knobs.cp_comm == ("a2a", "a2a", "a2a", "p2p")
    rates = rates_of(plan)
    ring, heads = (step_time(one, rates).terms for one in (plan, by_layer))
    assert heads["cp"] == pytest.approx(ring["cp"])  # layers of the rule trade heads in both prices
    chunks, few_heads = 3 * plan.job.seq_len / 64, 15e-6  # 8 of 32
    assert ring["elementwise"] - heads["elementwise"] == pytest.approx(chunks * (rates.chunk_seconds - few_heads))
    assert heads_in_delta_layers(change(plan, {"target": "megatron-bridge"})) == ()


def test_recomputed_mamba_has_no_chunks_of_the_delta_rule() -> None:
    plan = build({**STEP_ON_H200, "model": "nemotron-3-nano", "model.num_layers": 4, "knobs.recompute": ["core_attn"]})
    slower = replace(rates_of(plan), chunk_seconds=1.0)
    assert step_time(plan, slower) == step_time(plan, rates_of(plan))


def test_the_band_is_wider_where_nothing_was_seen() -> None:
    seen = build({**QWEN, "knobs.precision": "fp8-cs", "knobs.dispatcher": "hybridep"})
    ours = change(seen, {"target": "threefold"})
    far = change(seen, {"knobs.precision": "fp8-blockwise"})
    known, unknown = estimate(seen), estimate(far)
    assert known.calibrated
    assert not unknown.calibrated
    assert not estimate(ours).calibrated
    assert not estimate(change(build(LLAMA), {"layout.cp": 1, "knobs.precision": "fp8-cs"})).calibrated  # dense
    assert "uncalibrated" in unknown.basis
    for band in ("seconds_band", "bytes_band"):
        narrow, wide = getattr(known, band), getattr(unknown, band)
        assert wide[1] / wide[0] > narrow[1] / narrow[0]


def test_mfu_names_the_peak_it_is_measured_against() -> None:
    """Datasheet of the H100 SXM: 1,978.9 dense TFLOP/s in eight bits, 989.4 in sixteen."""
    eight, sixteen = (estimate(build({**QWEN, "knobs.precision": name})) for name in ("fp8-cs", "bf16"))
    assert (eight.mfu_peak, eight.peak_tflops) == ("h100 fp8 dense", pytest.approx(1978.9))
    assert (sixteen.mfu_peak, sixteen.peak_tflops) == ("h100 bf16 dense", pytest.approx(989.4))
    emulated = estimate(build({**QWEN, "knobs.precision": "nvfp4"}))  # no such units on Hopper
    assert (emulated.mfu_peak, emulated.peak_tflops) == ("h100 bf16 dense", pytest.approx(989.4))


@settings(max_examples=60)
@given(fields=random_fields())
def test_random_plans_have_finite_estimates(fields: dict[str, Any]) -> None:
    """Whatever the rules let pass can be priced."""
    plan, _ = repair(build(fields))
    if blockers(check(plan)):
        return
    found = estimate(plan)
    numbers = [*found.time.terms.values(), *(v for stage in found.memory.stages for v in stage.terms.values())]
    assert all(math.isfinite(value) and value >= 0 for value in numbers)
    assert 0 < found.mfu < 1
    assert all(entry.bytes > 0 and entry.count > 0 and entry.link != "none" for entry in traffic(plan))


def attention_seconds(target: str, model: str, seq_len: int, **rates: float) -> float:
    """Seconds of attention for one token of a sequence."""
    fields = {"model": model, "target": target, "cluster.chip": "h100", "cluster.gpus": 64, "layout.ep": 32}
    plan = build({**fields, "job.seq_len": seq_len, "job.global_batch": 64})
    used = replace(rates_of(plan), **rates)
    return estimate(plan, used).time.terms["attention"] / plan.tokens_per_step


def test_attention_with_sinks_writes_out_no_scores() -> None:
    """From 16K to 64K attention grows four times at most, as without sinks; what 16-bit runs lost at 4K is charged to
    every token where Megatron runs it, and nothing where our engine does."""
    for target in ("megatron-bridge", "threefold"):
        fixed = attention_seconds(target, "gpt-oss-120b", 4096)
        more = [attention_seconds(target, "gpt-oss-120b", length) - fixed for length in (16384, 65536)]
        assert more[1] / more[0] == pytest.approx((65536 - 4096) / (16384 - 4096), rel=0.02)
        with_loss, without = (
            attention_seconds(target, "gpt-oss-120b", 4096, sink_passes=passes) for passes in (2.0, 1e-9)
        )
        assert (with_loss > without) == (target == "megatron-bridge")
    fields = {"model": "gpt-oss-120b", "cluster.chip": "h100", "cluster.gpus": 64, "layout.ep": 32}
    for target, word in (("threefold", "flash kernel"), ("megatron-bridge", "charged to every token")):
        assumed = estimate(build({**fields, "target": target, "job.global_batch": 64})).assumed
        assert any(word in text for text in assumed)
    assert estimate(build(QWEN)).assumed == ()


def test_low_precision_experts_of_our_engine_are_fused_anyway() -> None:
    """The knob asks for the 16-bit kernels alone: with those of FP8 it changes no prediction."""
    ours = {**QWEN, "target": "threefold", "knobs.dispatcher": "alltoall"}
    for precision, pays in (("bf16", True), ("fp8-blockwise", False)):
        plain = build({**ours, "knobs.precision": precision})
        fused = change(plain, {"knobs.expert_fusion": True})
        assert (estimate(fused).time.step_seconds < estimate(plain).time.step_seconds) == pays


def test_the_slowest_stage_is_named() -> None:
    plan = read_plan(str(ROOT / "recipes" / "deepseek-v3-128k-256xh100-fp8.toml")).plan
    assert plan is not None
    found = step_time(plan, RATES)
    assert 0 <= found.stage < plan.layout.pp
    heavy_end = change(plan, {"layout.pp": 2, "layout.vpp": 1, "layout.stages": "Et*20|t*41mL"})
    assert step_time(heavy_end, RATES).stage == 1
