"""Checkpoints: torch DCP files, written aside, verified by checksum, put in place by one rename.

A folder `step-00000100` is complete by construction: it appears by a rename after every file and its checksum
were on disk. What a killed save leaves behind ends in `.partial` and is never loaded.

With many ranks each writes the elements it owns into a file of its own and reads those it needs, whatever layout wrote
them. All of them must see one file system. What goes wrong on one rank goes wrong on all, with the same finding.
"""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, overload

from torch import Tensor

from threefold.engine.agree import ElsewhereError, Outcome, attempt, each, first
from threefold.engine.launch import lost_a_peer
from threefold.engine.manifest import MANIFEST, read_manifest, verify_files
from threefold.engine.mesh import ALONE, Group
from threefold.engine.pieces import Piece, State
from threefold.engine.saved import Loaded, facts_of, fill_from, read_checkpoint, room, write_checkpoint
from threefold.findings import Finding, FindingsError

__all__ = ["MANIFEST", "Checkpoints", "Piece", "read_checkpoint", "write_checkpoint"]


class Checkpoints:
    """The checkpoints of one run: save in the background, keep the newest, load what verifies.

    `group` is of all ranks of the run, on the CPU, and used by nothing else: saving goes on while steps communicate.
    Every rank makes the same calls.
    """

    def __init__(self, folder: Path, keep: int, group: Group | None = None) -> None:
        self.folder, self.keep, self.group = folder, keep, group or ALONE
        self._writer: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._whole: int | None = None  # the step last written or read here
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, step: int, tensors: State, facts: dict[str, Any], wait: bool = False) -> None:
        """Snapshot now, write in the background. A save that failed is reported by the next call.

        Over all ranks every element is given once: pieces by who owns them, whole tensors by one rank. `facts` are
        those of the first rank. A step that is on disk already is left alone: writing it again would take it away
        for a moment.
        """
        self.finish()
        if step == self._whole:
            return
        taken = attempt(self.group, lambda: {name: _snapshot(value) for name, value in tensors.items()})
        self._writer = threading.Thread(target=self._guarded, args=(step, taken, facts), daemon=False)
        self._writer.start()
        if wait:
            self.finish()

    def finish(self) -> None:
        """Wait for the save under way; raise what went wrong in it as a finding.

        A rank that is gone is no matter of the disk: that error goes on as it is, and all ranks start again.
        """
        if self._writer:
            self._writer.join()
            self._writer = None
        if self._failure:
            failure, self._failure = self._failure, None
            if lost_a_peer(failure):
                raise failure
            raise _refuse(
                "checkpoint-writable",
                self.folder,
                f"the checkpoint could not be written: {failure}",
                "free space or choose another folder; earlier checkpoints are untouched",
            ) from failure

    def _guarded(self, step: int, taken: Outcome, facts: dict[str, Any]) -> None:
        try:
            write_checkpoint(self.path(step), taken, facts, self.group)
            self._whole = step
            self._forget_old(step)
        except Exception as error:  # reported by finish(), in the thread that can act on it
            self._failure = error

    def _forget_old(self, newest: int) -> None:
        """Later steps are damaged ones that were passed over: they take no place from those that load."""
        if self.group.rank == 0:
            for old in [step for step in self.steps() if step <= newest][: -self.keep]:
                shutil.rmtree(self.path(old), ignore_errors=True)

    def steps(self) -> list[int]:
        """Steps with a checkpoint in place, oldest first."""
        names = (path.name for path in self.folder.glob("step-*") if path.is_dir())
        return sorted(int(name[5:]) for name in names if name[5:].isdigit())

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def sweep(self) -> None:
        """Remove what killed saves left. For the run alone: to a reader it may be a save under way."""
        if self.group.rank == 0:
            for partial in self.folder.glob("*.partial"):
                shutil.rmtree(partial, ignore_errors=True)

    @overload
    def load_latest(self, say: Callable[[str], None]) -> Loaded | None: ...

    @overload
    def load_latest(self, say: Callable[[str], None], want: State) -> dict[str, Any] | None: ...

    def load_latest(self, say: Callable[[str], None], want: State | None = None) -> Loaded | dict[str, Any] | None:
        """The newest checkpoint that verifies; damaged ones are named and passed over, by all ranks together.

        Returns tensors and facts, or fills what this rank wants and returns the facts.
        """
        self.finish()
        problems: list[Finding] = []
        for step in reversed(first(self.group, self.steps)):
            damage = self._damage(self.path(step))
            if damage:
                problems += damage
                say(f"{damage[0].problem}; trying the one before")
                continue
            tensors = room(self.path(step)) if want is None else {}
            self._fill(self.path(step), tensors if want is None else _stored_of(want, self.path(step)))
            self._whole = step
            facts = facts_of(self.path(step))
            return (tensors, facts) if want is None else facts
        if problems:
            raise FindingsError(problems)
        return None

    def _damage(self, folder: Path) -> list[Finding]:
        """What is wrong with a checkpoint; each rank looks at its share of the files."""
        try:
            each(self.group, lambda: verify_files(folder, self.group.rank, self.group.size))
        except FindingsError as error:
            return error.findings
        return []

    def _fill(self, folder: Path, want: State) -> None:
        try:
            each(self.group, lambda: fill_from(folder, want))
        except ElsewhereError as error:
            problem = f"{folder.name} cannot be loaded: {error}"
            raise _refuse("checkpoint-whole", folder, problem, "use an earlier checkpoint") from error


def _stored_of(want: State, folder: Path) -> State:
    """A checkpoint saved on a CPU has no random state of a GPU."""
    stored = read_manifest(folder)["tensors"]
    return {name: value for name, value in want.items() if name in stored or name != "rng.cuda"}


def _snapshot(value: Tensor | Piece) -> Tensor | Piece:
    return value.snapshot() if isinstance(value, Piece) else value.detach().to("cpu", copy=True)


def _refuse(rule: str, at: Path, problem: str, advice: str) -> FindingsError:
    return FindingsError([Finding(rule=rule, at=str(at), problem=problem, advice=advice)])
