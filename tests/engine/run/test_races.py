"""Commands that meet in one folder: each ends with success or with one finding, and nothing is lost or half read.

Commands run in forks of this process. Where the order matters they wait for each other at a barrier, and no verdict
depends on how long something takes.
"""

import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_checkpoints import save_checkpoint, write_chats
from killed_runs import differences
from tiny_runs import tiny_plan
from torch import Tensor

from threefold.cli import finetune
from threefold.cli.main import main
from threefold.engine.run import checkpoints, lock
from threefold.engine.run.checkpoints import Checkpoints, open_checkpoint, read_checkpoint
from threefold.engine.run.folder import CHECKPOINTS, METRICS, open_run
from threefold.engine.run.lock import LOCK, RunLock
from threefold.engine.weights import convert
from threefold.findings import FindingsError
from threefold.plan.file import dump_plan

FORK = multiprocessing.get_context("fork")
LIMIT_SECONDS = 600.0  # after which a test fails: long enough for a machine with much other work
STEPS = 8  # what `differences` compares

pytestmark = pytest.mark.usefixtures("one_thread")


class Command:
    """A command of threefold, in a process of its own."""

    def __init__(self, said: Path, *words: str) -> None:
        self.said = said
        self.process: BaseProcess = FORK.Process(target=_run, args=(said, words))
        self.said.touch()
        self.process.start()

    def ends(self) -> tuple[int | None, str]:
        """The exit code, and what was said."""
        self.process.join(LIMIT_SECONDS)
        return self.process.exitcode, self.said.read_text()

    def has_ended_well_or_with(self, rule: str) -> bool:
        """Whether it ended well; fails where it has not, and has not one finding of this rule."""
        code, said = self.ends()
        assert "Traceback" not in said, said
        assert code in (0, 1), said
        if code == 1:
            assert said.count("error[") == 1, said
            assert f"error[{rule}]" in said, said
        return code == 0


def _run(said: Path, words: tuple[str, ...]) -> None:
    code = 1
    with said.open("w", encoding="utf-8", buffering=1) as out:
        sys.stdout = sys.stderr = out
        try:
            code = main(list(words))
        except BaseException:
            traceback.print_exc()
    os._exit(code)


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    started: list[Command] = []

    def start(*words: Any) -> Command:
        started.append(Command(tmp_path / f"said-{len(started)}.txt", *map(str, words)))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.join()


def then(function: Callable[..., Any], *actions: Callable[[], Any]) -> Callable[..., Any]:
    """The function, and the actions when it returns."""

    def acts(*args: Any, **named: Any) -> Any:
        found = function(*args, **named)
        for action in actions:
            action()
        return found

    return acts


def at_barrier(function: Callable[..., Any], number: int) -> Callable[..., Any]:
    """The function, which waits until so many processes have come to it."""
    barrier = FORK.Barrier(number)

    def waits(*args: Any, **named: Any) -> Any:
        barrier.wait(LIMIT_SECONDS)
        return function(*args, **named)

    return waits


def written_plan(path: Path, **fields: Any) -> Path:
    path.write_text(dump_plan(tiny_plan({"job.data": "synthetic", "job.steps": STEPS, **fields})), encoding="utf-8")
    return path


# Checkpoints: readers, run.keep and saves


def state(step: int) -> dict[str, Tensor]:
    """Tensors in several files' worth of bytes, all with the number of their step."""
    return {f"model.{name}": torch.full((64, 64), float(step)) for name in range(8)}


def save(kept: Checkpoints, step: int) -> None:
    kept.save(step, state(step), {"step": step}, wait=True)


def test_a_checkpoint_that_is_read_stays_until_it_is_not(tmp_path: Path) -> None:
    kept, reader = Checkpoints(tmp_path, keep=1), Checkpoints(tmp_path, keep=1)
    save(kept, 1)
    opened = reader.open_latest(print)
    assert opened is not None
    for step in (2, 3):
        save(kept, step)
    assert kept.steps() == [1, 3]
    tensors = opened.allocate_tensors()
    opened.fill(tensors)
    assert all((value == 1).all() for value in tensors.values())
    del opened
    save(kept, 4)
    assert kept.steps() == [4]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]


@pytest.mark.parametrize("read", ["open_latest", "open_newest"])
def test_a_reader_whose_checkpoint_is_removed_takes_the_newer_one(
    read: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run saves between the reader's look at the folder and its look at the checkpoint."""
    kept, reader, said = Checkpoints(tmp_path, keep=1), Checkpoints(tmp_path, keep=1), list[str]()
    save(kept, 1)

    def late(folder: Path, *args: int) -> Any:
        monkeypatch.undo()
        save(kept, 2)
        return open_checkpoint(folder, *args)

    monkeypatch.setattr(checkpoints, "open_checkpoint", late)
    opened = reader.open_latest(said.append) if read == "open_latest" else reader.open_newest()
    assert opened is not None
    assert opened.facts["step"] == 2
    assert said == []


def test_a_checkpoint_that_is_gone_for_one_rank_alone_is_a_finding(tmp_path: Path) -> None:
    with pytest.raises(FindingsError, match=r"checkpoint-is-there.*step-00000001 is gone"):
        read_checkpoint(tmp_path / "step-00000001")


def test_a_removal_that_is_killed_leaves_no_half_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Checkpoints(tmp_path, keep=1)
    save(kept, 1)
    monkeypatch.setattr(lock.shutil, "rmtree", lambda *args, **named: None)
    save(kept, 2)
    assert kept.steps() == [2]
    monkeypatch.undo()
    kept.remove_partial()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def _save_many(folder: Path, is_read: Any) -> None:
    kept = Checkpoints(folder, keep=1)
    for step in range(2, 30):
        save(kept, step)
    while not is_read.is_set():  # the reader has seen several
        step += 1
        save(kept, step)


def test_a_reader_next_to_a_run_that_saves_reads_whole_checkpoints(tmp_path: Path) -> None:
    save(Checkpoints(tmp_path, keep=1), 1)
    is_read, steps = FORK.Event(), set[int]()
    writer = FORK.Process(target=_save_many, args=(tmp_path, is_read))
    writer.start()
    try:
        while writer.is_alive():
            said: list[str] = []
            found = Checkpoints(tmp_path, keep=1).load_latest(said.append)
            assert said == []
            assert found is not None
            tensors, facts = found
            assert all((value == facts["step"]).all() for value in tensors.values())
            steps.add(facts["step"])
            if len(steps) >= 4:
                is_read.set()
    finally:
        is_read.set()
        writer.join(LIMIT_SECONDS)
    assert writer.exitcode == 0
    assert Checkpoints(tmp_path, keep=1).load_latest(print) is not None


def test_readers_of_a_run_that_saves_every_step(command: Callable[..., Command], tmp_path: Path) -> None:
    run, chats = tmp_path / "run", write_chats(tmp_path / "chats.jsonl", [(1, 2), (3, 4)])
    fields = {"job.steps": 1_000_000, "run.save_every": 1, "run.keep": 1}
    running = command("train", written_plan(tmp_path / "plan.toml", **fields), "--run", run, "--threads", 1)
    # Only a whole checkpoint counts: the first one is step-00000001.partial as long as it is being written.
    while not Checkpoints(run / CHECKPOINTS, keep=1).steps() and running.process.is_alive():
        pass
    readers = [
        ("eval", run, "--data", chats, "--task", "sft", "--seq-len", "64"),
        ("sample", run, "--prompt", "what", "--max-tokens", "3"),
        ("export-hf", run, "--out", tmp_path / "out"),
        ("report", run, "--out", tmp_path / "report.html"),
    ]
    for each in [command(*words) for words in readers]:
        code, said = each.ends()
        assert code == 0, said
        assert "Traceback" not in said
        assert "trying the one before" not in said
    assert running.process.is_alive()
    os.kill(running.process.pid or 0, signal.SIGKILL)
    running.ends()
    fewer = written_plan(tmp_path / "fewer.toml", **{**fields, "job.steps": 1})
    assert command("train", fewer, "--run", run).ends()[0] == 0


# Runs that begin at once


def test_runs_that_start_at_once_in_one_folder_are_one_run(
    command: Callable[..., Command], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take the lock at once. One runs; another is refused, or finds the run complete when that one has ended."""
    plan, run, calm = written_plan(tmp_path / "plan.toml"), tmp_path / "run", tmp_path / "calm"
    assert command("train", plan, "--run", calm, "--threads", 1).ends()[0] == 0
    monkeypatch.setattr("threefold.engine.train_setup.open_run", at_barrier(open_run, 3))
    started = [command("train", plan, "--run", run, "--threads", 1) for _ in range(3)]
    ended = [each.has_ended_well_or_with("run-is-alone") for each in started]
    assert any(ended)
    assert differences(calm, run) == []


def test_a_lock_file_that_a_failed_start_removes_does_not_admit_two_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start that fails removes file and folder after this one has opened the file, and before it locks it."""
    run, locked = tmp_path / "run", lock._try_lock
    run.mkdir()

    def removed_first(file: Any) -> bool:
        monkeypatch.undo()
        (run / LOCK).unlink()
        run.rmdir()
        return locked(file)

    monkeypatch.setattr(lock, "_try_lock", removed_first)
    first, second = RunLock(run, print), RunLock(run, print)
    first.acquire()
    with pytest.raises(FindingsError, match="run-is-alone"):
        second.acquire()
    first.close()
    second.acquire()
    second.close()


# Folders that two commands fill


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("checkpoint") / "hf"
    save_checkpoint(folder, "qwen3_moe")
    return folder


def one_of_two(started: list[Command]) -> None:
    """One command ends well, and the other with the finding that the folder is not free."""
    ended = [each.has_ended_well_or_with("convertible") for each in started]
    assert sorted(ended) == [False, True], [each.said.read_text() for each in started]


def test_two_fine_tunings_with_one_folder_are_one_run(
    checkpoint: Path, command: Callable[..., Command], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second finds the folder free, and comes to fill it when the first has imported and not begun to train."""
    chats, run = write_chats(tmp_path / "chats.jsonl", [(a, b) for a in range(5) for b in range(5)]), tmp_path / "run"
    words = ["finetune", checkpoint, "--data", chats, "--out", run, "job.seq_len=64", "job.global_batch=4"]
    words += ["job.steps=2", "run.tensorboard=false"]
    is_planned, is_filled, is_refused = FORK.Event(), FORK.Event(), FORK.Event()
    plan, fill = finetune._plan, finetune._import
    monkeypatch.setattr(finetune, "_plan", then(plan, is_planned.wait))
    monkeypatch.setattr(finetune, "_import", then(fill, is_filled.set, is_refused.wait))
    first = command(*words)
    monkeypatch.setattr(finetune, "_plan", then(plan, is_planned.set, is_filled.wait))
    monkeypatch.setattr(finetune, "_import", fill)
    assert not command(*words).has_ended_well_or_with("convertible")
    is_refused.set()
    assert first.has_ended_well_or_with("")
    assert read_checkpoint(run / CHECKPOINTS / "step-00000002")[1]["step"] == 2
    assert len((run / METRICS).read_text().splitlines()) >= 2


def test_two_imports_into_one_folder_are_one_import(
    checkpoint: Path, command: Callable[..., Command], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, calm = tmp_path / "run", tmp_path / "calm"
    assert command("import-hf", checkpoint, "--out", calm).ends()[0] == 0
    monkeypatch.setattr(convert, "claimed_folder", at_barrier(convert.claimed_folder, 2))
    started = [command("import-hf", checkpoint, "--out", out) for _ in range(2)]
    one_of_two(started)
    names = sorted(path.relative_to(calm) for path in calm.rglob("*") if path.is_file())
    assert names == sorted(path.relative_to(out) for path in out.rglob("*") if path.is_file())
    assert (out / "initial/00000.safetensors").read_bytes() == (calm / "initial/00000.safetensors").read_bytes()


def test_two_exports_into_one_folder_are_one_export(
    command: Callable[..., Command], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, out, calm = tmp_path / "run", tmp_path / "out", tmp_path / "calm"
    assert command("train", written_plan(tmp_path / "plan.toml"), "--run", run, "--threads", 1).ends()[0] == 0
    assert command("export-hf", run, "--out", calm).ends()[0] == 0
    monkeypatch.setattr(convert, "claimed_folder", at_barrier(convert.claimed_folder, 2))
    one_of_two([command("export-hf", run, "--out", out) for _ in range(2)])
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {
        path.name: path.read_bytes() for path in calm.iterdir()
    }
