"""Traces whose walls are known by hand: nested, overlapping, out of order, several streams, missing ends."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from traces import (
    GEMM,
    NCCL,
    OPAQUE,
    Event,
    annotation,
    copy,
    device_annotation,
    kernel,
    launch,
    operator,
    write_trace,
)

from threefold.profile.analyze import profile_traces
from threefold.profile.measure import DeviceWalls
from threefold.report.profile import profile_text


def measured(tmp_path: Path, events: Sequence[Event], **written: Any) -> DeviceWalls:
    return profile_traces([write_trace(tmp_path / "trace.json", events, **written)]).top


def microseconds(found: DeviceWalls) -> dict[str, float]:
    """The numbers that each test states, rounded to nanoseconds."""
    seconds = {
        "span": found.span_seconds,
        "total": found.communication.total_seconds,
        "exposed": found.communication.exposed_seconds,
        "compute": found.compute_seconds,
        "unknown": found.unknown_seconds,
        "idle": found.host.idle_seconds,
    }
    return {name: round(value * 1e6, 3) for name, value in seconds.items()}


@pytest.mark.parametrize("form", ["object", "array"])
def test_a_collective_half_behind_compute(tmp_path: Path, form: str) -> None:
    events = [kernel(GEMM, 0, 100), kernel(NCCL, 50, 100, stream=20)]
    found = measured(tmp_path, events, form=form)
    assert microseconds(found) == {"span": 150, "total": 100, "exposed": 50, "compute": 100, "unknown": 0, "idle": 0}
    assert found.communication.hidden_fraction == pytest.approx(0.5)


def test_nested_collectives_count_once(tmp_path: Path) -> None:
    events = [kernel(NCCL, 0, 100, stream=20), kernel(NCCL, 20, 30, stream=21), kernel(NCCL, 90, 30, stream=22)]
    assert microseconds(measured(tmp_path, events))["total"] == 120


def test_compute_of_any_stream_hides(tmp_path: Path) -> None:
    events = [
        kernel(NCCL, 0, 100, stream=20),
        kernel(GEMM, 0, 30, stream=7),
        kernel(GEMM, 20, 30, stream=8),
        kernel("void at::native::elementwise_kernel<128, 2>", 80, 40, stream=9),
    ]
    found = microseconds(measured(tmp_path, events))
    assert (found["total"], found["exposed"], found["compute"]) == (100, 30, 90)


def test_copies_and_idle_time_hide_nothing(tmp_path: Path) -> None:
    events = [kernel(NCCL, 0, 100, stream=20), copy(10, 80), kernel(GEMM, 200, 10)]
    found = microseconds(measured(tmp_path, events))
    assert (found["exposed"], found["idle"], found["span"]) == (100, 100, 210)


def test_copies_between_host_and_device_have_a_rate(tmp_path: Path) -> None:
    """Both directions at once beside a GEMM of half the time; copies on the device are neither."""
    down, up = "Memcpy HtoD (Pinned -> Device)", "Memcpy DtoH (Device -> Pinned)"
    copies = [copy(20 * n, 20, 9, name=down, bytes=1_000_000) for n in range(5)]
    copies += [copy(50, 100, 10, name=up, bytes=4_000_000), copy(0, 10, 11, bytes=9_000_000)]
    found = profile_traces([write_trace(tmp_path / "trace.json", [kernel(GEMM, 0, 50), *copies])])
    links = found.top.links
    assert {name: (one.num_bytes, round(one.exposed_seconds * 1e6)) for name, one in links.items()} == {
        "host to device": (5_000_000, 50),
        "device to host": (4_000_000, 100),
    }
    assert [one.bytes_per_second for one in links.values()] == pytest.approx([50e9, 40e9])
    text = profile_text(found)
    assert "copies of gpu 0 between host and device" in text
    assert "50.0" in text
    assert found.to_json()["walls"]["link"]["device to host"]["bytes_per_second"] == pytest.approx(40e9)


def test_a_copy_without_bytes_has_no_rate(tmp_path: Path) -> None:
    found = profile_traces([write_trace(tmp_path / "trace.json", [kernel(GEMM, 0, 50), copy(0, 90)])])
    assert not found.top.links
    assert "between host and device" not in profile_text(found)


def test_a_copy_at_the_end_is_part_of_the_span(tmp_path: Path) -> None:
    assert microseconds(measured(tmp_path, [kernel(GEMM, 5, 10), copy(90, 15)]))["span"] == 100


def test_without_communication_the_hidden_fraction_is_none(tmp_path: Path) -> None:
    found = measured(tmp_path, [kernel(GEMM, 0, 10)])
    assert found.communication.hidden_fraction is None
    assert found.communication.total_seconds == 0


def test_the_order_of_events_does_not_matter(tmp_path: Path) -> None:
    events = [kernel(GEMM if i % 3 else NCCL, 7 * i, 10, stream=7 + i % 3) for i in range(60)]
    events += [operator("aten::mm", 7 * i - 3, 2, i + 1) for i in range(60)]
    first = microseconds(measured(tmp_path, events))
    random.Random(1).shuffle(events)
    assert microseconds(measured(tmp_path, events)) == first


def test_events_without_an_end_are_left_out_and_counted(tmp_path: Path) -> None:
    """A begin without an end, and a whole event without a length. Pairs of begin and end are events like others."""
    begin = {**kernel(GEMM, 100, 0), "ph": "B"}
    end = {"ph": "E", "pid": 0, "tid": 7, "ts": 140.0, "cat": "kernel", "name": GEMM}
    lost = {**kernel(NCCL, 150, 0, stream=20), "ph": "B"}
    for event in (begin, lost):
        del event["dur"]
    endless = kernel(NCCL, 160, 0, stream=21)
    del endless["dur"]
    events = [lost, end, endless, begin, kernel(GEMM, 0, 10)]
    profile = profile_traces([write_trace(tmp_path / "trace.json", events)])
    assert microseconds(profile.top) == {"span": 140, "total": 0, "exposed": 0, "compute": 50, "unknown": 0, "idle": 90}
    assert profile.top.num_unended == 2
    whole = profile_traces([write_trace(tmp_path / "whole.json", [begin, end, kernel(GEMM, 0, 10)])])
    assert profile.diagnosis.confidence < whole.diagnosis.confidence


def test_nested_begins_and_ends(tmp_path: Path) -> None:
    """The inner pair ends first, also where the file has them in another order."""
    halves = [("B", NCCL, 0), ("B", NCCL, 10), ("E", NCCL, 20), ("E", NCCL, 100)]
    events = [
        {"ph": phase, "cat": "kernel", "name": name, "pid": 0, "tid": 20, "ts": float(at), "args": {"stream": 20}}
        for phase, name, at in halves
    ]
    found = microseconds(measured(tmp_path, [events[2], events[0], events[3], events[1]]))
    assert (found["total"], found["span"]) == (100, 100)


def test_opaque_compute_on_a_side_stream_is_no_communication(tmp_path: Path) -> None:
    """The stream of the collectives carries a kernel that only its operator explains, and one that nothing does."""
    events = [
        kernel(NCCL, 0, 50, stream=20, operation="all_to_all", group="3"),
        operator("aten::mul", 40, 5, external=11),
        kernel(OPAQUE, 60, 40, stream=20, external=11),
        kernel("k2", 110, 10, stream=20),
    ]
    found = microseconds(measured(tmp_path, events))
    assert found == {"span": 120, "total": 50, "exposed": 50, "compute": 40, "unknown": 10, "idle": 20}


def test_opaque_kernels_by_metadata_operator_and_annotation(tmp_path: Path) -> None:
    events = [
        kernel(OPAQUE, 0, 10, operation="all_gather_into_tensor", group="1"),
        kernel(OPAQUE, 20, 10, external=5),
        operator("c10d::alltoall_base_", 15, 2, external=5),
        kernel(OPAQUE, 40, 10, correlation=77),
        launch(35, 2, 77),
        annotation("nccl:all_reduce", 34, 4),
        kernel(OPAQUE, 60, 10, stream=30),
        device_annotation("nccl:reduce_scatter", 60, 10, stream=30),
        kernel(OPAQUE, 80, 10, correlation=78),
        launch(75, 2, 78),
        operator("aten::addmm", 74, 4, external=6),
        kernel(OPAQUE, 100, 10, stream=31),
    ]
    found = microseconds(measured(tmp_path, events))
    assert (found["total"], found["compute"], found["unknown"]) == (40, 10, 10)


def test_the_device_with_the_longest_span_is_on_top(tmp_path: Path) -> None:
    events = [kernel(GEMM, 0, 10, device=0), kernel(NCCL, 3, 50, device=1), kernel(GEMM, 20, 5, device=1)]
    profile = profile_traces([write_trace(tmp_path / "trace.json", events)])
    said = profile.to_json()
    assert said["span_seconds"] == pytest.approx(50e-6)
    assert said["walls"]["communication"]["exposed_seconds"] == pytest.approx(45e-6)
    assert [one["device"] for one in said["devices"]] == ["gpu 0", "gpu 1"]
    assert said["devices"][0]["walls"]["communication"]["hidden_fraction"] is None


def test_compute_of_another_device_hides_nothing(tmp_path: Path) -> None:
    found = measured(tmp_path, [kernel(GEMM, 0, 50, device=0), kernel(NCCL, 0, 60, device=1)])
    assert microseconds(found)["exposed"] == 60


def test_idle_time_by_its_cause(tmp_path: Path) -> None:
    """Kernel 1 was launched at 15, while the device was idle from 10; kernel 2 long before it ran."""
    events = [
        kernel(GEMM, 0, 10, correlation=1),
        launch(-5, 2, 1),
        kernel(GEMM, 20, 10, correlation=2),
        launch(13, 2, 2),
        kernel(GEMM, 34, 10, correlation=3),
        launch(16, 2, 3),
    ]
    host = measured(tmp_path, events).host
    assert host.idle_seconds * 1e6 == pytest.approx(14)
    assert host.host_bound_seconds * 1e6 == pytest.approx(5)
    assert host.launch_gap_seconds * 1e6 == pytest.approx(9)
    assert (host.num_gaps, host.num_launches) == (2, 3)


def test_efficiency_against_the_roofline(tmp_path: Path) -> None:
    """8192 x 4096 x 4096 in bf16 takes 277.8 us at 989.4 TFLOP/s; one row is bound by memory: 33.57 MB at 4.8 TB/s."""
    shapes = {"Input Dims": [[8192, 4096], [4096, 4096]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}
    thin = {"Input Dims": [[1, 4096], [4096, 4096]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}
    events = [operator("aten::mm", 0, 5, external=1, **shapes), kernel(GEMM, 10, 555.6, external=1)]
    found = measured(tmp_path, events)
    assert found.gemm is not None
    assert found.gemm.efficiency == pytest.approx(0.5, rel=1e-3)
    events = [operator("aten::mm", 0, 5, external=1, **thin), kernel(GEMM, 10, 14.0, external=1)]
    found = measured(tmp_path, events)
    assert found.gemm is not None
    assert found.gemm.attainable_seconds == pytest.approx(33.57e6 / 4.8e12, rel=1e-2)
    assert found.gemm.shape_limit < 0.01


def test_absolute_times_of_early_releases(tmp_path: Path) -> None:
    """Microseconds since 1970 as whole numbers, ids as text, and capital categories."""
    origin = 1_700_000_000_000_000
    events = [kernel(GEMM, origin, 100), kernel(NCCL, origin + 50, 100, stream=20)]
    for event in events:
        event["cat"], event["args"]["stream"] = "Kernel", str(event["args"]["stream"])
    found = microseconds(measured(tmp_path, events))
    assert (found["total"], found["exposed"]) == (100, 50)


@pytest.mark.parametrize("seed", range(12))
def test_random_traces_agree_with_a_grid(tmp_path: Path, seed: int) -> None:
    """Whole microseconds, looked at one by one; the trace is gzipped, shuffled and indented."""
    draw = random.Random(seed)
    covered = {label: np.zeros(3000, bool) for label in ("communication", "compute", "copy", "unknown")}
    events = []
    for number in range(draw.randrange(1, 200)):
        start, length, stream = draw.randrange(2900), draw.randrange(1, 100), draw.randrange(6)
        label = draw.choice(list(covered))
        covered[label][start : start + length] = True
        if label == "copy":
            events.append(copy(start, length, stream=stream))
        elif label == "unknown":
            events.append(kernel(OPAQUE, start, length, stream=stream))
        elif draw.random() < 0.5:
            events.append(kernel(NCCL if label == "communication" else GEMM, start, length, stream=stream))
        else:
            name = "c10d::allreduce_" if label == "communication" else "aten::add"
            events.append(kernel(OPAQUE, start, length, stream=stream, external=number + 1))
            events.append(operator(name, 10 * number, 5, external=number + 1))
    draw.shuffle(events)
    path = write_trace(tmp_path / "trace.json.gz", events, indent=draw.choice([None, 1, 4]))
    found = microseconds(profile_traces([path]).top)
    busy = np.logical_or.reduce(list(covered.values()))
    spans = np.flatnonzero(busy)
    assert found["total"] == covered["communication"].sum()
    assert found["exposed"] == (covered["communication"] & ~covered["compute"]).sum()
    assert (found["compute"], found["unknown"]) == (covered["compute"].sum(), covered["unknown"].sum())
    assert found["span"] == spans[-1] + 1 - spans[0]
    assert found["idle"] == found["span"] - busy.sum()
