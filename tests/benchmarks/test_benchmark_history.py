"""Tests of `benchmarks/history.py`: which times of a result file are kept, and what is called slower."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from scripts import load_script

SCRIPT = Path(__file__).parents[2] / "benchmarks/history.py"


@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = load_script(SCRIPT, "benchmark_history")
    monkeypatch.setattr(module, "RECORD", tmp_path / "history")
    return module


def result(ms: float, gpu: str = "H200", **more: Any) -> str:
    rows = [{"layers": 8, "micro": 1, "ours": {"ms": ms, "tflops": 500.0, "wall_ms": 9.0}}]
    return json.dumps(
        {"machine": {"gpu": gpu, "torch": "2.11.0+cu130"}, "rows": rows, "earlier_run": {"ms": 1.0}} | more
    )


def test_times_are_found_by_their_paths_and_in_milliseconds(history: ModuleType) -> None:
    found = dict(history.times_in(json.loads(result(7.5)) | {"a": {"kernel_us": 250, "step_seconds": 2}, "b_ms": None}))
    assert found == {"rows/8 1/ours/ms": 7.5, "a/kernel_us": 0.25, "a/step_seconds": 2000}


def test_a_time_of_each_side_is_found(history: ModuleType) -> None:
    found = dict(
        history.times_in({"rows": {"layers": {"ms": {"bf16": 250.0, "fp8": 214.0, "note": "x"}, "ratio": 1.17}}})
    )
    assert found == {"rows/layers/ms/bf16": 250.0, "rows/layers/ms/fp8": 214.0}


def test_a_result_keeps_its_commit_and_machine(history: ModuleType) -> None:
    entry = history.entry_of("step-h200-2026-11-16", result(7.5), "abc", "2026-11-20")
    assert (entry.benchmark, entry.commit, entry.date) == ("step-h200", "abc", "2026-11-16")
    assert entry.machine == "H200, torch 2.11.0"
    assert history.entry_of("step", result(7.5, date="2026-11-15"), "abc", "2026-11-20").date == "2026-11-15"
    assert history.entry_of("facts", "{}", "abc", "2026-11-20") is None


def test_what_got_slower_is_said(history: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    made = [
        history.entry_of("step", result(ms, gpu), f"{n}" * 40, f"2026-11-1{n}")
        for n, (ms, gpu) in enumerate([(10.0, "H200"), (5.0, "B200"), (12.0, "H200")])
    ]
    assert history.add(made) == 3
    assert history.add(made) == 0  # known already
    assert history.say(history.read(), limit=0.05) == 1
    said = capsys.readouterr().out
    assert "slower  1.20x  rows/8 1/ours/ms: 10 -> 12 ms (0000000 -> 2222222)" in said
    assert history.say(history.read(), limit=0.25) == 0
    assert history.say(history.read(["another"]), limit=0.0) == 0


def test_curves_are_drawn(history: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "curves.png"
    history.plot(history.read(), picture)
    assert not picture.exists()  # nothing to draw yet
    history.add([history.entry_of("step", result(ms), "a", f"2026-11-1{ms:.0f}") for ms in (1.0, 2.0)])
    history.plot(history.read(), picture)
    assert picture.stat().st_size > 1000


def test_the_record_of_the_repository_can_be_read() -> None:
    lines = [line for file in (SCRIPT.parent / "results/history").glob("*.jsonl") for line in file.open()]
    assert len(lines) > 40
    assert all(set(json.loads(line)) == {"benchmark", "commit", "date", "machine", "ms"} for line in lines)
