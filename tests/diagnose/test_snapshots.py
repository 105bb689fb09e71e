"""Memory snapshots of known content: the peak and what is live there, limits of a recording, differences, odd files."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from command_line import run
from damaged_files import Trap, trap_of
from snapshots import SnapshotFile, frames

from threefold.diagnose.diagnosis import diagnose
from threefold.diagnose.part import Context
from threefold.diagnose.redact import Redactor
from threefold.diagnose.snapshots.snapshot_part import SnapshotPart
from threefold.units import GIB, MIB

TORCH = "/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py:134 forward"
MODEL = frames(TORCH, "/home/someone/model.py:10 build")
ACTIVATION = frames("torch::autograd.cpp:3 apply", TORCH, "/home/someone/model.py:20 forward")
LOSS = frames("/home/someone/loss.py:7 cross_entropy")
BASE = 0x7F00_0000_0000


def part_of(*paths: Path, raw: bool = True) -> SnapshotPart:
    [part] = diagnose(paths, Context(redact=Redactor(raw))).parts
    assert isinstance(part, SnapshotPart)
    return part


def training(logits: int = 300) -> SnapshotFile:
    """Weights of 100 MiB, two activations of 50, logits of 300 for a moment; sizes in MiB."""
    made = SnapshotFile()
    made.segment(BASE, 1000 * MIB)
    made.alloc(BASE, 100 * MIB, MODEL)
    made.step("ProfilerStep#3", "START")
    for number in range(2):
        made.alloc(BASE + (100 + 50 * number) * MIB, 50 * MIB, ACTIVATION)
    made.alloc(BASE + 200 * MIB, logits * MIB, LOSS)
    made.free(BASE + 200 * MIB)
    for number in range(2):
        made.free(BASE + (100 + 50 * number) * MIB)
    made.step("ProfilerStep#3", "END")
    return made


def test_the_peak_is_that_of_a_hand_count(tmp_path: Path) -> None:
    part = part_of(training().write(tmp_path / "memory-0.pickle"))
    [device] = part.devices
    found = device.replay
    assert (found.peak.allocated, found.peak.active, found.peak.reserved) == (500 * MIB, 500 * MIB, 1000 * MIB)
    assert (found.baseline.allocated, found.end.allocated, found.peak_event) == (0, 100 * MIB, 4)
    assert device.live_lines() == {
        "/home/someone/loss.py:7 cross_entropy": 300 * MIB,
        "/home/someone/model.py:10 build": 100 * MIB,
        "/home/someone/model.py:20 forward": 100 * MIB,
    }
    assert found.fragments == pytest.approx(0.5)
    [step] = found.steps
    assert (step.before_bytes, step.added_bytes) == (100 * MIB, 400 * MIB)
    assert device.snapshot.rank == 0


def test_the_end_agrees_with_pytorchs_own_reader(tmp_path: Path) -> None:
    """PyTorch's viewer counts the same reserved and allocated bytes from the same content."""
    viz = pytest.importorskip("torch.cuda._memory_viz")
    content = training().content()
    assert "total_reserved: 1000.0MiB" in viz.segsum(content)
    assert "total_allocated: 100.0MiB" in viz.segsum(content)


def test_a_recording_that_began_late(tmp_path: Path) -> None:
    """Of 300 MiB of before, 200 stay until the end with their source, and 100 are freed: nobody knows who made them."""
    made = SnapshotFile()
    made.segment(BASE, 400 * MIB, is_recorded=False)
    made.alloc(BASE, 200 * MIB, MODEL, is_recorded=False)
    made.alloc(BASE + 200 * MIB, 100 * MIB, MODEL, is_recorded=False)
    made.alloc(BASE + 300 * MIB, 50 * MIB, LOSS)
    made.free(BASE + 200 * MIB)
    part = part_of(made.write(tmp_path / "snap_3.pickle"))
    [device] = part.devices
    assert (device.replay.baseline.allocated, device.replay.peak.allocated) == (300 * MIB, 350 * MIB)
    assert device.replay.baseline.reserved == 400 * MIB
    assert device.replay.unsourced_baseline_bytes == 100 * MIB
    said = " ".join(part.lines)
    assert "1 frees (100%) have no allocation in the file" in said
    assert "0.10 GiB of the baseline have no source line" in said
    assert "steps are not marked" in said
    assert device.live_lines()["no source recorded"] == 100 * MIB


@pytest.mark.slow
def test_a_full_ring_says_that_its_start_is_lost(tmp_path: Path) -> None:
    made = SnapshotFile()
    made.segment(BASE, GIB, is_recorded=False)
    for _ in range(100_000 // 4):
        made.alloc(BASE, MIB, LOSS)
        made.free(BASE)
        made.alloc(BASE, MIB, LOSS)
    made.events = made.events[:100_000]
    assert "it holds the newest 100,000 entries" in " ".join(part_of(made.write(tmp_path / "a.pickle")).lines)


def test_blocks_that_another_stream_still_uses_are_active(tmp_path: Path) -> None:
    made = SnapshotFile()
    made.segment(BASE, GIB)
    made.alloc(BASE, 100 * MIB, LOSS)
    made.free(BASE, is_completed=False)
    made.live[BASE + 200 * MIB] = (150 * MIB, MODEL)
    made.record("alloc", BASE + 200 * MIB, 150 * MIB, MODEL)
    [device] = part_of(made.write(tmp_path / "a.pickle")).devices
    assert (device.replay.peak.allocated, device.replay.peak.active) == (150 * MIB, 250 * MIB)


def test_what_b_has_that_a_has_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = training().write(tmp_path / "a_0.pickle")
    part = part_of(one, training(logits=450).write(tmp_path / "b_0.pickle"))
    assert part.difference() == {"/home/someone/loss.py:7 cross_entropy": 150 * MIB}
    code, out, _ = run("diagnose", str(tmp_path / "a_0.pickle"), str(tmp_path / "b_0.pickle"), capsys=capsys)
    assert code == 0
    assert "B against A: the peak is +150.00 MiB" in out
    assert "someone" not in out
    assert "loss.py:7 cross_entropy" in out


def test_snapshots_of_different_ranks_are_noted(tmp_path: Path) -> None:
    paths = [training().write(tmp_path / f"run_{rank}.pickle") for rank in (0, 3)]
    assert [found.rule for found in part_of(*paths).findings] == ["snapshots-of-equal-ranks"]


def test_an_oom_by_fragments_and_one_by_shortage(tmp_path: Path) -> None:
    """300 MiB are asked. 400 are free in two pieces, which is the allocator's; or 100 in one, which is not."""
    made = SnapshotFile()
    made.segment(BASE, 1000 * MIB)
    made.alloc(BASE + 200 * MIB, 600 * MIB, MODEL)
    made.oom(300 * MIB, 10 * MIB)
    part = part_of(made.write(tmp_path / "x_oom_rank-2.pickle"))
    [found] = part.findings
    assert (found.rule, "expandable_segments" in found.advice) == ("oom-by-fragments", True)
    assert part.devices[0].snapshot.rank == 2
    made = SnapshotFile()
    made.segment(BASE, 1000 * MIB)
    made.alloc(BASE, 900 * MIB, MODEL)
    made.oom(300 * MIB, 10 * MIB)
    assert part_of(made.write(tmp_path / "y_oom_rank-2.pickle")).findings == []


def test_lines_of_the_engine_have_terms(tmp_path: Path) -> None:
    made = SnapshotFile()
    made.segment(BASE, GIB)
    for number, file in enumerate(("moe/experts.py:5 forward", "optim/adamw.py:9 step", "dispatch/alltoall.py:3 run")):
        made.alloc(BASE + number * 100 * MIB, 10 * (number + 1) * MIB, frames(TORCH, f"/x/threefold/engine/{file}"))
    [device] = part_of(made.write(tmp_path / "a.pickle")).devices
    assert device.live_terms() == {"dispatch": 30 * MIB, "optimizer": 20 * MIB, "experts": 10 * MIB}


def test_a_snapshot_without_history(tmp_path: Path) -> None:
    content = training().content() | {"device_traces": [[]]}
    (tmp_path / "a.pickle").write_bytes(pickle.dumps(content))
    part = part_of(tmp_path / "a.pickle")
    assert part.devices[0].replay.peak.allocated == 100 * MIB
    assert "no history was recorded" in " ".join(part.lines)


def test_nothing_in_a_pickle_runs(tmp_path: Path) -> None:
    content = training().content() | {"allocator_settings": Trap(trap_of(tmp_path))}
    (tmp_path / "a.pickle").write_bytes(pickle.dumps(content))
    [finding] = diagnose([tmp_path / "a.pickle"]).findings
    assert "which is no part of a memory snapshot" in finding.problem
    assert not trap_of(tmp_path).exists()


@pytest.mark.parametrize(
    "change",
    [
        {"segments": None},
        {"segments": [7, {"blocks": "x", "total_size": "y"}]},
        {"device_traces": {"a": 1}},
        {"device_traces": [[{"action": 7, "addr": "x", "size": -5, "frames": 3}, None]]},
        {"external_annotations": [{"name": [], "stage": None, "time_us": "z"}]},
    ],
)
def test_odd_content_is_a_finding_or_an_answer(change: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "a.pickle").write_bytes(pickle.dumps(training().content() | change))
    found = diagnose([tmp_path / "a.pickle"])
    assert json.dumps(found.to_json())
    assert found.findings or all(part.lines for part in found.parts)


def test_lists_that_refer_to_each_other_are_bounded(tmp_path: Path) -> None:
    """Three thousand segments share a list of three thousand blocks: nine million, from a file of some kilobytes."""
    blocks = [{"address": 0, "size": 1, "state": "inactive", "frames": []}] * 3000
    content = {"segments": [{"device": 0, "blocks": blocks}] * 3000, "device_traces": [], "allocator_settings": {}}
    (tmp_path / "a.pickle").write_bytes(pickle.dumps(content))
    [finding] = diagnose([tmp_path / "a.pickle"]).findings
    assert "more than 4,000,000 events and blocks" in finding.problem
