"""The axis of a collective: by its group's description, its ranks, the range around it, or the library."""

from pathlib import Path

import pytest
from traces import NCCL, annotation, kernel, launch, operator, write_trace

from threefold.layout.degrees import Layout
from threefold.profile.analyze import read_trace
from threefold.profile.measure import measure_devices


def axes(
    tmp_path: Path, *events: dict[str, object], layout: Layout | None = None, rank: int = 0, **headers: object
) -> list[str]:
    info = {"backend": "nccl", "rank": rank, "world_size": 16, **headers}
    trace = read_trace(write_trace(tmp_path / "trace.json", events, distributedInfo=info))
    devices, _ = measure_devices(trace, layout)
    return list(devices[0].by_axis)


@pytest.mark.parametrize(
    ("description", "axis"),
    [
        ("EXPERT_MODEL_PARALLEL_GROUP", "ep"),
        ("EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", "ep"),
        ("EXPERT_TENSOR_PARALLEL_GROUP", "etp"),
        ("EXPERT_DATA_PARALLEL_GROUP", "edp"),
        ("TENSOR_MODEL_PARALLEL_GROUP", "tp"),
        ("PIPELINE_MODEL_PARALLEL_GROUP", "pp"),
        ("CONTEXT_PARALLEL_GROUP", "cp"),
        ("DATA_PARALLEL_GROUP_WITH_CP", "dp"),
        ("mesh_tp", "tp"),
        ("mesh_dp_shard_cp", "dp"),
        ("mesh_ep", "ep"),
        ("ep", "ep"),
        ("dp x cp", "dp"),
        ("edp x etp", "edp"),
        ("ep x etp", "ep"),
        ("default_pg", "unknown"),
        ("undefined", "unknown"),
    ],
)
def test_descriptions_of_groups(tmp_path: Path, description: str, axis: str) -> None:
    event = kernel(NCCL, 0, 10, operation="all_gather", group="4", description=description, group_size=4)
    assert axes(tmp_path, event) == [axis]


def test_ranks_against_the_groups_of_the_plan(tmp_path: Path) -> None:
    """Sixteen ranks with tp=2, cp=2, ep=4: rank 5 has tp (4, 5), cp (5, 7), dp (1, 5, 9, 13), ep (4, 5, 6, 7)."""
    layout = Layout(tp=2, cp=2, ep=4, gpus=16)
    events = [
        kernel(NCCL, 10 * number, 5, operation="allreduce", group=str(number), ranks=str(list(ranks)))
        for number, ranks in enumerate([(4, 5), (5, 7), (1, 5, 9, 13), (4, 5, 6, 7)])
    ]
    assert set(axes(tmp_path, *events, layout=layout, rank=5)) == {"tp", "cp", "dp", "ep"}


def test_ranks_of_the_header(tmp_path: Path) -> None:
    """The kernel names its group, and the file's header has the ranks and the description."""
    groups = [
        {"pg_name": "1", "pg_desc": "undefined", "ranks": [0, 1], "pg_size": 2},
        {"pg_name": "2", "pg_desc": "mesh_cp", "ranks": [0, 2], "pg_size": 2},
    ]
    events = [kernel(NCCL, 0, 5, operation="allreduce", group="1"), kernel(NCCL, 9, 5, operation="send", group="2")]
    layout = Layout(tp=2, ep=4, gpus=4)
    assert set(axes(tmp_path, *events, layout=layout, pg_config=groups)) == {"tp", "cp"}


def test_one_group_that_serves_two_axes(tmp_path: Path) -> None:
    """Without TP and CP, ep=4 and dp=4 are the same ranks: the kind of the collective decides."""
    layout = Layout(ep=4, gpus=4)
    events = [
        kernel(NCCL, 0, 5, operation="all_to_allv", group="1", ranks="[0, 1, 2, 3]"),
        kernel(NCCL, 10, 5, operation="_reduce_scatter_base", group="1", ranks="[0, 1, 2, 3]"),
    ]
    assert set(axes(tmp_path, *events, layout=layout)) == {"ep", "dp"}


def test_libraries_of_experts_and_ranges(tmp_path: Path) -> None:
    events = [
        kernel("void deep_ep::internode::dispatch<4>(int4*)", 0, 5),
        kernel(NCCL, 10, 5, correlation=1),
        launch(1, 1, 1),
        annotation("threefold.optimizer", 0, 3),
        kernel(NCCL, 20, 5),
    ]
    assert set(axes(tmp_path, *events)) == {"ep", "dp", "unknown"}


def test_exposed_time_of_each_axis(tmp_path: Path) -> None:
    """The union of each axis by itself; overlapping axes may add up to more than the whole."""
    events = [
        kernel(NCCL, 0, 30, stream=20, operation="all_to_all", description="ep"),
        kernel(NCCL, 20, 30, stream=21, operation="all_reduce", description="tp"),
        kernel("gemm", 10, 15),
    ]
    trace = read_trace(write_trace(tmp_path / "trace.json", events))
    found = measure_devices(trace)[0][0].by_axis
    seconds = {
        axis: (round(one.total_seconds * 1e6, 3), round(one.exposed_seconds * 1e6, 3)) for axis, one in found.items()
    }
    assert seconds == {"ep": (30, 15), "tp": (30, 25)}


def test_the_group_that_only_the_operator_names(tmp_path: Path) -> None:
    """Early releases have the metadata in `record_param_comms`, which the kernel is linked with."""
    meta = {"Collective name": "allreduce", "Process Group Name": "2", "Process Group Description": "mesh_tp"}
    events = [operator("record_param_comms", 0, 5, 8, **meta), kernel(NCCL, 10, 5, external=8)]
    assert axes(tmp_path, *events) == ["tp"]
