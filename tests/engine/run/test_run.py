"""The folder of a run: what is written to it, and what happens where that cannot be."""

import errno
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import tiny_plan
from torch.distributed import HashStore

from threefold.engine import train as train_module
from threefold.engine.build import Parts
from threefold.engine.dist.join import World
from threefold.engine.run import lock as lock_module
from threefold.engine.run.checkpoints import Checkpoints
from threefold.engine.run.folder import CHECKPOINTS, METRICS, Metrics
from threefold.engine.run.lock import LOCK, RunLock
from threefold.engine.run.progress_display import ExperimentTrackers, Progress
from threefold.engine.train import train
from threefold.findings import FindingsError
from threefold.launch.watchdog import Watchdog

TINY = {"job.data": "synthetic", "job.steps": 6}


def quiet(text: str) -> None:
    pass


class FullDisk:
    """A file that takes some lines and no more; what it could not write fails once more when it is closed."""

    def __init__(self, file: Any, lines: int) -> None:
        self.file, self.left = file, lines

    def write(self, text: str) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.file.write(text)

    def flush(self) -> None:
        self.file.flush()

    def close(self) -> None:
        self.file.close()
        if self.left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")


def fill_up(monkeypatch: pytest.MonkeyPatch, lines: int) -> None:
    begin = Metrics.__init__

    def init(self: Metrics, *given: Any) -> None:
        begin(self, *given)
        self._file = FullDisk(self._file, lines)  # type: ignore[assignment]

    monkeypatch.setattr(Metrics, "__init__", init)


def test_metrics_that_cannot_be_written_end_the_run_with_everything_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_up(monkeypatch, 2)
    said: list[str] = []
    with pytest.raises(FindingsError) as caught:
        train(tiny_plan(TINY), tmp_path, said.append)
    [finding] = caught.value.findings
    assert (finding.rule, finding.at) == ("run-writable", str(tmp_path / METRICS))
    assert "No space left on device" in finding.problem
    assert said[-1] == "stopping after step 3, saving"  # the third line was the one that failed
    monkeypatch.undo()
    trainer = train(tiny_plan(TINY), tmp_path, said.append)
    assert "resuming after step 3 of 6" in said
    assert trainer.step == 6
    steps = [json.loads(line)["step"] for line in (tmp_path / METRICS).read_text().splitlines()]
    assert steps == [1, 2, 4, 5, 6]


def test_all_is_closed_where_closing_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of the loader that is left would keep the process alive."""
    closed: list[str] = []

    def close(name: str, act: Callable[[Any], None]) -> Callable[[Any], None]:
        def closes(self: Any) -> None:
            closed.append(name)
            act(self)
            raise OSError(errno.EDQUOT, "Disk quota exceeded")

        return closes

    for part in (Metrics, ExperimentTrackers, Progress, Parts):
        monkeypatch.setattr(part, "close", close(part.__name__, part.close))
    with pytest.raises(OSError, match="quota"):
        train(tiny_plan({**TINY, "job.steps": 1}), tmp_path, quiet)
    assert sorted(closed) == ["ExperimentTrackers", "Metrics", "Parts", "Progress"]


def test_metrics_are_json_for_every_reader(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, 0)
    metrics.write({"step": 1, "loss": math.nan, "grad_norm": math.inf, "least": -math.inf, "lr": 0.5})
    metrics.close()

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    read = json.loads((tmp_path / METRICS).read_text(), parse_constant=refuse)
    assert read == {"step": 1, "loss": None, "grad_norm": None, "least": None, "lr": 0.5}


@pytest.mark.parametrize(
    "tail", [b'{"step": 3, "name": "\xc3', b"\x00" * 40, b"\xff\xfe\n\x80\n"], ids=["half a letter", "zeros", "noise"]
)
def test_what_a_crash_left_behind_the_last_line_is_dropped(tail: bytes, tmp_path: Path) -> None:
    whole = b'{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 2.25}\n'
    (tmp_path / METRICS).write_bytes(whole + tail)
    Metrics(tmp_path, 2).close()
    assert (tmp_path / METRICS).read_bytes() == whole


@pytest.mark.parametrize(("behind", "left"), [(4, [1, 2, 2, 3, 4]), (2, [1, 2, 2])])
def test_metrics_that_number_steps_from_0_are_given_the_numbers_of_today(
    behind: int, left: list[int], tmp_path: Path
) -> None:
    """Earlier versions did. What they wrote past the checkpoint is dropped by its new number."""
    steps = [{"step": step, "loss": float(step)} for step in range(5)]
    before = [*steps[:2], {"step": 1, "eval_loss": 7.0}, *steps[2:]]
    (tmp_path / METRICS).write_text("".join(json.dumps(line) + "\n" for line in before))
    for _ in range(2):  # the second time they have them
        Metrics(tmp_path, behind).close()
        found = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
        assert [line["step"] for line in found] == left
        assert all(line["loss"] == line["step"] - 1 for line in found if "loss" in line)


@pytest.mark.parametrize("tail", ['{"step": 1e400}', "[" * 100_000], ids=["an infinity", "deep"])
def test_lines_that_are_no_metrics_are_dropped(tail: str, tmp_path: Path) -> None:
    whole = '{"step": 1, "loss": 2.5}\n'
    (tmp_path / METRICS).write_text(whole + tail)
    Metrics(tmp_path, 2).close()
    assert (tmp_path / METRICS).read_text() == whole


def test_files_of_a_run_that_cannot_be_written_are_findings(tmp_path: Path) -> None:
    (tmp_path / METRICS).mkdir()
    with pytest.raises(FindingsError, match=r"run-readable.*it is a folder"):
        Metrics(tmp_path, 0)
    with pytest.raises(FindingsError, match="run-writable"):
        Metrics(tmp_path / "nowhere", 0)


def test_the_save_behind_too_many_bad_steps_may_take_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog would end a rank that writes for longer than a step may take."""
    watches: list[Watchdog] = []
    limits: list[float | None] = []
    enter, save, step = Watchdog.__enter__, Checkpoints.save, train_module.train_step

    def entered(self: Watchdog) -> Watchdog:
        watches.append(self)
        return enter(self)

    def saved(self: Checkpoints, *given: Any, **named: Any) -> None:
        limits.append(watches[0]._phase_limit)
        save(self, *given, **named)

    monkeypatch.setattr(Watchdog, "__enter__", entered)
    monkeypatch.setattr(Checkpoints, "save", saved)
    monkeypatch.setattr(train_module, "train_step", lambda *given: replace(step(*given), applied=False))
    world = World(0, 1, 0, torch.device("cpu"), 0, HashStore())
    with pytest.raises(FindingsError, match="loss-is-finite"):
        train(tiny_plan({**TINY, "run.bad_steps": 0}), tmp_path, quiet, world=world)
    assert limits == [math.inf]
    assert (tmp_path / CHECKPOINTS / "step-00000001").exists()


def test_a_board_on_a_full_disk_is_given_up(tmp_path: Path) -> None:
    class Writer:
        def add_scalar(self, *given: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    said: list[str] = []
    board = ExperimentTrackers(tmp_path, False, None, {}, said.append)
    board._writer = Writer()
    for step in range(2):
        board.write(step, {"loss": 1.0})
    board.close()
    assert said == ["TensorBoard is not written any more: [Errno 28] No space left on device"]


# One run a folder


def test_a_folder_takes_one_run_at_a_time(tmp_path: Path) -> None:
    plan = tiny_plan({**TINY, "job.steps": 1})
    other = RunLock(tmp_path, quiet)
    other.acquire()
    other.write_holder()
    with pytest.raises(FindingsError, match=r"run-is-alone.*a run is under way in the folder: process \d+ on "):
        train(plan, tmp_path, quiet)
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]
    other.close()
    for _ in range(2):  # and a run lets go of it at its end
        assert train(plan, tmp_path, quiet).step == 1


def test_a_run_that_fails_lets_go_of_its_folder(tmp_path: Path) -> None:
    with pytest.raises(FindingsError, match="shard-readable"):
        train(tiny_plan({"job.data": "/no/such/shard.tok"}), tmp_path, quiet)
    RunLock(tmp_path, quiet).acquire()


def test_the_lock_of_a_machine_that_is_gone_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file server needs a while to notice. One that stays is refused in the end."""
    other = RunLock(tmp_path, quiet)
    other.acquire()
    (tmp_path / LOCK).write_text("process 7 on a machine far away\n")
    with pytest.raises(FindingsError, match="process 7 on a machine far away"):
        RunLock(tmp_path, quiet, lease_seconds=0).acquire()
    sleeps: list[float] = []

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        if len(sleeps) == 3:
            other.close()

    monkeypatch.setattr(lock_module.time, "sleep", sleep)
    said: list[str] = []
    RunLock(tmp_path, said.append, lease_seconds=60).acquire()
    assert said == [f"process 7 on a machine far away has {tmp_path}; waiting whether it is gone"]


def test_a_file_system_without_locks_is_run_on_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*given: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock_module.fcntl, "flock", flock)
    assert train(tiny_plan({**TINY, "job.steps": 1}), tmp_path, quiet).step == 1
