"""Dumps of real ranks that hang on gloo, and dumps as NCCL writes them."""

import json
from pathlib import Path
from typing import Any

import pytest
from gloo_hangs import CASES, record_hang

from threefold.diagnose.diagnosis import diagnose
from threefold.diagnose.hangs.hang import Hang
from threefold.diagnose.part import Context
from threefold.plan.parse import parse

# What each case of gloo_hangs.py is built to do: the disagreement, and the ranks that all others wait for.
KNOWN = {
    "late": ("missing", [3]),
    "chain": ("missing", [3]),
    "operation": ("operation", [1]),
    "sizes": ("sizes", [2]),
    "circle": ("missing", [0, 1, 2, 3]),
}


def read(paths: list[Path], context: Context | None = None) -> Hang:
    found = diagnose(paths, context)
    assert [part.kind for part in found.parts] == ["flight recorder"]
    assert not found.findings
    assert isinstance(found.parts[0], Hang)
    return found.parts[0]


@pytest.mark.parametrize("case", CASES)
def test_real_hang_is_found(case: str, tmp_path: Path) -> None:
    pickles = record_hang(case, tmp_path)
    sort, late = KNOWN[case]
    for paths in (pickles, [path.with_suffix(".json") for path in pickles]):
        said = read(paths).to_json()
        assert (said["sort"], said["late_ranks"]) == (sort, late)
    text = "\n".join(read(pickles).lines)
    assert f"in _{case}" in text  # where they are: the functions of gloo_hangs.py are named like their cases
    assert str(tmp_path) not in text


def entry(group: tuple[str, str], number: int, name: str, state: str, **more: Any) -> dict[str, Any]:
    """An entry as ProcessGroupNCCL records it."""
    is_p2p = "->" in name or "<-" in name
    return {
        "process_group": list(group),
        "collective_seq_id": 0 if is_p2p else number,
        "p2p_seq_id": number if is_p2p else 0,
        "profiling_name": f"nccl:{name}",
        "is_p2p": is_p2p,
        "time_created_ns": number,
        "input_sizes": [[8]],
        "output_sizes": [[8]],
        "state": state,
        "retired": False,
        "frames": [],
    } | more


def write(folder: Path, rank: int, groups: dict[str, tuple[str, list[int]]], entries: list[dict[str, Any]]) -> Path:
    config = {name: {"name": name, "desc": desc, "ranks": str(ranks)} for name, (desc, ranks) in groups.items()}
    path = folder / f"nccl_trace_rank_{rank}"
    path.write_text(json.dumps({"version": "2.10", "pg_config": config, "pg_status": {}, "entries": entries}))
    return path


def test_axis_is_that_of_the_plan_or_of_the_name(tmp_path: Path) -> None:
    """Eight ranks, EP 4: rank 6 does not come to the exchange of ranks 4 to 7."""
    ranks = [4, 5, 6, 7]
    group = ("7", "EXPERT_MODEL_PARALLEL_GROUP")
    paths = []
    for rank in range(8):
        own = ranks if rank >= 4 else [0, 1, 2, 3]
        calls = [entry(group, 1, "all_to_all", "completed")]
        if rank >= 4:
            calls += [entry(group, 2, "all_to_all", "started", input_sizes=[[rank]])] if rank != 6 else []
        paths.append(write(tmp_path, rank, {"7": (group[1], own)}, calls))
    fields = {"model": "qwen3-30b-a3b", "cluster.chip": "h100", "cluster.gpus": 8, "layout.ep": 4}
    plan = parse(fields).plan
    assert plan is not None
    for context in (Context(plan=plan), Context()):
        said = read(paths, context).to_json()
        assert (said["axis"], said["late_ranks"], said["group"]) == ("ep", [6], ranks)


def test_receiver_waits_for_a_sender_that_never_sends(tmp_path: Path) -> None:
    """Rank 0 waits in tp for rank 1, which waits in a receive from rank 3 of the pipeline, which is in no call."""
    groups = {"1": ("TENSOR_MODEL_PARALLEL_GROUP", [0, 1]), "2": ("PIPELINE_MODEL_PARALLEL_GROUP", [1, 3])}
    tp, pp = ("1", groups["1"][0]), ("2", groups["2"][0])
    done = entry(tp, 1, "all_gather", "completed")
    paths = [
        write(tmp_path, 0, groups, [done, entry(tp, 2, "all_gather", "started")]),
        write(tmp_path, 1, groups, [done, entry(pp, 1, "recv 0<-1", "started")]),
        write(tmp_path, 3, groups, []),
    ]
    assert read(paths).to_json()["late_ranks"] == [3]


def test_ranks_without_a_dump_are_named(tmp_path: Path) -> None:
    group = ("0", "default_pg")
    paths = [
        write(tmp_path, rank, {"0": (group[1], list(range(4)))}, [entry(group, 1, "all_reduce", "started")])
        for rank in (0, 1, 3)
    ]
    part = read(paths)
    assert part.to_json()["ranks_without_dump"] == [2]
    assert "no dump of rank 2" in part.lines[-1]


def test_calls_that_all_made_are_no_hang(tmp_path: Path) -> None:
    group = ("0", "default_pg")
    paths = [
        write(tmp_path, rank, {"0": (group[1], [0, 1])}, [entry(group, 1, "all_reduce", "completed")])
        for rank in (0, 1)
    ]
    assert "all members agree" in read(paths).lines[0]


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00echotR.pg_config",
        b"\x80\x02}q\x00(X\x07\x00\x00\x00entriesK\x01u.pg_config",
        b'{"pg_config": 1, "entries": [1]}',
        b'{"entries": ' + b"[" * 5000 + b'"pg_config"',
        b"\x80\x02pg_config",
        b"\x1f\x8b\x08broken",
    ],
)
def test_damaged_and_hostile_dumps_are_findings(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trace_rank_0"
    path.write_bytes(content)
    found = diagnose([path, tmp_path / "absent"])
    assert [finding.rule for finding in found.findings] == ["file-readable", "file-readable"]
