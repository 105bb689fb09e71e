"""Full disks, read-only folders and two runs in one folder, as `threefold train` meets them with one and two ranks.

Each gives one finding and exit code 1, and loses nothing: the run goes on when there is room.
"""

import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from killed_runs import differences
from repository import ROOT
from tiny_runs import tiny_plan

from threefold.engine.run.checkpoints import Checkpoints, read_checkpoint
from threefold.engine.run.folder import CHECKPOINTS
from threefold.plan.file import dump_plan

HANG_SECONDS = 600.0  # after which a test fails: long enough for a machine with much other work
STEPS = 8  # what `differences` compares
FIELDS = {"job.data": "synthetic", "job.steps": STEPS, "run.save_every": 1, "run.keep": 2}
LONG = {"job.steps": 1_000_000}  # only a signal ends it


def words_of(ranks: int, folder: Path, plans: Path, **fields: Any) -> list[str]:
    plan = tiny_plan({**FIELDS, "cluster.gpus": ranks, "layout.ep": ranks, **fields})
    path = plans / f"{ranks}.toml"
    path.write_text(dump_plan(plan), encoding="utf-8")
    return [sys.executable, "-m", "threefold", "train", str(path), "--run", str(folder), "--threads", "1"]


def train(ranks: int, folder: Path, plans: Path, **fields: Any) -> "subprocess.CompletedProcess[str]":
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    words = words_of(ranks, folder, plans, **fields)
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=HANG_SECONDS)


def assert_one_finding(done: "subprocess.CompletedProcess[str]", rule: str, reason: str) -> None:
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    assert "Traceback" not in said
    assert said.count("error[") == 1, said
    assert f"error[{rule}]" in done.stdout
    assert reason in done.stdout


def mount(folder: Path, *options: str) -> None:
    if os.geteuid() or not shutil.which("mount"):
        pytest.skip("only root mounts")
    command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "none", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on which a test mounts a small file system."""
    folder = tmp_path / "disk"
    folder.mkdir()
    yield folder
    while os.path.ismount(folder):
        subprocess.run(["umount", str(folder)], check=True)


RANKS = pytest.mark.parametrize("ranks", [1, 2])
RANKS_SLOW = pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])


@pytest.mark.slow
@RANKS
def test_a_disk_that_fills_up_costs_nothing_but_time(ranks: int, disk: Path, tmp_path: Path) -> None:
    """There is room for two checkpoints and not for a third, which would replace the first."""
    calm = tmp_path / "calm"
    done = train(ranks, calm, tmp_path)
    assert done.returncode == 0, done.stderr
    checkpoint = max((calm / CHECKPOINTS).iterdir())
    size = sum(path.stat().st_size for path in checkpoint.iterdir())
    mount(disk, f"size={int(2.6 * size)}")
    run = disk / "run"
    assert_one_finding(train(ranks, run, tmp_path), "checkpoint-writable", os.strerror(errno.ENOSPC))
    assert Checkpoints(run / CHECKPOINTS, 2).steps() == [1, 2]
    for step in (1, 2):
        assert read_checkpoint(run / CHECKPOINTS / f"step-{step:08d}")[1]["step"] == step
    assert sorted(path.name for path in (run / CHECKPOINTS).iterdir()) == ["step-00000001", "step-00000002"]
    mount(disk, "remount", f"size={int(8 * size)}")
    done = train(ranks, run, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resuming after step 2 of 8" in done.stderr
    assert differences(calm, run) == []


@RANKS_SLOW
def test_a_disk_that_is_full_from_the_start(ranks: int, disk: Path, tmp_path: Path) -> None:
    mount(disk, "size=64k")
    with suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1024))
    assert_one_finding(train(ranks, disk / "run", tmp_path), "run-writable", os.strerror(errno.ENOSPC))


@RANKS
def test_a_folder_that_nobody_may_write(ranks: int, disk: Path, tmp_path: Path) -> None:
    mount(disk, "size=64k", "ro")
    assert_one_finding(train(ranks, disk / "run", tmp_path), "run-writable", os.strerror(errno.EROFS))


@RANKS_SLOW
def test_a_second_run_in_a_folder_is_refused_and_the_first_goes_on(ranks: int, tmp_path: Path) -> None:
    run = tmp_path / "run"
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    out = (tmp_path / "first.txt").open("w+")
    first = subprocess.Popen(words_of(ranks, run, tmp_path, **LONG), env=env, stdout=out, stderr=out)
    try:
        end = time.monotonic() + HANG_SECONDS
        while not Checkpoints(run / CHECKPOINTS, 2).steps():
            assert first.poll() is None
            assert time.monotonic() < end
            time.sleep(0.02)
        assert_one_finding(train(ranks, run, tmp_path, **LONG), "run-is-alone", "a run is under way")
        seen = max(Checkpoints(run / CHECKPOINTS, 2).steps())
        while max(Checkpoints(run / CHECKPOINTS, 2).steps()) < seen + 3:
            assert first.poll() is None
            assert time.monotonic() < end
            time.sleep(0.02)
        first.terminate()
        assert first.wait(HANG_SECONDS) == 0
    finally:
        first.kill()
        first.wait()
        out.close()
    last = Checkpoints(run / CHECKPOINTS, 2).steps()[-1]
    assert read_checkpoint(run / CHECKPOINTS / f"step-{last:08d}")[1]["step"] == last
