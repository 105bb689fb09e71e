"""Reading run folders: whole ones, and ones that are empty, damaged, cut off or made by a stranger."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from run_folders import noisy_seconds, run_plan, write_run

from threefold.findings import FindingsError
from threefold.profile.readers import run_record
from threefold.profile.readers.run_record import read_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", run_plan(), noisy_seconds(0.1, 20, seed=1))


def append(folder: Path, text: str) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(text)


def refusal(folder: Path) -> str:
    with pytest.raises(FindingsError) as caught:
        read_run(folder)
    assert len(caught.value.findings) == 1
    finding = caught.value.findings[0]
    assert finding.advice or finding.fix
    return str(finding)


def test_columns_and_tokens(folder: Path) -> None:
    run = read_run(folder)
    assert run.num_steps == 20
    assert run.useful_tokens == pytest.approx(np.full(20, 8 * 128))
    assert run.tokens_seen[-1] == pytest.approx(20 * 8 * 128)
    assert run.findings == []


def test_steps_between_logged_ones_count(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", run_plan(), [0.1] * 3)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line, step in zip(lines, (1, 10, 20), strict=True):
        line["step"] = step
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_run(folder).tokens_seen == pytest.approx([1024, 10 * 1024, 20 * 1024])


def test_the_steady_window_is_the_contracts_then_our_own(tmp_path: Path) -> None:
    seconds = [9.0] * 8 + [1.0] * 12
    timing = {"timing": [{"steady_steps": [9, 20]}, {"steady_steps": "no"}, 7]}
    told = read_run(write_run(tmp_path / "told", run_plan(), seconds, contract=timing))
    assert told.is_steady().sum() == 12
    assert told.is_steady((3, 4)).sum() == 2
    assert read_run(write_run(tmp_path / "untold", run_plan(), seconds)).is_steady().sum() == 14
    # A huge number in a contract of a stranger is no step.
    wild = read_run(
        write_run(tmp_path / "wild", run_plan(), seconds, contract={"timing": [{"steady_steps": [1, 10**400]}]})
    )
    assert wild.is_steady().sum() == 14


def test_a_line_that_a_kill_cut_off_is_left_out_silently(folder: Path) -> None:
    append(folder, '{"step": 21, "loss": 4.')
    run = read_run(folder)
    assert run.num_steps == 20
    assert run.findings == []


def test_damaged_lines_are_counted(folder: Path) -> None:
    append(
        folder,
        "garbage\n[1]\n" + "[" * 5000 + "\n" + '{"step": "x"}\n{"step": 1e999}\n{"step": 22, "eval_loss": 4.0}\n',
    )
    run = read_run(folder)
    assert run.num_steps == 20
    assert [finding.severity for finding in run.findings] == ["warning"]
    assert "5 lines cannot be read" in run.findings[0].problem
    assert "line 21" in run.findings[0].problem


def test_a_later_line_of_a_step_counts(folder: Path) -> None:
    append(folder, '{"step": 20, "loss": 1.5, "seconds": 7.0}\n')
    run = read_run(folder)
    assert run.num_steps == 20
    assert run.columns["seconds"][-1] == 7.0


def test_numbers_that_are_none_are_absent(folder: Path) -> None:
    append(folder, '{"step": 21, "loss": null, "seconds": NaN, "memory_bytes": true, "tflops": ' + "9" * 400 + "}\n")
    run = read_run(folder)
    assert run.num_steps == 21
    assert all(np.isnan(run.columns[name][-1]) for name in ("loss", "seconds", "memory_bytes", "tflops"))
    assert not run.is_steady()[-1]
    assert run.last("memory_bytes") == 4_000_000


@pytest.mark.parametrize("content", [b"", b"\n\n", b"not json\n", b"\x00\xff" * 100, b'{"step": 1, "eval_loss": 3}\n'])
def test_a_file_without_steps_is_refused(folder: Path, content: bytes) -> None:
    (folder / "metrics.jsonl").write_bytes(content)
    assert "holds no step" in refusal(folder)


def test_files_that_are_none_are_refused(folder: Path, tmp_path: Path) -> None:
    metrics = folder / "metrics.jsonl"
    metrics.unlink()
    assert "No such file" in refusal(folder)
    os.mkfifo(metrics)
    assert "a FIFO" in refusal(folder)
    metrics.unlink()
    (tmp_path / "elsewhere").write_text("{}")
    metrics.symlink_to(tmp_path / "elsewhere")
    assert "a link out of" in refusal(folder)
    (folder / "plan.toml").unlink()
    assert "plan.toml" in refusal(folder)


def test_endless_lines_and_files_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append(folder, '{"step": 21, "x": "' + "y" * run_record.MAX_LINE_BYTES + '"}\n')
    assert "a line of more than" in refusal(folder)
    monkeypatch.setattr(run_record, "MAX_LINES", 10)
    assert "more than 10 lines" in refusal(folder)


@pytest.mark.parametrize("content", [b"[]", b"{", b"[" * 100_000, b"\xff"])
def test_a_damaged_contract_is_refused(folder: Path, content: bytes) -> None:
    (folder / "contract.json").write_bytes(content)
    assert "contract.json" in refusal(folder)


def test_another_model_than_the_contracts_is_refused(folder: Path) -> None:
    contract = json.loads((folder / "contract.json").read_text())
    contract["model"]["dim"] = 999
    (folder / "contract.json").write_text(json.dumps(contract))
    assert "another one than the run was started with" in refusal(folder)


@pytest.mark.parametrize("loads", ["[[1, 2], [3, -4]]", "7", "[[]]", '[["a"]]', "{", "[[1e999]]"])
def test_damaged_loads_are_no_loads(folder: Path, loads: str) -> None:
    (folder / "loads.json").write_text(loads)
    assert read_run(folder).loads in ([], [[float("inf")]])
