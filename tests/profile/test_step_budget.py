"""Budgets of steps whose parts are known by hand: windows, causes of gaps, producers, taxonomy, copies, ceilings."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from traces import GEMM, NCCL, Event, NsightExport, annotation, copy, kernel, launch, stream_wait, write_trace

from threefold.profile.analyze import profile_traces
from threefold.profile.ranks.job import JobTrace, ceiling

PACK = "void transformer_engine::permute_kernel<float>"


def job_of(tmp_path: Path, events: Sequence[Event], **options: Any) -> JobTrace:
    return profile_traces([write_trace(tmp_path / "trace.json", events, with_stack=0)], **options).job


def microseconds(job: JobTrace, *names: str) -> tuple[float, ...]:
    """The medians of some numbers of the slowest rank's step."""
    return tuple(round(job.slowest.steps.spread(name).median * 1e6, 3) for name in names)


def launched(name: str, issued: float, start: float, length: float, number: int, stream: int = 7) -> list[Event]:
    """A kernel whose launch returns at `issued`."""
    return [launch(issued - 1, 1, number), kernel(name, start, length, stream=stream, correlation=number)]


def step(start: float, length: float, number: int = 1) -> Event:
    return annotation(f"ProfilerStep#{number}", start, length)


# A step of 100 us: compute 0-20 and 60-90; a collective on another stream 20-50, for which compute waits.
WAITING = [
    step(0, 100),
    *launched(GEMM, 0, 0, 20, 1),
    *launched(NCCL, 5, 20, 30, 2, stream=20),
    launch(6, 1, 10, "cudaEventRecord"),
    launch(8, 1, 11, "cudaStreamWaitEvent"),
    stream_wait(7, 11, 20, 10),
    *launched(GEMM, 30, 60, 30, 3),
]


def test_every_part_of_a_gap_has_its_cause(tmp_path: Path) -> None:
    """Compute is absent 20-60 and 90-100. Until 30 the kernel was not issued, until 50 it waited for the collective,
    and until 60 nothing is known. No kernel ends the last gap."""
    job = job_of(tmp_path, WAITING)
    causes = ("launch_starved", "blocking", "dependency_stalled", "unresolved", "residual")
    assert microseconds(job, *causes) == (10, 20, 10, 10, 0)
    assert microseconds(job, "step", "busy", "idle", "compute_busy", "compute_absent") == (100, 80, 20, 50, 50)
    assert microseconds(job, "communication_busy", "non_communication_busy", "exposed") == (30, 50, 30)
    assert job.slowest.steps.budgets[0].disorder() == []
    assert {label: round(times.seconds * 1e6, 3) for label, times in job.slowest.steps.causes.blocked_by.items()} == {
        "NCCL unknown": 20
    }


def test_without_recorded_waits_the_same_gap_is_stalled(tmp_path: Path) -> None:
    events = [event for event in WAITING if event["cat"] != "cuda_sync"]
    job = job_of(tmp_path, events)
    assert microseconds(job, "launch_starved", "blocking", "dependency_stalled") == (10, 0, 30)
    assert any("waits for events were not recorded" in one for one in job.warnings())


def test_a_relay_leads_to_the_producer_behind_it(tmp_path: Path) -> None:
    """Stream 20 only passes a wait on: it runs nothing between the event of stream 30 and its own."""
    events = [
        step(0, 100),
        *launched(GEMM, 0, 0, 20, 1),
        *launched(NCCL, 2, 20, 60, 2, stream=30),
        launch(3, 1, 10, "cudaEventRecord"),
        launch(4, 1, 11, "cudaStreamWaitEvent"),
        stream_wait(20, 11, 30, 10),
        launch(6, 1, 12, "cudaEventRecord"),
        launch(8, 1, 13, "cudaStreamWaitEvent"),
        stream_wait(7, 13, 20, 12),
        *launched(GEMM, 10, 82, 18, 3),
    ]
    assert microseconds(job_of(tmp_path, events), "launch_starved", "blocking", "dependency_stalled") == (0, 60, 2)


def test_a_copy_on_the_stream_of_compute_blocks_it(tmp_path: Path) -> None:
    """A blocking copy of 40 us, from pageable memory; the next kernel was issued while it ran."""
    name = "Memcpy HtoD (Pageable -> Device)"
    events = [
        step(0, 100),
        *launched(GEMM, 0, 0, 20, 1),
        launch(3, 1, 2, "cudaMemcpyAsync"),
        copy(20, 40, stream=7, name=name, correlation=2, bytes=400_000),
        *launched(GEMM, 30, 60, 40, 3),
    ]
    job = job_of(tmp_path, events)
    assert microseconds(job, "launch_starved", "blocking", "dependency_stalled") == (10, 30, 0)
    [use] = job.slowest.copies
    assert (use.direction, use.stream, use.num_bytes, use.is_pinned) == ("HtoD", 7, 400_000, False)
    assert use.bytes_per_second == pytest.approx(1e10)
    assert use.blocking_seconds == pytest.approx(30e-6)
    assert use.is_bottleneck


def test_starved_while_the_host_waits_for_the_device(tmp_path: Path) -> None:
    events = [
        step(0, 100),
        *launched(GEMM, 0, 0, 20, 1),
        launch(2, 48, 9, "cudaStreamSynchronize"),
        *launched(GEMM, 60, 60, 40, 3),
    ]
    job = job_of(tmp_path, events)
    assert microseconds(job, "launch_starved", "starved_in_sync") == (40, 30)
    assert "synchronize host and device" in job.opportunities[0].look_at


def test_gaps_inside_a_replay_are_unresolved(tmp_path: Path) -> None:
    """The graph was launched at 30: until then the host is to blame, for the gap inside nobody is."""
    events = [
        step(0, 100),
        *launched(GEMM, 0, 0, 20, 1),
        launch(29, 1, 2, "cudaGraphLaunch"),
        kernel(GEMM, 35, 20, correlation=2),
        kernel(GEMM, 70, 30, correlation=2),
    ]
    job = job_of(tmp_path, events)
    assert microseconds(job, "launch_starved", "dependency_stalled", "unresolved") == (10, 5, 15)
    assert any("inside a replay" in one for one in job.warnings())


def test_packing_is_neither_network_nor_compute(tmp_path: Path) -> None:
    layout = "void deep_ep::layout::get_dispatch_layout<256, 32>(long const*)"
    events = [
        step(0, 100),
        kernel(GEMM, 0, 40),
        kernel(PACK, 40, 10),
        kernel(layout, 50, 5),
        kernel("void deep_ep::intranode::dispatch<8>", 55, 25, stream=20),
        kernel(GEMM, 80, 20),
    ]
    job = job_of(tmp_path, events)
    names = ("compute_busy", "packing", "routing", "communication_busy", "non_communication_busy", "busy")
    assert microseconds(job, *names) == (60, 10, 5, 25, 75, 100)
    use = job.slowest.libraries["DeepEP"]
    assert (use.num_kernels, use.network_seconds, use.routing_seconds) == (2, pytest.approx(25e-6), pytest.approx(5e-6))


def test_copies_hide_communication_only_as_an_upper_bound(tmp_path: Path) -> None:
    """Exposed is communication under no other operation at all."""
    events = [step(0, 100), kernel(NCCL, 0, 60, stream=20), copy(10, 20), kernel(GEMM, 50, 50)]
    assert microseconds(job_of(tmp_path, events), "exposed") == (30,)


def test_windows_by_range_leave_out_what_is_not_steady(tmp_path: Path) -> None:
    """The first step is warm-up, and a graph is captured in the third; the others have a median, a least and a most."""
    starts, lengths = (0, 400, 500, 650, 770), (400, 100, 150, 110, 120)
    events = [step(at, length, number) for number, (at, length) in enumerate(zip(starts, lengths, strict=True))]
    events += [kernel(GEMM, at, 50) for at in starts]
    events += [launch(510, 5, 99, "cudaStreamBeginCapture")]
    steps = job_of(tmp_path, events).slowest.steps
    assert [window.name for window, _ in steps.windows.dropped] == ["ProfilerStep#0", "ProfilerStep#2"]
    spread = steps.spread("step")
    seconds = [value * 1e6 for value in (spread.median, spread.least, spread.most)]
    assert (seconds, spread.count) == ([pytest.approx(110), pytest.approx(100), pytest.approx(120)], 3)


def test_windows_by_a_kernel_that_recurs(tmp_path: Path) -> None:
    """Without ranges: the embedding runs once a step of 100 us, the GEMM eight times."""
    events = [kernel("embedding_kernel", 100 * number, 5) for number in range(6)]
    events += [kernel(GEMM, 100 * number + 10 * place, 5) for number in range(6) for place in range(1, 9)]
    steps = job_of(tmp_path, events).slowest.steps
    assert steps.windows.source == "kernel embedding_kernel"
    assert (steps.spread("step").count, steps.spread("step").median) == (5, pytest.approx(100e-6))


def test_a_range_of_any_name_when_it_is_given(tmp_path: Path) -> None:
    events = [annotation(f"inner loop {number}", 100 * number, 90) for number in range(3)]
    events += [kernel(GEMM, 100 * number, 45) for number in range(3)]
    steps = job_of(tmp_path, events, step_range="inner loop").slowest.steps
    assert (steps.windows.source, steps.spread("compute_busy").median) == ("range inner loop", pytest.approx(45e-6))


def test_a_ceiling_is_time_over_the_rest(tmp_path: Path) -> None:
    """20 of 100 us: 100 / 80 - 1 is a quarter; disjoint ones add their times, not their gains."""
    assert ceiling(100, 20) == pytest.approx(0.25)
    job = job_of(tmp_path, WAITING)
    listed = {one.name: (round(one.seconds * 1e6, 3), one.status) for one in job.opportunities}
    assert listed == {
        "blocking: NCCL unknown": (20, "trace-verified"),
        "launch-starved": (10, "trace-verified"),
    }
    assert job.joint_ceiling == pytest.approx(100 / 70 - 1)


def test_the_profiler_against_steps_without_it(tmp_path: Path) -> None:
    job = job_of(tmp_path, WAITING, unprofiled_seconds=80e-6)
    assert job.perturbation.slowdown == pytest.approx(0.25)
    assert any("slows the step by 25.0%" in one for one in job.warnings())
    assert not job_of(tmp_path, WAITING, unprofiled_seconds=98e-6).perturbation.is_material


@pytest.mark.parametrize("seed", range(6))
def test_random_steps_agree_with_a_grid(tmp_path: Path, seed: int) -> None:
    """Whole microseconds, looked at one by one, with several steps and random launches."""
    draw = random.Random(seed)
    events, covered = [step(200 * n, 200, n) for n in range(3)], {}
    covered = {name: np.zeros(600, bool) for name in ("compute", "network", "copy")}
    for number in range(draw.randrange(1, 80)):
        start, length = draw.randrange(590), draw.randrange(1, 40)
        length, kind = min(length, 600 - start), draw.choice(list(covered))
        covered[kind][start : start + length] = True
        name = {"compute": GEMM, "network": NCCL}.get(kind)
        if name is None:
            events.append(copy(start, length, stream=50))
        else:
            events.append(kernel(name, start, length, stream=number, correlation=number + 1))
            events.append(launch(max(0, start - draw.randrange(60)), 1, number + 1))
    steps = job_of(tmp_path, events).slowest.steps
    busy = np.logical_or.reduce(list(covered.values()))
    alone = covered["network"] & ~covered["compute"] & ~covered["copy"]
    for window, budget in zip(steps.windows.windows, steps.budgets, strict=True):
        part = slice(*(round(edge * 1e6) for edge in (window.start, window.end)))
        want = [busy[part].sum(), covered["compute"][part].sum(), covered["network"][part].sum(), alone[part].sum()]
        found = (budget.busy, budget.compute_busy, budget.communication_busy, budget.exposed)
        assert [round(value * 1e6, 3) for value in found] == want
        assert budget.disorder() == []


def test_an_export_of_nsight_has_the_same_causes(tmp_path: Path) -> None:
    """Nanoseconds; waits are joined by eventSyncId, and their own times are 0."""
    export = NsightExport(tmp_path / "a.sqlite")
    export.range("train step 7", 0, 100_000)
    for number, issued in ((1, 0), (2, 5_000), (10, 7_000), (11, 9_000), (3, 30_000)):
        export.launch(max(0, issued - 1000), issued, number)
    export.kernel(GEMM, 0, 20_000, correlationId=1)
    export.kernel(NCCL, 20_000, 50_000, stream=20, correlationId=2)
    export.stream_wait(7, 11, 20, 10, 777)
    export.kernel(GEMM, 60_000, 90_000, correlationId=3)
    job = profile_traces([export.close()]).job
    assert microseconds(job, "launch_starved", "blocking", "dependency_stalled", "unresolved") == (10, 20, 10, 10)
    assert job.slowest.steps.windows.source == "range train step"


def test_what_an_export_says_about_its_capture(tmp_path: Path) -> None:
    export = NsightExport(tmp_path / "a.sqlite")
    export.kernel(GEMM, 0, 1000)
    export.add("ENUM_CUDA_MEM_KIND", id=1, name="PINNED", label="Pinned")
    export.add("ENUM_CUDA_MEM_KIND", id=2, name="DEVICE", label="Device")
    export.copy(1000, 2000, bytes=5_000, copyKind=1, srcKind=1, dstKind=2)
    export.add("DIAGNOSTIC_EVENT", timestamp=0, severity=2, text="Not all NVTX events might have been collected.")
    export.add("DIAGNOSTIC_EVENT", timestamp=0, severity=1, text="Profiling has started.")
    export.add("TARGET_INFO_SYSTEM_ENV", name="Hostname", value="node-3")
    export.add("META_DATA_EXPORT", name="EXPORT_PRODUCT_VERSION", value="2025.3.1")
    export.add("TARGET_INFO_GPU_METRICS", metricId=4, metricName="SMs Active, SM Issue [%]")
    for value in (20, 40):
        export.add("GPU_METRICS", timestamp=0, metricId=4, value=value)
    export.database.execute("DROP TABLE NVTX_EVENTS")
    job = profile_traces([export.close()]).job
    said = " ".join(job.warnings())
    assert "Nsight Systems 2025.3.1: Not all NVTX events might have been collected." in said
    assert "no NVTX ranges" in said
    assert "Profiling has started" not in said
    assert job.slowest.capture.host == "node-3"
    assert job.slowest.capture.metrics == {"SMs Active, SM Issue [%]": 30.0}
    [use] = job.slowest.copies
    assert (use.direction, use.num_bytes, use.is_pinned) == ("HtoD", 5_000, True)
