"""Predicted snapshots: PyTorch's own viewer loads them, and their peaks are those of the rehearsal and the estimate."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from command_line import run
from repository import ROOT

from threefold.diagnose.diagnosis import diagnose
from threefold.diagnose.snapshots.predicted import Change, snapshot_of
from threefold.diagnose.snapshots.snapshot_part import SnapshotPart

TINY = str(ROOT / "recipes" / "tiny-qwen3-moe-256-1xcpu-fp32.toml")
LARGE = str(ROOT / "recipes" / "qwen3-30b-a3b-4k-16xh100-bf16-no-overlap.toml")


def part_of(path: Path) -> SnapshotPart:
    [part] = diagnose([path]).parts
    assert isinstance(part, SnapshotPart)
    return part


def judged(path: Path) -> dict[str, Any]:
    """The file as PyTorch's viewer loads it. Its summary raises where sizes do not add up."""
    viz = pytest.importorskip("torch.cuda._memory_viz")
    content: dict[str, Any] = pickle.loads(path.read_bytes())  # the test wrote it
    assert "total_reserved" in viz.segsum(content)
    assert "entries" in viz.trace(content)
    assert "MemoryViz" in viz.trace_plot(content)
    return content


def test_a_rehearsed_step_in_pytorchs_viewer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    out = tmp_path / "step.pickle"
    code, text, _ = run("dry-run", TINY, "--snapshot", str(out), "--json", capsys=capsys)
    assert code == 0
    judged(out)
    [device] = part_of(out).devices
    said = json.loads(text)["ranks"][0]
    assert device.replay.peak.allocated == said["peak_bytes"]
    assert {name: size for name, size in device.live_terms().items() if size} == {
        name: size for name, size in said["terms"].items() if size
    }
    assert device.replay.num_unmatched_frees == device.replay.num_lost == 0


def test_an_estimate_in_pytorchs_viewer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "step.pickle"
    code, text, _ = run("estimate", LARGE, "--snapshot", str(out), "--json", capsys=capsys)
    assert code == 0
    judged(out)
    [device] = part_of(out).devices
    stages = json.loads(text)["memory"]["stages"]
    assert device.replay.peak.allocated == pytest.approx(max(stage["peak_bytes"] for stage in stages), rel=1e-9, abs=64)
    assert set(device.live_terms()) <= set(stages[0]["terms"])


def test_released_addresses_are_used_again_and_resized_blocks_move(tmp_path: Path) -> None:
    changes = [Change(0, 1000, "weights"), Change(1, 512, "attention"), Change(1, -512, "attention")]
    changes += [Change(2, 512, "experts"), Change(2, 512, "experts"), Change(2, -1024, "experts")]
    (tmp_path / "a.pickle").write_bytes(snapshot_of(changes, num_initial=1))
    content = judged(tmp_path / "a.pickle")
    events = [(event["action"], event["size"]) for event in content["device_traces"][0]]
    released = [("free_requested", 512), ("free_completed", 512)]
    assert events == [
        ("alloc", 512), *released, ("alloc", 512), *released, ("alloc", 1024),
        ("free_requested", 1024), ("free_completed", 1024),
    ]  # fmt: skip
    first, second = (content["device_traces"][0][place]["addr"] for place in (0, 3))
    assert first == second
    [device] = part_of(tmp_path / "a.pickle").devices
    assert (device.replay.baseline.allocated, device.replay.peak.allocated) == (1000, 2024)


def test_a_file_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run("estimate", LARGE, "--snapshot", str(tmp_path / "no" / "a.pickle"), capsys=capsys)
    assert code == 1
    assert "cannot write" in err
