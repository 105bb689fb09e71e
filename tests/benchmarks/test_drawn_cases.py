"""Tests of `benchmarks/drawn_cases.py`: a run that was stopped goes on after the cases of its ledger."""

import sys
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT
from scripts import load_script
from shipped_models import requests

script = load_script(ROOT / "benchmarks/drawn_cases.py", "benchmark_drawn_cases")


def test_a_stopped_run_goes_on_after_its_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def run_case(seed: str, number: int, folder: Path) -> Any:
        ran.append(f"{seed}/{number}")
        return script.Case("equal", [])

    def run(count: int, subject: str = "sft") -> int:
        words = ["drawn_cases.py", subject, "--ledger", str(ledger), "--seed", "7", "--count", str(count)]
        monkeypatch.setattr(sys, "argv", words)
        return int(script.main())

    ledger = tmp_path / "ledger.jsonl"
    monkeypatch.setattr(script, "SUBJECTS", {"sft": run_case, "export": run_case})
    assert run(2) == 0
    with ledger.open("a", encoding="utf-8") as file:
        file.write('{"draw": "sft 7/2", "ki')
    assert run(4) == 0
    assert ran == ["7/0", "7/1", "7/2", "7/3"]
    assert run(1, "export") == 0
    assert ran[4:] == ["7/0"]


def test_each_subject_runs_its_cases(tmp_path: Path) -> None:
    """A job, files of two kinds, and a request that costs no search; drawn exports have a test of their own."""
    assert script.run_sft("0", 0, tmp_path / "sft").fault == ""
    for number in range(2):
        folder = tmp_path / f"hostile {number}"
        folder.mkdir()
        assert script.run_hostile("0", number, folder).kind == "held"
    untrained = next(n for n, fields in enumerate(requests("0")) if fields["model"] == "granite-3.1-1b-a400m")
    assert script.run_shipped("0", untrained, tmp_path).kind in ("plan", "finding")


def test_a_fault_is_told_and_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also one that raises: the cases after it are run."""

    def run_case(seed: str, number: int, folder: Path) -> Any:
        assert number == 1, "number 0 raises"
        return script.Case("DIFFERENT", [], "how to repeat it")

    monkeypatch.setattr(script, "SUBJECTS", {"sft": run_case})
    monkeypatch.setattr(
        sys, "argv", ["drawn_cases.py", "sft", "--ledger", str(tmp_path / "ledger.jsonl"), "--count", "2"]
    )
    assert script.main() == 1
    said = capsys.readouterr().out
    assert all(words in said for words in ("number 0 raises", "how to repeat it", "'CRASH': 1, 'DIFFERENT': 1"))
    assert script.main() == 1
    assert "number 0 raises" not in capsys.readouterr().out


def test_requests_are_all_of_them_in_another_order() -> None:
    first, second = ([tuple(fields.values()) for fields in requests(seed)] for seed in "01")
    assert first != second
    assert len(set(first)) == len(first)
    assert set(first) == set(second)
