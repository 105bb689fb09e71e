"""Traces of ranks on CPUs: of torch's profiler over gloo, and of known content."""

from pathlib import Path

import pytest
from traces import annotation, operator, write_trace

from threefold.layout.degrees import Layout
from threefold.profile.analyze import profile_traces, read_trace
from threefold.profile.measure import DeviceWalls, measure_devices

PROGRAM, BACKEND = 100, 300  # threads


def measured(tmp_path: Path, *events: dict[str, object], layout: Layout | None = None) -> DeviceWalls:
    trace = read_trace(write_trace(tmp_path / "trace.json", events))
    (found,) = measure_devices(trace, layout)[0]
    return found


def microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def test_compute_hides_a_collective_on_another_thread(tmp_path: Path) -> None:
    """The copy that gloo makes on its own thread is part of the collective; the outer operator covers the inner one."""
    found = measured(
        tmp_path,
        operator("c10d::allreduce_", 0, 5, 1, thread=PROGRAM),
        annotation("gloo:all_reduce", 2, 98, thread=BACKEND),
        operator("aten::copy_", 10, 50, 2, thread=BACKEND),
        operator("aten::linear", 20, 40, 3, thread=PROGRAM),
        operator("aten::addmm", 25, 30, 4, thread=PROGRAM),
        operator("aten::mul", 120, 10, 5, thread=PROGRAM),
    )
    assert found.device.is_cpu
    assert microseconds(found.communication.total_seconds) == 98
    assert microseconds(found.communication.exposed_seconds) == 58
    assert microseconds(found.compute_seconds) == 50
    assert (microseconds(found.span_seconds), microseconds(found.host.idle_seconds)) == (128, 20)


def test_an_operator_that_calls_a_collective_is_no_compute(tmp_path: Path) -> None:
    """Its other callees are; Python's autograd functions count by what they call."""
    found = measured(
        tmp_path,
        operator("_AllGatherLinear", 0, 100, 1),
        operator("aten::to", 0, 40, 2),
        operator("c10d::_allgather_base_", 10, 20, 3),
        operator("aten::mm", 50, 30, 4),
        annotation("gloo:all_gather", 12, 30, thread=BACKEND),
    )
    assert microseconds(found.communication.exposed_seconds) == 30
    assert microseconds(found.compute_seconds) == 30


def test_backends_that_record_nothing_count_by_their_operators(tmp_path: Path) -> None:
    found = measured(tmp_path, operator("c10d::allreduce_", 0, 50, 1), operator("aten::mm", 50, 30, 2))
    assert microseconds(found.communication.exposed_seconds) == 50


def test_of_messages_the_wait_counts(tmp_path: Path) -> None:
    """A message asked for at 0 arrives at 100; the program works until 70, and waits from there."""
    found = measured(
        tmp_path,
        operator("c10d::recv_", 0, 2, 1),
        operator("c10d::send", 2, 2, 2),
        annotation("gloo:recv", 0, 100),
        annotation("gloo:send", 2, 130),
        operator("aten::mm", 10, 60, 3),
        operator("aten::mm", 110, 10, 4),
        layout=Layout(pp=2, gpus=2),
    )
    assert microseconds(found.compute_seconds) == 70
    assert microseconds(found.communication.total_seconds) == 30
    assert microseconds(found.communication.exposed_seconds) == 30
    assert list(found.by_axis) == ["pp"]


def test_the_axis_is_that_of_the_range_around_the_asking_operator(tmp_path: Path) -> None:
    """First asked, first begun; the record itself runs on another thread, outside of every range."""
    found = measured(
        tmp_path,
        annotation("threefold.dispatch", 0, 20),
        operator("c10d::alltoall_base_", 5, 5, 1),
        operator("c10d::alltoall_base_", 30, 5, 2),
        annotation("gloo:all_to_all", 8, 10, thread=BACKEND),
        annotation("gloo:all_to_all", 40, 10, thread=BACKEND),
        operator("aten::mm", 60, 5, 3),
    )
    seconds = {axis: microseconds(one.total_seconds) for axis, one in found.by_axis.items()}
    assert seconds == {"ep": 10, "unknown": 10}


def record(rank: int, folder: str) -> None:
    """Two steps with an exchange in `threefold.dispatch` and an all-reduce beside the backward pass."""
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile, record_function

    torch.set_num_threads(1)
    weight, x = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True) as kept:
        for _ in range(2):
            with record_function("threefold.step"):
                with record_function("threefold.attention"):
                    y = torch.softmax(x @ weight, -1)
                with record_function("threefold.dispatch"):
                    received = torch.empty_like(y)
                    dist.all_to_all_single(received, y.detach())
                pending = dist.all_reduce(received, async_op=True)
                (y * y).sum().backward()
                assert pending is not None
                pending.wait()
    kept.export_chrome_trace(f"{folder}/rank-{rank}.json.gz")


def test_a_trace_of_torch_over_gloo(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from threefold.engine.verify.forked_ranks import run_ranks

    run_ranks(2, record, str(tmp_path))
    found = profile_traces([tmp_path])
    assert [device.rank for device in found.devices] == [0, 1]
    for device in found.devices:
        assert set(device.by_axis) == {"ep", "unknown"}
        assert 0 < device.communication.exposed_seconds <= device.communication.total_seconds <= device.span_seconds
        assert 0 < device.compute_seconds < device.span_seconds
        assert {"gemm", "attention"} <= set(device.compute_by_kind)
        assert "threefold.attention" in device.by_region
        assert device.num_steps == 2
        assert device.unknown_seconds == 0
