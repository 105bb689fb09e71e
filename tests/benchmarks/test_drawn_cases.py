"""Tests of `benchmarks/drawn_cases.py`: a run that was stopped goes on after the cases of its ledger."""

import sys
from pathlib import Path

import pytest
from drawn_layouts import draw_layout, resolve
from layout_runs import Outcome
from repository import ROOT
from scripts import load_script


def test_a_stopped_run_goes_on_after_its_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, ran = load_script(ROOT / "benchmarks/drawn_cases.py", "benchmark_drawn_cases"), []

    def run_case(seed: str, folder: Path) -> Outcome:
        ran.append(seed)
        drawn = draw_layout(0)
        return Outcome(drawn, resolve(drawn), "equal")

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
