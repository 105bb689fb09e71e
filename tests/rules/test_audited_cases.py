"""Rules in cases that a reader of the documents or of upstream code would try: both sides of each condition."""

from typing import Any

import pytest
from plans import CLEAN, build

from threefold.findings import Finding
from threefold.plan.parse import parse
from threefold.rules.all import RULES, check, judge
from threefold.rules.base import older
from threefold.rules.layout.context import target_cp

QWEN = {
    "model": "qwen3-235b-a22b",
    "target": "megatron-bridge",
    "cluster.chip": "h200",
    "cluster.gpus": 64,
    "job.global_batch": 512,
    "layout.ep": 8,
    "layout.pp": 4,
    "layout.vpp": 4,
    "layout.tp": 2,
    "knobs.recompute": ["layernorm", "moe_act"],
}
NEXT = {"model": "qwen3-next-80b-a3b", "model.num_layers": 4, "target": "threefold", "cluster.chip": "gb200"}
NEXT |= {"cluster.gpus": 32, "job.seq_len": 131_072, "layout.cp": 4}
VLM = {"model": "qwen3-vl-235b-a22b", "target": "megatron-bridge", "cluster.chip": "gb200", "cluster.gpus": 64}
VLM |= {"layout.ep": 64, "job.global_batch": 256, "job.micro_batch": 2, "knobs.dispatcher": "hybridep", "job.images": 2}
SMALL = {"cluster.gpus": 16, "layout.ep": 4, "layout.pp": 2, "layout.tp": 1, "knobs.ep_overlap": True}
OVERLAP = {"knobs.ep_overlap": True, "knobs.delay_wgrad": True, "knobs.max_connections": 32}


def fired(fields: dict[str, Any]) -> set[str]:
    return {finding.rule for finding in judge(build(fields), notes=True)}


@pytest.mark.parametrize(
    ("fields", "rule", "fires"),
    [
        # With EP overlap upstream refuses graphs of moe and of mlp.
        ({**CLEAN, "knobs.graphs": ["mlp"], "knobs.delay_wgrad": False}, "graph-leaves-exchange-free", True),
        ({**CLEAN, "knobs.graphs": ["moe_router"], "knobs.delay_wgrad": False}, "graph-leaves-exchange-free", False),
        # TP on Hopper wants one queue, unless EP overlap wants several.
        ({**QWEN, "knobs.max_connections": 32}, "tp-and-cp-need-one-connection", True),
        ({**QWEN, **OVERLAP}, "tp-and-cp-need-one-connection", False),
        ({**QWEN, "knobs.max_connections": 32, "cluster.chip": "b200"}, "tp-and-cp-need-one-connection", False),
        ({**QWEN, "knobs.max_connections": 32, "layout.tp": 1}, "tp-and-cp-need-one-connection", False),
        # A list is judged by its layers: 16 key heads of the rule divide by four, two heads of attention do not.
        ({**NEXT, "knobs.cp_comm": ["a2a", "a2a", "a2a", "p2p"]}, "cp-a2a-divides-heads", False),
        ({**NEXT, "knobs.cp_comm": ["p2p", "p2p", "p2p", "a2a"]}, "cp-a2a-divides-heads", True),
        (
            {**NEXT, "layout.tp": 2, "layout.cp": 16, "knobs.cp_comm": ["a2a", "p2p", "p2p", "p2p"]},
            "cp-a2a-divides-heads",
            True,
        ),
        # Image-free is never evidence, whatever the data.
        ({**VLM, "job.images": 0, "job.data": "/data/chats"}, "vlm-benchmark-has-images", True),
        ({**VLM, "job.images": None, "job.data": "synthetic"}, "vlm-benchmark-has-images", True),
        (VLM, "vlm-benchmark-has-images", False),
        # Drop-and-pad needs no counts on the host; our engine drops without padding.
        (
            {**QWEN, "job.capacity_factor": 1.0, "knobs.graphs": ["moe_router", "moe_preprocess"]},
            "graph-preprocess-without-sync",
            False,
        ),
        (
            {
                **QWEN,
                "target": "threefold",
                "job.capacity_factor": 1.0,
                "knobs.graphs": ["moe_router", "moe_preprocess"],
            },
            "graph-preprocess-without-sync",
            True,
        ),
        # Offload by module goes with Megatron's graphs; whole layers do not.
        (
            {**QWEN, "knobs.graphs": ["moe_router"], "knobs.activation_offload": ["core_attn"]},
            "graph-excludes-offload",
            False,
        ),
        (
            {**QWEN, "knobs.graphs": ["moe_router"], "knobs.activation_offload_layers": 2},
            "graph-excludes-offload",
            True,
        ),
        # A graph of the whole iteration takes both in Megatron Core 0.18 and later, and ends before the update.
        (
            {**QWEN, "knobs.graphs": ["full_iteration"], "knobs.activation_offload_layers": 2},
            "graph-excludes-offload",
            False,
        ),
        (
            {
                **QWEN,
                "knobs.graphs": ["full_iteration"],
                "knobs.activation_offload": ["core_attn"],
                "stack.release": "26.04",
            },
            "graph-excludes-offload",
            True,
        ),
        (
            {**QWEN, "knobs.graphs": ["full_iteration"], "knobs.optimizer_offload": 0.5},
            "graph-excludes-offload",
            False,
        ),
        (
            {
                **QWEN,
                "target": "threefold",
                "knobs.graphs": ["full_iteration"],
                "knobs.optimizer_offload": 0.5,
            },
            "graph-excludes-offload",
            True,
        ),
        # attn has an A/B of its own; where shapes are fixed, or it was measured, nothing is said.
        ({**QWEN, "knobs.graphs": ["attn"]}, "graph-of-attention-by-ab", True),
        ({**QWEN, "knobs.graphs": ["moe_router"]}, "graph-of-attention-by-ab", False),
        ({**QWEN, "knobs.graphs": ["attn"], "stack.measured": ["graphs"]}, "graph-of-attention-by-ab", False),
        # Overlap of an exchange of few ranks.
        ({**QWEN, **SMALL}, "ep-overlap-small-exchange", True),
        ({**QWEN, **SMALL, "knobs.dispatcher": "deepep"}, "ep-overlap-small-exchange", False),
        ({**QWEN, **SMALL, "cluster.gpus": 32}, "ep-overlap-small-exchange", False),
        # ETP where a part of it could be EP.
        ({**QWEN, "model": "mixtral-8x7b", "layout.ep": 4, "layout.etp": 4}, "etp-only-when-ep-insufficient", True),
        ({**QWEN, "model": "mixtral-8x7b", "layout.ep": 8, "layout.etp": 2}, "etp-only-when-ep-insufficient", False),
        # Small launches on Blackwell.
        ({**CLEAN, "cluster.chip": "b200"}, "small-launches-want-graphs", True),
        ({**CLEAN, "cluster.chip": "b200", "job.micro_batch": 4}, "small-launches-want-graphs", False),
        # Candidates: all-to-all past EP 8 is where to start, and other dispatchers are to be compared with it.
        ({**QWEN, "layout.ep": 16, "knobs.dispatcher": "alltoall"}, "dispatcher-candidates-left", True),
        ({**QWEN, "layout.ep": 8, "knobs.dispatcher": "alltoall"}, "dispatcher-candidates-left", False),
        ({**QWEN, "layout.ep": 16, "knobs.dispatcher": "hybridep"}, "dispatcher-candidates-left", False),
        # Formats that the chip multiplies are not ranked; all of them follow a run in BF16.
        ({**QWEN, "knobs.precision": "fp8-cs"}, "low-precision-after-bf16", True),
        ({**QWEN, "knobs.precision": "mxfp8", "cluster.chip": "gb200"}, "low-precision-after-bf16", True),
        ({**QWEN, "knobs.precision": "mxfp8"}, "low-precision-after-bf16", False),
        ({**QWEN, "knobs.precision": "bf16"}, "low-precision-after-bf16", False),
        # Releases at 128K.
        ({**QWEN, "job.seq_len": 131072, "stack.release": "25.09"}, "kernels-at-length", True),
        ({**QWEN, "job.seq_len": 131072, "stack.release": "26.06"}, "kernels-at-length", False),
        # Vision: what FSDP lacks, and 3D without TP.
        ({**VLM, "knobs.data_parallel": "fsdp", "knobs.precision": "mxfp8"}, "vlm-in-bf16-without-cp", True),
        ({**VLM, "knobs.data_parallel": "fsdp", "knobs.optimizer_offload": 1.0}, "fsdp-features", True),
        ({**VLM, "knobs.data_parallel": "fsdp", "knobs.graphs": ["attn"]}, "fsdp-features", False),
        ({**VLM, "layout.tp": 8, "layout.ep": 8, "layout.etp": 8}, "vlm-3d-cuts-experts-first", True),
        (VLM, "vlm-3d-cuts-experts-first", False),
        # A graph of the experts with a flex dispatcher.
        ({**QWEN, "job.capacity_factor": 1.0, "knobs.graphs": ["moe"]}, "graph-of-experts-by-alltoall", False),
        (
            {**QWEN, "job.capacity_factor": 1.0, "knobs.graphs": ["moe"], "knobs.dispatcher": "deepep"},
            "graph-of-experts-by-alltoall",
            True,
        ),
    ],
)
def test_both_sides_of_a_condition(fields: dict[str, Any], rule: str, fires: bool) -> None:
    assert (rule in fired(fields)) is fires


def test_the_documents_own_overrides_for_an_isolated_overlap_are_read() -> None:
    given = {
        "moe_a2a_overlap": False,
        "comm_overlap.overlap_moe_expert_parallel_comm": True,
        "comm_overlap.delay_wgrad_compute": False,
        "model.moe_shared_expert_overlap": False,
    }
    plan = parse({"model": "qwen3-30b-a3b", "layout.ep": 8, "cluster.gpus": 8, **given}).plan
    assert plan is not None
    assert (plan.knobs.ep_overlap, plan.knobs.delay_wgrad) == (True, False)


def test_scopes_are_read_as_the_documents_write_them() -> None:
    plan = parse({"model": "qwen3-30b-a3b", "cuda_graph_scope": "attn moe_router moe_preprocess"}).plan
    assert plan is not None
    assert plan.knobs.graphs == ("attn", "moe_router", "moe_preprocess")


@pytest.mark.parametrize(
    ("seq_len", "cp"), [(4096, 1), (32768, 8), (98304, 32), (114688, 32), (131072, 32), (262144, 64), (90000, 16)]
)
def test_the_target_of_cp_is_the_nearest_power_of_two(seq_len: int, cp: int) -> None:
    assert target_cp(seq_len) == cp


def test_legal_scopes_stay_in_the_graph() -> None:
    """TE 2.11 cannot split weight gradients off an attn graph; moe_router holds none without shared experts."""
    scopes = ["attn", "moe_router", "moe_preprocess"]
    found = check(build({**QWEN, **OVERLAP, "knobs.graphs": scopes, "stack.te": "2.11"}))
    [finding] = [one for one in found if one.rule == "delay-wgrad-graph-te"]
    assert finding.fix == {"knobs.graphs": ["moe_router", "moe_preprocess"]}


def test_overlap_is_made_to_work_before_it_is_switched_off() -> None:
    """EO-D1 and EO-D7: the degree or the switch that it needs."""
    [finding] = [one for one in check(build({**CLEAN, "layout.ep": 1})) if one.rule == "ep-overlap-needs-ep"]
    assert (finding.fix or {}).get("layout.ep", 1) > 1
    late = {**CLEAN, "knobs.ep_overlap": False}
    [finding] = [one for one in check(build(late)) if one.rule == "delay-wgrad-needs-ep-overlap"]
    assert (finding.fix or {}).get("knobs.ep_overlap") is True


def test_a_format_that_the_chip_lacks_gets_one_fix() -> None:
    found = check(build({**QWEN, "knobs.precision": "nvfp4"}))
    fixes = [finding.fix["knobs.precision"] for finding in found if finding.fix and finding.at == "knobs.precision"]
    assert fixes == ["fp8-blockwise"]


def test_a_gate_with_a_date_yields_to_a_measurement() -> None:
    fields = {**QWEN, "cluster.chip": "gb200", "knobs.dispatcher": "deepep"}
    [finding] = [one for one in check(build(fields)) if one.rule == "dispatcher-supports-chip"]
    assert finding.severity == "warning"
    assert finding.fix == {"knobs.dispatcher": "alltoall"}  # what would run
    assert "hybridep" in finding.advice
    assert "2026-" in finding.problem
    assert "dispatcher-supports-chip" not in fired({**fields, "stack.measured": ["dispatcher"]})


HOST = {"model": "qwen3-30b-a3b", "target": "megatron-bridge", "cluster.chip": "h100", "cluster.gpus": 64}
HOST |= {"job.seq_len": 2048, "job.global_batch": 1024, "layout.tp": 2, "layout.ep": 8, "knobs.dispatcher": "deepep"}
HOST |= {"knobs.recompute": ["layernorm", "moe_act"]}
EXPOSED = {**HOST, "model": "qwen3-235b-a22b", "cluster.gpus": 256, "job.seq_len": 4096, "layout.tp": 8}
EXPOSED |= {"job.global_batch": 256, "layout.ep": 32, "layout.pp": 4, "layout.vpp": 4}
EXPOSED |= {"knobs.grad_reduce_overlap": False, "knobs.param_gather_overlap": False}


@pytest.mark.parametrize(
    ("fields", "wall", "first"),
    [(HOST, "host-wall", "knobs.graphs"), (EXPOSED, "communication-wall", "knobs.grad_reduce_overlap")],
)
def test_a_wall_is_a_note_with_gains(fields: dict[str, Any], wall: str, first: str) -> None:
    [finding] = [one for one in check(build(fields)) if one.rule == wall]
    assert finding.severity == "note"
    assert first in (finding.fix or {})
    assert "predicted " in finding.advice
    assert "%" in finding.problem
    assert RULES[wall].severity == "note"


def test_a_wall_names_no_cure_that_does_not_gain() -> None:
    for finding in check(build({**HOST, "knobs.graphs": ["attn", "moe_router", "moe_preprocess"]})):
        assert "knobs.graphs" not in (finding.fix or {})
        assert "predicted -" not in finding.advice


def of_rule(fields: dict[str, Any], rule: str) -> Finding:
    [finding] = [one for one in check(build(fields)) if one.rule == rule]
    return finding


@pytest.mark.parametrize(
    ("text", "is_older"),
    [("2.5.1+cu124", True), ("v2.5", True), ("nemo-25.11", False), ("v2.6", False), ("nightly", False), (None, False)],
)
def test_versions_are_read_as_people_write_them(text: str | None, is_older: bool) -> None:
    """What has no number is not known to be old, and `v2.6` does not hang."""
    assert older(text, "2.6") is is_older
    assert older("nvcr.io/nvidia/nemo:25.11", "26.02")
    assert not older("nemo-26.06", "26.02")


OSS = {"model": "gpt-oss-120b", "target": "megatron-bridge", "cluster.chip": "h100", "cluster.gpus": 64}
OSS |= {"job.global_batch": 512, "layout.ep": 8, "layout.pp": 2, "knobs.recompute": ["layernorm"]}
OSS |= {"knobs.ep_overlap": True, "knobs.max_connections": 32}
KIMI = {"model": "kimi-k2", "target": "megatron-bridge", "cluster.chip": "h200", "cluster.gpus": 1024}
KIMI |= {"job.global_batch": 4096, "layout.ep": 64, "layout.pp": 16, "layout.vpp": 2, "knobs.dispatcher": "deepep"}
KIMI |= {"knobs.precision": "fp8-blockwise", "knobs.recompute": ["layernorm", "moe_act"]}
NEXT = {"model": "qwen3-next-80b-a3b", "target": "megatron-bridge", "cluster.chip": "gb300", "cluster.gpus": 64}
NEXT |= {"job.global_batch": 256, "layout.ep": 32, "knobs.recompute": ["layernorm", "moe_act"]}


@pytest.mark.parametrize(
    ("fields", "rule", "cure"),
    [
        # Two chunks a rank do not fit alone: what makes room moves along.
        (OSS, "ep-overlap-needs-vpp", "layout.vpp"),
        # The names that the rule likes best are refused with delayed scaling, or with an old Transformer Engine.
        (
            {**KIMI, **OVERLAP, "knobs.recompute": ["full"], "knobs.precision": "fp8-tensor"},
            "ep-overlap-excludes-full-recompute",
            "knobs.recompute",
        ),
        (
            {**KIMI, **OVERLAP, "knobs.recompute": ["moe"], "stack.te": "2.5"},
            "ep-overlap-excludes-moe-recompute",
            "knobs.recompute",
        ),
    ],
)
def test_overlap_is_given_up_last(fields: dict[str, Any], rule: str, cure: str) -> None:
    fix = of_rule(fields, rule).fix or {}
    assert cure in fix
    assert "knobs.ep_overlap" not in fix


def test_without_room_overlap_is_given_up() -> None:
    """PP 32 x VPP 2 are more chunks than Kimi K2 has layers."""
    fields = {**KIMI, "layout.pp": 32, "layout.vpp": 1, "layout.ep": 32, "knobs.ep_overlap": True}
    assert (of_rule(fields, "ep-overlap-needs-vpp").fix or {}).get("knobs.ep_overlap") is False


def test_overlap_starts_with_all_to_all() -> None:
    """On any chip: a flex dispatcher follows by an A/B of its own."""
    fields = {**NEXT, "knobs.dispatcher": "local", "knobs.ep_overlap": True}
    assert of_rule(fields, "ep-overlap-dispatcher").fix == {"knobs.dispatcher": "alltoall"}


def test_a_graph_of_experts_makes_room_for_narrower_scopes() -> None:
    fields = {**NEXT, "knobs.dispatcher": "hybridep", "knobs.ep_overlap": True}
    fields |= {"knobs.graphs": ["moe"], "job.capacity_factor": 1.0}
    assert of_rule(fields, "graph-leaves-exchange-free").fix == {"knobs.graphs": ["moe_router", "moe_preprocess"]}


def test_a_degree_that_divides_the_ranks_comes_first() -> None:
    """48 divides the experts and is nearer to 60; with 64 the grids come out whole too."""
    assert (of_rule({**KIMI, "layout.ep": 60}, "ep-divides-experts").fix or {}).get("layout.ep") == 64


def test_forced_balance_of_a_dense_model_is_no_benchmark() -> None:
    fields = {**QWEN, "model": "llama3-70b", "layout.ep": 1, "knobs.precision": "fp8-blockwise"}
    assert "mfu-with-its-peak" not in fired({**fields, "job.routing": "forced-balance"})


def test_numbers_are_in_the_singular() -> None:
    one = {**OSS, "model.num_experts": 1, "layout.ep": 1, "job.mtp": 1}
    assert of_rule(one, "ep-overlap-needs-experts").problem.endswith("which has one expert")
    assert of_rule(one, "mtp-in-model").problem == "1 MTP depth; gpt-oss-120b has none"


@pytest.mark.parametrize(
    ("model", "chip", "gpus", "said"),
    [("kimi-k2", "h200", 128, "GPUs would hold it"), ("llama3.1-405b", "h100", 64, "layout.tp=8")],
)
def test_a_bare_plan_is_told_where_its_states_fit(model: str, chip: str, gpus: int, said: str) -> None:
    """With every degree at 1, one step of the ladder is too little; several degrees together hold the states."""
    fields = {"model": model, "target": "megatron-bridge", "cluster.chip": chip, "cluster.gpus": gpus}
    finding = of_rule({**fields, "job.global_batch": 2 * gpus}, "states-fit-memory")
    assert finding.fix or said in finding.advice
