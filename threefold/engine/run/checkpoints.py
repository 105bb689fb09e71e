"""The checkpoints of a run: saves in the background, keeps the newest, and loads the newest that verifies.

`checkpoint_io.py` writes and reads one of them: torch DCP files, written aside, put in place by one rename.

A folder `step-00000100` is complete by construction: it appears by a rename after every file and its checksum were on
disk. A save that was killed leaves a folder that ends in `.partial` and is never loaded.

With many ranks each writes the elements it owns into a file of its own and reads those it needs, whatever layout wrote
them. All ranks must see one file system. A failure on one rank is raised on all of them, as the same finding.
"""

import math
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

from torch import Tensor

from threefold.engine.dist.consensus import (
    Outcome,
    RankFailedError,
    capture_outcome,
    run_on_all_ranks,
    run_on_first_rank,
)
from threefold.engine.dist.join import is_lost_peer_error
from threefold.engine.dist.mesh import TRIVIAL_GROUP, Group
from threefold.engine.run.checkpoint_io import (
    Loaded,
    OpenCheckpoint,
    open_checkpoint,
    read_checkpoint,
    step_folder,
    step_of_folder,
    write_checkpoint,
)
from threefold.engine.run.checkpoint_manifest import MANIFEST
from threefold.engine.run.dcp import CheckpointShard, State
from threefold.engine.run.lock import GONE, remove_checkpoint
from threefold.findings import Finding, FindingsError
from threefold.safe_files import check_inside

__all__ = ["MANIFEST", "CheckpointShard", "Checkpoints", "read_checkpoint", "write_checkpoint"]

MAX_LISTINGS = 5  # of a folder that seems empty


@dataclass(frozen=True, slots=True)
class BestEvaluation:
    """The lowest evaluation loss of a run so far, and how many evaluations since then were no better."""

    step: int = 0
    loss: float = math.inf
    num_since: int = 0

    def after(self, step: int, loss: float) -> "BestEvaluation":
        return BestEvaluation(step, loss) if loss < self.loss else replace(self, num_since=self.num_since + 1)

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "BestEvaluation | None":
        """Read the best evaluation from a checkpoint's facts; None where the run has not evaluated, or where the facts
        are none."""
        best = facts.get("best")
        best = best if isinstance(best, dict) else {}
        step, loss, num_since = (best.get(name) for name in ("step", "loss", "num_since"))
        if type(step) is not int or type(loss) is not float or type(num_since) is not int or not math.isfinite(loss):
            return None
        return cls(step, loss, num_since) if step > 0 else None


class Checkpoints:
    """Saves in the background, keeps the newest checkpoints, and loads the newest one whose checksums are right.

    `group` holds all ranks of the run on the CPU and is used by nothing else, because saving continues while steps
    communicate. Every rank makes the same calls.
    """

    def __init__(self, folder: Path, keep: int, group: Group | None = None) -> None:
        self.folder, self.keep, self.group = folder, keep, group or TRIVIAL_GROUP
        self._writer: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._complete_step: int | None = None  # the step last written or read here
        self._is_sound: dict[int, bool] = {}  # of each step that was written or verified here

    def save(
        self, step: int, tensors: State, facts: dict[str, Any], wait: bool = False, kept: int | None = None
    ) -> None:
        """Copy the tensors now and write them in the background. The next call reports a save that failed.

        Over all ranks every element is given once: shards by their owners, full tensors by one rank. The first rank's
        `facts` are written. The checkpoint of step `kept` is not removed. A step that is on disk already is not written
        again, because that would take it away for a moment.
        """
        self.finish()
        if step == self._complete_step:
            return
        snapshot = capture_outcome(self.group, lambda: {name: _snapshot(value) for name, value in tensors.items()})
        self._writer = threading.Thread(target=self._write, args=(step, snapshot, facts, kept), daemon=False)
        self._writer.start()
        if wait:
            self.finish()

    def finish(self) -> None:
        """Wait for the save under way and raise its failure as a finding.

        A lost peer is no problem of the disk: that error is raised as it is, and all ranks are restarted.
        """
        if self._writer:
            self._writer.join()
            self._writer = None
        if self._failure:
            failure, self._failure = self._failure, None
            if is_lost_peer_error(failure):
                raise failure
            raise _refuse(
                "checkpoint-writable",
                self.folder,
                f"the checkpoint could not be written: {failure}",
                "free space or choose another folder; earlier checkpoints are untouched",
            ) from failure

    def _write(self, step: int, snapshot: Outcome, facts: dict[str, Any], kept: int | None) -> None:
        try:
            write_checkpoint(self.path(step), snapshot, facts, self.group)
            self._complete_step = step
            self._is_sound[step] = True
            self._remove_old(step, kept)
        except Exception as error:  # reported by finish(), in the thread that can act on it
            self._failure = error

    def _remove_old(self, newest: int, kept: int | None) -> None:
        """Remove all that are older than the newest `keep` sound ones. Damaged ones take no place of sound ones, and
        those that somebody reads stay until the next save.

        Checkpoints that this process neither wrote nor loaded are verified before they count. Later steps are damaged
        ones that loading skipped.
        """
        if self.group.rank:
            return
        sound = 0
        for step in reversed([step for step in self.steps() if step <= newest]):
            if sound >= self.keep and step != kept:
                remove_checkpoint(self.path(step))
            elif self._verify(step):
                sound += 1

    def _verify(self, step: int) -> bool:
        if step not in self._is_sound:
            outcome = capture_outcome(TRIVIAL_GROUP, lambda: open_checkpoint(self.path(step)))
            self._is_sound[step] = not outcome.findings and outcome.problem is None
        return self._is_sound[step]

    def steps(self) -> list[int]:
        """Steps with a checkpoint in place, oldest first."""
        # A file system of several machines may list a folder in parts, and miss both the checkpoint that goes and the
        # one that comes.
        return next((steps for _ in range(MAX_LISTINGS) if (steps := self._list_steps())), [])

    def _list_steps(self) -> list[int]:
        try:
            check_inside(self.folder, self.folder.parent)
            with os.scandir(self.folder) as entries:  # kinds come with the names: a folder that has gone is still one
                names = [entry.name for entry in entries if entry.is_dir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            problem = f"checkpoints cannot be listed: {error.strerror or error}"
            advice = "put a folder of checkpoints there; for another disk, put the whole run there with --run"
            raise _refuse("checkpoint-whole", self.folder, problem, advice) from None
        return sorted(step for step in map(step_of_folder, names) if step is not None)

    def path(self, step: int) -> Path:
        return self.folder / step_folder(step)

    def remove_partial(self) -> None:
        """Remove what killed saves left. Only the run itself may call this: others would remove a save under way."""
        if self.group.rank == 0:
            for partial in self.folder.glob("*.partial"):
                shutil.rmtree(partial, ignore_errors=True)

    @overload
    def load_latest(self, say: Callable[[str], None]) -> Loaded | None: ...

    @overload
    def load_latest(self, say: Callable[[str], None], want: State) -> dict[str, Any] | None: ...

    def load_latest(self, say: Callable[[str], None], want: State | None = None) -> Loaded | dict[str, Any] | None:
        """Load the newest checkpoint whose checksums are right; damaged ones are reported and skipped by all ranks.

        Returns full tensors and facts, or fills the tensors of `want` in place and returns the facts; None where there
        is no checkpoint.
        """
        opened = self.open_latest(say)
        if opened is None:
            return None
        tensors = opened.allocate_tensors() if want is None else {}
        self._fill(opened, tensors if want is None else _without_missing_rng(want, opened))
        self._complete_step = step_of_folder(opened.folder.name)
        return (tensors, opened.facts) if want is None else opened.facts

    def open_latest(self, say: Callable[[str], None]) -> OpenCheckpoint | None:
        """Open the newest checkpoint that is whole; `say` prints damaged ones. None where there are none."""
        self.finish()
        problems: list[Finding] = []
        steps = run_on_first_rank(self.group, self.steps)
        while steps:
            step = steps.pop()
            opened, damage = self._open(self.path(step))
            self._is_sound[step] = opened is not None
            if opened is not None:
                return opened
            if _is_gone(damage) and step not in (newer := run_on_first_rank(self.group, self.steps)):
                steps, problems = newer, []
                continue
            problems += damage
            say(f"{damage[0].problem}; trying the one before")
        if problems:
            raise FindingsError(problems)
        return None

    def open_best(self, newest: OpenCheckpoint, say: Callable[[str], None]) -> OpenCheckpoint:
        """The checkpoint of the lowest evaluation loss, as `newest` knows it; `newest` where there is none."""
        best = BestEvaluation.of(newest.facts)
        if best is None or self.path(best.step) == newest.folder:
            return newest
        checkpoint, damage = self._open(self.path(best.step))
        if checkpoint is None:
            say(f"{damage[0].problem}; taking {newest.folder.name}")
            return newest
        say(
            f"step {best.step}, the best by its evaluation loss of {best.loss:.4f}; --newest takes {newest.folder.name}"
        )
        return checkpoint

    def open_newest(self) -> OpenCheckpoint | None:
        """Open the newest checkpoint, or raise what is wrong with it; None where there is no checkpoint."""
        while steps := self.steps():
            try:
                return open_checkpoint(self.path(steps[-1]))
            except FindingsError as error:
                if not _is_gone(error.findings) or steps[-1] in self.steps():
                    raise
        return None

    def _open(self, folder: Path) -> tuple[OpenCheckpoint | None, list[Finding]]:
        """The checkpoint, or findings of any rank about what is wrong with it. Each rank verifies some of the files."""
        mine = capture_outcome(self.group, lambda: open_checkpoint(folder, self.group.rank, self.group.size))
        try:
            run_on_all_ranks(self.group, lambda: mine.result() is None)  # what is open stays on its rank
        except FindingsError as error:
            return None, error.findings
        except RankFailedError as error:
            return None, _unloadable(folder, error).findings
        return mine.value, []

    def _fill(self, opened: OpenCheckpoint, want: State) -> None:
        try:
            run_on_all_ranks(self.group, lambda: opened.fill(want))
        except RankFailedError as error:
            raise _unloadable(opened.folder, error) from error


def _is_gone(damage: list[Finding]) -> bool:
    return any(finding.rule == GONE for finding in damage)


def _without_missing_rng(want: State, opened: OpenCheckpoint) -> State:
    """`want` without the random state of a GPU where the checkpoint was saved on a CPU."""
    stored = opened.manifest.tensors
    return {name: value for name, value in want.items() if name in stored or name != "rng.cuda"}


def _unloadable(folder: Path, error: RankFailedError) -> FindingsError:
    problem = f"{folder.name} cannot be loaded: {error}"
    return _refuse("checkpoint-whole", folder, problem, "use an earlier checkpoint")


def _snapshot(value: Tensor | CheckpointShard) -> Tensor | CheckpointShard:
    return value.snapshot() if isinstance(value, CheckpointShard) else value.detach().to("cpu", copy=True)


def _refuse(rule: str, at: Path, problem: str, advice: str) -> FindingsError:
    return FindingsError([Finding(rule=rule, at=str(at), problem=problem, advice=advice)])
