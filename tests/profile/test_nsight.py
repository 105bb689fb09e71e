"""SQLite exports of Nsight Systems, made from NVIDIA's documented schema: no report can be recorded here."""

from pathlib import Path

import pytest
from traces import GEMM, NCCL, OPAQUE, NsightExport

from threefold.profile.analyze import profile_traces
from threefold.units import GIB


def test_the_same_walls_as_in_a_trace_of_torch(tmp_path: Path) -> None:
    """Nanoseconds; compute hides 50 of 100 us, a copy hides nothing, and the last event is the copy."""
    export = NsightExport(tmp_path / "a.sqlite")
    export.kernel(GEMM, 1_000_000, 1_100_000)
    export.kernel(NCCL, 1_050_000, 1_150_000, stream=20)
    export.copy(1_120_000, 1_200_000)
    found = profile_traces([export.close()]).top
    assert found.span_seconds == pytest.approx(200e-6)
    assert found.communication.total_seconds == pytest.approx(100e-6)
    assert found.communication.exposed_seconds == pytest.approx(50e-6)


def test_ranges_around_the_launch_explain_opaque_kernels(tmp_path: Path) -> None:
    """By correlation to the launch, and by time and thread to the range; ids of two processes are not mixed up."""
    export = NsightExport(tmp_path / "a.sqlite")
    export.range("ncclAllReduce", 0, 100, is_shared=True)
    export.range("threefold.step", 0, 1000)
    export.launch(50, 60, 7)
    export.launch(50, 60, 7, pid=10)
    export.kernel(OPAQUE, 2000, 3000, correlationId=7)
    export.range("aten::mm, op_id = 5, sizes = [[8, 8], [8, 8]]", 200, 300)
    export.launch(250, 260, 8)
    export.kernel(OPAQUE, 4000, 5000, correlationId=8)
    export.range("without an end", 300, None)
    export.launch(350, 360, 9)
    export.kernel(OPAQUE, 6000, 7000, correlationId=9)
    found = profile_traces([export.close()]).top
    assert found.communication.total_seconds == pytest.approx(1e-6)
    assert found.compute_seconds == pytest.approx(1e-6)
    assert found.unknown_seconds == pytest.approx(1e-6)
    assert (found.num_steps, found.step_seconds) == (1, pytest.approx(1e-6))


def test_every_gpu_of_the_report_is_a_device(tmp_path: Path) -> None:
    export = NsightExport(tmp_path / "a.sqlite")
    for number in range(2):
        export.add("TARGET_INFO_GPU", vmId=1, id=number, name="NVIDIA H100 80GB HBM3", totalMemory=80 * GIB)
        export.kernel(GEMM, 0, 1000 + number, device=number, pid=20 + number)
    profile = profile_traces([export.close()])
    assert [one.device.key for one in profile.devices] == ["gpu 0 of process 20", "gpu 1 of process 21"]
    assert profile.top.device.key == "gpu 1 of process 21"
    assert profile.top.chip is not None
    assert (profile.top.chip.name, profile.top.device.memory_bytes) == ("h100", 80 * GIB)


def test_a_report_without_optional_tables(tmp_path: Path) -> None:
    """Tables are made when there is something to put into them; older releases lack columns."""
    export = NsightExport(tmp_path / "a.sqlite")
    export.kernel(GEMM, 0, 1000)
    for table in ("NVTX_EVENTS", "TARGET_INFO_GPU", "CUPTI_ACTIVITY_KIND_MEMSET", "CUPTI_ACTIVITY_KIND_RUNTIME"):
        export.database.execute(f"DROP TABLE {table}")
    export.database.execute("ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL DROP COLUMN globalPid")
    found = profile_traces([export.close()])
    assert found.top.device.key == "gpu 0"
    assert not found.top.host.has_launches
