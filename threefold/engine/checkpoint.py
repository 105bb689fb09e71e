"""Checkpoints: torch DCP files, written aside, verified by checksum, put in place by one rename.

A folder `step-00000100` is complete by construction: it appears by a rename after every file and its checksum
were on disk. What a killed save leaves behind ends in `.partial` and is never loaded.
"""

import hashlib
import json
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from threefold.findings import Finding, FindingsError

MANIFEST = "manifest.json"


class Checkpoints:
    """The checkpoints of one run: save in the background, keep the newest, load what verifies."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep
        self._writer: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._whole: int | None = None  # the step last written or read here
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, step: int, tensors: dict[str, Tensor], facts: dict[str, Any], wait: bool = False) -> None:
        """Snapshot now, write in the background. A save that failed is reported by the next call.

        A step that is on disk already is left alone: writing it again would take it away for a moment.
        """
        self.finish()
        if step == self._whole:
            return
        snapshot = {name: value.detach().to("cpu", copy=True) for name, value in tensors.items()}
        self._writer = threading.Thread(target=self._guarded, args=(step, snapshot, facts), daemon=False)
        self._writer.start()
        if wait:
            self.finish()

    def finish(self) -> None:
        """Wait for the save under way; raise what went wrong in it as a finding."""
        if self._writer:
            self._writer.join()
            self._writer = None
        if self._failure:
            failure, self._failure = self._failure, None
            raise _refuse(
                "checkpoint-writable",
                self.folder,
                f"the checkpoint could not be written: {_cause(failure)}",
                "free space or choose another folder; earlier checkpoints are untouched",
            ) from failure

    def _guarded(self, step: int, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        try:
            write_checkpoint(self.path(step), tensors, facts)
            self._whole = step
            self._forget_old(step)
        except (Exception, CheckpointException) as error:  # reported by finish(), in the thread that can act on it
            self._failure = error

    def _forget_old(self, newest: int) -> None:
        """Later steps are damaged ones that were passed over: they take no place from those that load."""
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
        for partial in self.folder.glob("*.partial"):
            shutil.rmtree(partial, ignore_errors=True)

    def load_latest(self, say: Callable[[str], None]) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The newest checkpoint that verifies; damaged ones are named and passed over."""
        problems: list[Finding] = []
        for step in reversed(self.steps()):
            try:
                found = read_checkpoint(self.path(step))
                self._whole = step
                return found
            except FindingsError as error:
                problems += error.findings
                say(f"{error.findings[0].problem}; trying the one before")
        if problems:
            raise FindingsError(problems)
        return None


def write_checkpoint(folder: Path, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        with quiet_dcp():
            save(dict(tensors), checkpoint_id=str(partial), no_dist=True)
        (partial / "facts.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
        sums = {path.name: _checksum(path) for path in sorted(partial.iterdir())}
        shapes = {name: [str(value.dtype), list(value.shape)] for name, value in tensors.items()}
        manifest = {"files": sums, "tensors": shapes}
        (partial / MANIFEST).write_text(json.dumps({**manifest, "sha256": _digest(manifest)}), encoding="utf-8")
        _sync(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        _sync(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def verify_checkpoint(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose every file has the checksum it was written with."""
    manifest = read_manifest(folder)
    for name, wanted in manifest["files"].items():
        path = folder / name
        if not path.exists():
            raise _refuse("checkpoint-whole", path, f"{folder.name} lacks {name}", "use an earlier checkpoint")
        if _checksum(path) != wanted:
            raise _refuse("checkpoint-whole", path, f"{folder.name}/{name} is damaged", "use an earlier checkpoint")
    return manifest


def read_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and facts of a checkpoint that verifies."""
    manifest = verify_checkpoint(folder)
    tensors = {
        name: torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
        for name, (dtype, shape) in manifest["tensors"].items()
    }
    with quiet_dcp():
        load(tensors, checkpoint_id=str(folder), no_dist=True)
    return tensors, json.loads((folder / "facts.json").read_text(encoding="utf-8"))


@contextmanager
def quiet_dcp() -> Iterator[None]:
    """DCP warns that there is one process; we asked for that."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest.pop("sha256") != _digest(manifest):
            raise ValueError("its checksum is another")
        return dict(manifest)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{folder.name} has no readable manifest: {error}"
        raise _refuse("checkpoint-whole", folder / MANIFEST, problem, "use an earlier checkpoint") from None


def _refuse(rule: str, at: Path, problem: str, advice: str) -> FindingsError:
    return FindingsError([Finding(rule=rule, at=str(at), problem=problem, advice=advice)])


def _cause(failure: BaseException) -> BaseException:
    """What the system said, such as a full disk: DCP wraps it by rank, and torch's archive fails over it again."""
    error: BaseException | None = failure
    if isinstance(failure, CheckpointException) and failure.failures:
        error = failure = next(iter(failure.failures.values()))[0]
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error or failure


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _sync(folder: Path) -> None:
    """Make renames and new files survive a power cut, as far as the system allows."""
    for path in [*(p for p in folder.iterdir() if p.is_file()), folder] if folder.is_dir() else []:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
