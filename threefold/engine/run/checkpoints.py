"""The checkpoints of a run: saves in the background, keeps the newest, and loads the newest that verifies.

`checkpoint_io.py` writes and reads one of them: torch DCP files, written aside, put in place by one rename.

A folder `step-00000100` is complete by construction: it appears by a rename after every file and its checksum were on
disk. A save that was killed leaves a folder that ends in `.partial` and is never loaded.

With many ranks each writes the elements it owns into a file of its own and reads those it needs, whatever layout wrote
them. All ranks must see one file system. A failure on one rank is raised on all of them, as the same finding.
"""

import shutil
import threading
from collections.abc import Callable
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
    allocate_tensors,
    fill_from,
    read_checkpoint,
    read_facts,
    write_checkpoint,
)
from threefold.engine.run.checkpoint_manifest import MANIFEST, read_manifest, verify_files
from threefold.engine.run.dcp import CheckpointShard, State
from threefold.findings import Finding, FindingsError

__all__ = ["MANIFEST", "CheckpointShard", "Checkpoints", "read_checkpoint", "write_checkpoint"]


class Checkpoints:
    """Saves in the background, keeps the newest checkpoints, and loads the newest one whose checksums are right.

    `group` holds all ranks of the run on the CPU and is used by nothing else, because saving goes on while steps
    communicate. Every rank makes the same calls.
    """

    def __init__(self, folder: Path, keep: int, group: Group | None = None) -> None:
        self.folder, self.keep, self.group = folder, keep, group or TRIVIAL_GROUP
        self._writer: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._complete_step: int | None = None  # the step last written or read here
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, step: int, tensors: State, facts: dict[str, Any], wait: bool = False) -> None:
        """Copy the tensors now and write them in the background. The next call reports a save that failed.

        Over all ranks every element is given once: shards by their owners, full tensors by one rank. The first rank's
        `facts` are written. A step that is on disk already is not written again, because that would take it away for a
        moment.
        """
        self.finish()
        if step == self._complete_step:
            return
        snapshot = capture_outcome(self.group, lambda: {name: _snapshot(value) for name, value in tensors.items()})
        self._writer = threading.Thread(target=self._write, args=(step, snapshot, facts), daemon=False)
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

    def _write(self, step: int, snapshot: Outcome, facts: dict[str, Any]) -> None:
        try:
            write_checkpoint(self.path(step), snapshot, facts, self.group)
            self._complete_step = step
            self._remove_old(step)
        except Exception as error:  # reported by finish(), in the thread that can act on it
            self._failure = error

    def _remove_old(self, newest: int) -> None:
        """Remove all but the newest `keep`. Later steps are damaged ones that loading skipped; they do not count."""
        if self.group.rank == 0:
            for old in [step for step in self.steps() if step <= newest][: -self.keep]:
                shutil.rmtree(self.path(old), ignore_errors=True)

    def steps(self) -> list[int]:
        """Steps with a checkpoint in place, oldest first."""
        names = (path.name for path in self.folder.glob("step-*") if path.is_dir())
        return sorted(int(name[5:]) for name in names if name[5:].isdigit())

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

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
        self.finish()
        problems: list[Finding] = []
        for step in reversed(run_on_first_rank(self.group, self.steps)):
            damage = self._damage(self.path(step))
            if damage:
                problems += damage
                say(f"{damage[0].problem}; trying the one before")
                continue
            tensors = allocate_tensors(self.path(step)) if want is None else {}
            self._fill(self.path(step), tensors if want is None else _without_missing_rng(want, self.path(step)))
            self._complete_step = step
            facts = read_facts(self.path(step))
            return (tensors, facts) if want is None else facts
        if problems:
            raise FindingsError(problems)
        return None

    def _damage(self, folder: Path) -> list[Finding]:
        """Findings about files whose checksum is wrong. Each rank reads some of the files."""
        try:
            run_on_all_ranks(self.group, lambda: verify_files(folder, self.group.rank, self.group.size))
        except FindingsError as error:
            return error.findings
        return []

    def _fill(self, folder: Path, want: State) -> None:
        try:
            run_on_all_ranks(self.group, lambda: fill_from(folder, want))
        except RankFailedError as error:
            problem = f"{folder.name} cannot be loaded: {error}"
            raise _refuse("checkpoint-whole", folder, problem, "use an earlier checkpoint") from error


def _without_missing_rng(want: State, folder: Path) -> State:
    """`want` without the random state of a GPU where the checkpoint was saved on a CPU."""
    stored = read_manifest(folder)["tensors"]
    return {name: value for name, value in want.items() if name in stored or name != "rng.cuda"}


def _snapshot(value: Tensor | CheckpointShard) -> Tensor | CheckpointShard:
    return value.snapshot() if isinstance(value, CheckpointShard) else value.detach().to("cpu", copy=True)


def _refuse(rule: str, at: Path, problem: str, advice: str) -> FindingsError:
    return FindingsError([Finding(rule=rule, at=str(at), problem=problem, advice=advice)])
