"""Planted walls are diagnosed as what they are, and cures are those of the documents, priced and judged."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from repository import ROOT
from traces import GEMM, H200, NCCL, Event, kernel, launch, memory_event, operator, write_trace

from threefold.plan.file import read_plan
from threefold.plan.parse import change
from threefold.plan.plan import Plan
from threefold.profile.analyse import Profile, profile_traces
from threefold.profile.cures import WORDS

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
    assert found.cures[0].why == WORDS["host"][0]


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


def test_without_a_plan_cures_are_words(tmp_path: Path) -> None:
    said = profiled(tmp_path, steps(compute=50, exchange=60, gap=3)).to_json()["fixes"]
    assert [fix["why"] for fix in said] == list(WORDS["communication"])
    assert all(fix["set"] == {} and fix["predicted_gain"] is None for fix in said)


def test_with_a_plan_cures_are_fields_with_gains(tmp_path: Path) -> None:
    """Qwen3 on 16 GPUs without overlap: the exchange of experts is exposed, and overlap is the first cure."""
    plan = plan_of("qwen3-30b-a3b-4k-16xh100-bf16-no-overlap.toml")
    found = profiled(tmp_path, steps(compute=50, exchange=60, gap=3), plan)
    first = found.cures[0]
    assert first.changes["knobs.ep_overlap"] is True
    assert first.predicted_gain is not None
    assert first.predicted_gain > 0.05
    assert not [one for one in first.findings if one.severity == "error"]


def test_cures_of_axes_without_exposed_time_are_left_out(tmp_path: Path) -> None:
    plan = plan_of("qwen3-30b-a3b-4k-16xh100-bf16-no-overlap.toml")
    events = steps(compute=50, exchange=60, gap=3)
    for event in events:
        if "Process Group Description" in event["args"]:
            event["args"]["Process Group Description"] = "DATA_PARALLEL_GROUP"
    found = profiled(tmp_path, events, plan)
    assert list(found.top.by_axis) == ["dp"]
    assert not any("knobs.ep_overlap" in cure.changes for cure in found.cures)


def test_a_cure_says_what_it_would_break(tmp_path: Path) -> None:
    """Twice the microbatch where the global batch cannot be divided so: the finding stands beside the cure."""
    plan = plan_of("qwen3-30b-a3b-4k-16xh100-bf16-no-overlap.toml", job__global_batch=16, job__micro_batch=1)
    found = profiled(tmp_path, steps(compute=30, exchange=0, gap=40), plan)
    larger = [cure for cure in found.cures if "job.micro_batch" in cure.changes]
    assert larger
    assert all(any(one.severity == "error" for one in cure.findings) for cure in larger)
    assert {"rule", "severity", "at", "problem"} == set(larger[0].to_json()["findings"][0])


def test_the_order_of_cures_for_the_host(tmp_path: Path) -> None:
    """Graphs, garbage collection, a larger microbatch, affinity; what has no price says so."""
    plan = plan_of("qwen3-30b-a3b-4k-16xh100-bf16-no-overlap.toml", target="threefold", run__gc_every=0)
    found = profiled(tmp_path, steps(compute=30, exchange=0, gap=40), plan)
    fields = [next(iter(cure.changes)) for cure in found.cures]
    known = ("knobs.graphs", "run.gc_every", "job.micro_batch", "run.cores")
    assert fields == sorted(fields, key=known.index)
    assert {"knobs.graphs", "run.gc_every", "run.cores"} <= set(fields)
    assert {cure.predicted_gain for cure in found.cures if next(iter(cure.changes)).startswith("run.")} == {None}


def test_cures_for_memory_free_bytes(tmp_path: Path) -> None:
    capacity = H200["totalGlobalMem"]
    assert isinstance(capacity, int)
    plan = plan_of("qwen3-30b-a3b-4k-16xh100-bf16-no-overlap.toml")
    events = [kernel(GEMM, 0, 100), memory_event(1, int(0.95 * capacity), int(0.97 * capacity))]
    found = profiled(tmp_path, events, plan)
    fields = [next(iter(cure.changes)) for cure in found.cures]
    assert fields[0] == "knobs.recompute"
    assert "knobs.optimizer_offload" in fields
    runnable = [cure for cure in found.cures if not any(one.severity == "error" for one in cure.findings)]
    assert len(runnable) >= 3
    assert all("frees" in cure.why for cure in runnable)


@pytest.mark.parametrize("chip", ["h100", "h200", "b200"])
def test_chips_by_the_names_of_drivers(chip: str) -> None:
    from threefold.spec.chips import chip_of_device

    for name in (f"NVIDIA {chip.upper()}", f"NVIDIA {chip.upper()} 80GB HBM3", f"NVIDIA-{chip.upper()}-SXM"):
        found = chip_of_device(name)
        assert found is not None
        assert found.name == chip
    assert chip_of_device("AMD Instinct MI300X") is None
