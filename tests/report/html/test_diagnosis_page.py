"""The page of a diagnosis: one sound file with the verdict, the curves and the text, and no word of its sender."""

import random
from pathlib import Path

import pytest
from command_line import run as command
from job_logs import DEATHS, write_log
from markup_reader import read
from run_folders import noisy_seconds, run_plan, write_run
from snapshots import SnapshotFile, frames
from test_report_page import NASTY, check_sound

SECRET = f"Traceback: /home/ann/{NASTY} token=abcdef123456 on host: node17.corp"


def test_a_log_with_a_death(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planted = next(one for one in DEATHS if one.slug == "disk-full")
    log, out = tmp_path / "train.log", tmp_path / "page.html"
    seed = next(seed for seed in range(99) if random.Random(seed).choice((0, 1, 40)) == 40)
    failed = write_log(log, random.Random(seed), "megatron-lm", planted, "torchrun")
    with log.open("a") as file:
        file.write(f"[rank{failed}]: OSError: [Errno 28] No space left on device: {SECRET}\n")
    code, text, _ = command("diagnose", str(log), "--out", str(out), capsys=capsys)
    assert code == 0
    page = out.read_text(encoding="utf-8")
    check_sound(page)
    shown = read(page).text
    assert "disk-full" in shown
    assert f"high confidence, rank {failed}" in shown
    for said in text.splitlines()[1:8]:
        assert said.strip() in shown
    for word in ("/home/ann", "abcdef123456", "node17.corp"):
        assert word not in page


def test_a_run_and_a_snapshot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", run_plan(), noisy_seconds(0.1, 40, seed=1))
    snapshot = SnapshotFile()
    snapshot.segment(0x1000, 2**32)
    snapshot.alloc(0x1000, 3 * 2**30, frames("train.py:3 main"))
    path, out = tmp_path / "memory-0.pickle", tmp_path / "page.html"
    snapshot.write(path)
    code, _, _ = command("diagnose", str(run), str(path), "--out", str(out), capsys=capsys)
    assert code == 0
    page = out.read_text(encoding="utf-8")
    check_sound(page)
    shown = read(page).text
    for words in ("Step time", "Memory allocated", "Memory reserved", "millisecond"):
        assert words in shown


def test_a_page_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "a.log"
    log.write_text("step 1\n")
    code, _, err = command("diagnose", str(log), "--out", str(tmp_path / "absent" / "page.html"), capsys=capsys)
    assert code == 1
    assert "cannot write" in err
