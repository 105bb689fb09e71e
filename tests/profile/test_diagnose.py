"""Planted walls are diagnosed as what they are, and advice follows what was seen, priced and judged."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from repository import ROOT
from traces import GEMM, H200, NCCL, Event, copy, kernel, launch, memory_event, operator, write_trace

from threefold.plan.file import read_plan
from threefold.plan.parse import change
from threefold.plan.plan import Plan
from threefold.profile.analyze import Profile, profile_traces
from threefold.remedies.catalogue import BY_NAME
from threefold.report.profile import profile_text

RECIPES = ROOT / "recipes"


def plan_of(name: str, **changes: object) -> Plan:
    plan = read_plan(str(RECIPES / name)).plan
    assert plan is not None
    return change(plan, {path.replace("__", "."): value for path, value in changes.items()})


def profiled(tmp_path: Path, events: Sequence[Event], plan: Plan | None = None) -> Profile:
    return profile_traces([write_trace(tmp_path / "trace.json", events)], plan)


def steps(compute: float, exchange: float, gap: float, count: int = 20) -> list[Event]:
    """Steps of compute, an exposed exchange of experts' tokens and a gap in which the host is late."""
    events, at = [], 1000.0
    for number in range(count):
        launched = at - 5 if number == 0 else at - 2
        events.append(launch(launched, 1.5, 2 * number + 1))
        events.append(kernel(GEMM, at, compute, correlation=2 * number + 1))
        at += compute
        if exchange:
            events.append(launch(launched + 2, 1, 2 * number + 2))
            meta = {"operation": "all_to_allv", "description": "EXPERT_MODEL_PARALLEL_GROUP"}
            events.append(kernel(NCCL, at, exchange, stream=20, correlation=2 * number + 2, **meta))
        at += exchange + gap
    return events


def test_a_slow_network(tmp_path: Path) -> None:
    found = profiled(tmp_path, steps(compute=50, exchange=60, gap=3))
    assert found.diagnosis.dominant == "communication"
    assert found.diagnosis.confidence > 0.8
    assert any("most of the exposed time is ep" in text for text in found.diagnosis.evidence["communication"])


def test_a_host_stall_between_launches(tmp_path: Path) -> None:
    found = profiled(tmp_path, steps(compute=30, exchange=0, gap=40))
    assert found.diagnosis.dominant == "host"
    assert found.top.host.host_bound_seconds > 0.9 * found.top.host.idle_seconds
    assert [piece.remedy.name for piece in found.advice] == [
        "graphs",
        "larger-microbatch",
        "collect-garbage",
        "pin-cores",
    ]


def test_idle_time_without_launches_is_less_sure(tmp_path: Path) -> None:
    events = steps(compute=30, exchange=0, gap=40)
    bare = profiled(tmp_path, [event for event in events if event["cat"] == "kernel"])
    assert bare.diagnosis.dominant == "host"
    assert bare.diagnosis.confidence < profiled(tmp_path, events).diagnosis.confidence
    assert bare.to_json()["walls"]["host"]["host_bound_seconds"] is None


def test_tiny_experts(tmp_path: Path) -> None:
    """Experts of 16 tokens each, one GEMM after the other: compute that reaches little of what a GPU can."""
    shapes = {"Input Dims": [[16, 2048], [2048, 768]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}
    events = []
    for number in range(64):
        events.append(operator("aten::mm", 10 * number, 3, number + 1, **shapes))
        events.append(kernel(GEMM, 1000 + 10 * number, 9.9, external=number + 1))
    found = profiled(tmp_path, events)
    assert found.diagnosis.dominant == "compute"
    assert found.top.gemm is not None
    assert found.top.gemm.efficiency < 0.1
    assert found.top.gemm.shape_limit < 0.1
    assert any("low" in text for text in found.diagnosis.evidence["compute"])


def test_a_nearly_full_card(tmp_path: Path) -> None:
    capacity = H200["totalGlobalMem"]
    assert isinstance(capacity, int)
    events = [*steps(compute=50, exchange=60, gap=3), memory_event(1, int(0.9 * capacity), int(0.97 * capacity))]
    found = profiled(tmp_path, events)
    assert found.diagnosis.dominant == "memory"
    said = found.to_json()["walls"]["memory"]
    assert said["headroom_bytes"] == capacity - int(0.97 * capacity)


def test_a_large_cache_of_the_allocator_is_no_wall(tmp_path: Path) -> None:
    """Reserved and not allocated: the allocator gives it back when it is needed. Calls of the driver say otherwise."""
    capacity = H200["totalGlobalMem"]
    assert isinstance(capacity, int)
    events = [kernel(GEMM, 0, 100), memory_event(1, int(0.5 * capacity), int(0.97 * capacity))]
    assert profiled(tmp_path, events).diagnosis.dominant == "compute"
    retry = launch(5, 40, 999, name="cudaFree")
    found = profiled(tmp_path, [*events, retry])
    assert found.diagnosis.dominant == "memory"
    assert found.top.allocator_calls == 1


def test_without_a_plan_advice_is_words(tmp_path: Path) -> None:
    said = profiled(tmp_path, steps(compute=50, exchange=60, gap=3)).to_json()["fixes"]
    ep = ("overlap-experts", "delay-weight-gradients", "dispatcher", "ep-inside-domain")
    assert [fix["remedy"] for fix in said] == list(ep)  # no other axis communicates, TP and ETP not either
    assert [fix["why"] for fix in said] == [BY_NAME[name].what for name in ep]
    assert all(fix["set"] == {} and fix["predicted_gain"] is None for fix in said)


def test_with_a_plan_advice_is_fields_with_gains(tmp_path: Path) -> None:
    """Qwen3 on 16 GPUs without overlap: the exchange of experts is exposed, and overlap comes first."""
    plan = plan_of("qwen3-30b-a3b-4k-16xh100-bf16-no-overlap.toml")
    found = profiled(tmp_path, steps(compute=50, exchange=60, gap=3), plan)
    first = found.advice[0]
    assert first.changes["knobs.ep_overlap"] is True
    assert first.gain is not None
    assert first.gain > 0.05
    assert first.trial is not None
    assert first.trial.is_legal


def test_remedies_of_axes_without_exposed_time_are_left_out(tmp_path: Path) -> None:
    plan = plan_of("qwen3-30b-a3b-4k-16xh100-bf16-no-overlap.toml")
    events = steps(compute=50, exchange=60, gap=3)
    for event in events:
        if "Process Group Description" in event["args"]:
            event["args"]["Process Group Description"] = "DATA_PARALLEL_GROUP"
    found = profiled(tmp_path, events, plan)
    assert list(found.top.by_axis) == ["dp"]
    assert not any({"knobs.ep_overlap", "knobs.dispatcher"} & piece.changes.keys() for piece in found.advice)


def test_what_a_rule_refuses_is_no_advice(tmp_path: Path) -> None:
    """Twice the microbatch where the global batch cannot be divided so."""
    plan = plan_of("qwen3-30b-a3b-4k-16xh100-bf16-no-overlap.toml", job__global_batch=16, job__micro_batch=1)
    found = profiled(tmp_path, steps(compute=30, exchange=0, gap=40), plan)
    assert found.advice
    assert not any("job.micro_batch" in piece.changes for piece in found.advice)


def test_the_order_of_advice_for_the_host(tmp_path: Path) -> None:
    """Graphs, a larger microbatch, garbage collection, affinity; what has no price says so."""
    plan = plan_of("qwen3-30b-a3b-4k-16xh100-bf16-no-overlap.toml", target="threefold", run__gc_every=0)
    found = profiled(tmp_path, steps(compute=30, exchange=0, gap=40), plan)
    fields = [next(iter(piece.changes)) for piece in found.advice if piece.wall == "host"]
    known = ("knobs.graphs", "job.micro_batch", "run.gc_every", "run.cores")
    assert fields == sorted(fields, key=known.index)
    assert {"run.gc_every", "run.cores"} <= set(fields)
    assert {piece.gain for piece in found.advice if next(iter(piece.changes)).startswith("run.")} == {None}


def test_advice_for_memory_frees_enough_for_a_reserve(tmp_path: Path) -> None:
    """97 % of the card are used: what is advised brings that below 92 %, by the bytes that the estimate frees."""
    capacity = H200["totalGlobalMem"]
    assert isinstance(capacity, int)
    plan = plan_of("qwen3-30b-a3b-4k-16xh100-bf16-no-overlap.toml", cluster__chip="h200")
    peak = int(0.97 * capacity)
    events = [kernel(GEMM, 0, 100), memory_event(1, int(0.95 * capacity), peak)]
    pieces = [piece for piece in profiled(tmp_path, events, plan).advice if piece.wall == "memory"]
    assert pieces[0].remedy.name == "selective-recompute"
    assert not any(path.startswith("layout") for piece in pieces for path in piece.changes)  # the plan runs as it is
    for piece in pieces:
        assert piece.trial is not None
        assert peak - piece.trial.freed_bytes <= 0.92 * plan.chip.memory_bytes


def kernels(*names: str) -> list[Event]:
    """A step of 100 us compute in kernels of these names."""
    return [kernel(name, 1000 + 100 * number, 100) for number, name in enumerate(names * 20)]


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("nvjet_qqtst_128x256_128x4_2x1_h_bz_coopA_TNT", "knobs.precision"),
        ("void transformer_engine::quantize_fp8<__nv_bfloat16, __nv_fp8_e4m3>", "knobs.precision"),
        ("_fc1_forward", "knobs.expert_fusion"),
        ("void cutlass::device_kernel<GroupProblemShape<int>>", "knobs.expert_fusion"),
    ],
)
def test_what_runs_already_is_not_advised(tmp_path: Path, name: str, field: str) -> None:
    """Whatever the plan says: its settings may be another run's, and kernels do not lie."""
    plan = plan_of("qwen3-235b-a22b-128k-128xgb200-bf16.toml")
    before = profiled(tmp_path, kernels(GEMM), plan).advice
    after = profiled(tmp_path, kernels(GEMM, name), plan).advice
    assert any(field in piece.changes for piece in before)
    assert not any(field in piece.changes for piece in after)


def test_a_run_in_fp8_is_not_told_to_use_it(tmp_path: Path) -> None:
    """By its plan, where its kernels have names that say nothing."""
    plan = plan_of("deepseek-v3-128k-256xh100-fp8.toml")
    assert plan.low_precision
    pieces = profiled(tmp_path, kernels(GEMM), plan).advice
    assert pieces
    assert not any("knobs.precision" in piece.changes for piece in pieces)


def test_a_trace_of_deepep_is_not_told_to_use_it(tmp_path: Path) -> None:
    """Nor is it told of TP or gradients, of which it has no traffic."""
    events = steps(compute=50, exchange=0, gap=45)
    events += [
        kernel("void deep_ep::internode::dispatch<8>", event["ts"] + 50, 40, stream=20) for event in events[1::2]
    ]
    said = profiled(tmp_path, events).advice
    assert {piece.remedy.name for piece in said} == {"overlap-experts", "delay-weight-gradients", "ep-inside-domain"}


def test_a_gain_is_never_more_than_the_time_that_was_seen(tmp_path: Path) -> None:
    """4 us of exchange in 100: throughput gains 4.2 % at most, whatever the estimate of the plan says."""
    plan = plan_of("qwen3-30b-a3b-4k-16xh100-bf16-no-overlap.toml")
    for piece in profiled(tmp_path, steps(compute=96, exchange=4, gap=0), plan).advice:
        if piece.wall == "communication":
            assert piece.gain is not None
            assert piece.gain <= 4 / 96 + 1e-6


def test_a_cpu_is_not_told_of_gpus(tmp_path: Path) -> None:
    plan = plan_of("demo-qwen3-moe-256-1xcpu-fp32.toml")
    events = [operator("aten::mm", 1000 + 10 * number, 9.5, number) for number in range(100)]
    fields = {path for piece in profiled(tmp_path, events, plan).advice for path in piece.changes}
    assert not fields & {
        "knobs.precision",
        "knobs.graphs",
        "knobs.dispatcher",
        "knobs.tp_overlap",
        "knobs.expert_fusion",
    }


def test_the_longest_kernels_are_listed_by_name_and_shape(tmp_path: Path) -> None:
    """Two shapes of one kernel, 3 x 40 and 2 x 50 us, and a copy of 30 us that says no shape."""
    bf16 = ["c10::BFloat16", "c10::BFloat16"]
    events, at = [], 1000
    for number, (rows, length) in enumerate([(64, 40), (16, 50)] * 2 + [(64, 40)]):
        dims = {"Input Dims": [[rows, 128], [128, 256]], "Input type": bf16}
        events.append(operator("aten::mm", at, 2, number + 1, **dims))
        events.append(kernel(GEMM, at + 5, length, external=number + 1))
        at += 100
    found = profiled(tmp_path, [*events, copy(at, 30)])
    said = [(one.name, one.shape, one.kind, one.calls, round(one.seconds * 1e6)) for one in found.longest]
    assert said == [
        (GEMM, "[[64,128],[128,256]] bfloat16", "compute", 3, 120),
        (GEMM, "[[16,128],[128,256]] bfloat16", "compute", 2, 100),
        ("Memcpy DtoD (Device -> Device)", "", "copy", 1, 30),
    ]
    text = profile_text(found)
    assert "longest kernels of " in text
    assert "[[64,128],[128,256]] bfloat16" in text


def test_data_that_starves_the_step_comes_first(tmp_path: Path) -> None:
    loading = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
    events = steps(compute=30, exchange=0, gap=40)
    ends = [event["ts"] + event["dur"] for event in events if event["cat"] == "kernel"]
    found = profiled(tmp_path, [*events, *(operator(loading, end + 1, 35, 900 + n) for n, end in enumerate(ends))])
    assert found.advice[0].remedy.name == "feed-data"
    assert not any(piece.remedy.name == "feed-data" for piece in profiled(tmp_path, events).advice)


@pytest.mark.parametrize("chip", ["h100", "h200", "b200"])
def test_chips_by_the_names_of_drivers(chip: str) -> None:
    from threefold.spec.chips import chip_of_device

    for name in (f"NVIDIA {chip.upper()}", f"NVIDIA {chip.upper()} 80GB HBM3", f"NVIDIA-{chip.upper()}-SXM"):
        found = chip_of_device(name)
        assert found is not None
        assert found.name == chip
    assert chip_of_device("AMD Instinct MI300X") is None
