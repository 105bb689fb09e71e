"""One checkpoint: a folder that all ranks write together, and that any rank reads in full or in part.

The folder holds DCP files (`dcp.py`), `facts.json` and `manifest.json`. `Checkpoints` in `checkpoints.py` calls this.
"""

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from threefold.engine.dist.consensus import Outcome, RankFailedError, run_on_all_ranks, run_on_first_rank
from threefold.engine.dist.mesh import TRIVIAL_GROUP, Group
from threefold.engine.run.checkpoint_manifest import (
    FACTS,
    MANIFEST,
    Manifest,
    checksum_of,
    damaged,
    fsync_folder,
    verify_files,
    write_manifest,
)
from threefold.engine.run.dcp import RankFile, State, StoredTensors, write_index, write_rank_file
from threefold.engine.run.lock import ReadLease
from threefold.findings import Finding, FindingsError, shown
from threefold.safe_files import check_inside, read_json_object

MAX_FACTS_BYTES = 2**24
MAX_STEP_DIGITS = 15
Loaded = tuple[dict[str, Tensor], dict[str, Any]]


def write_checkpoint(
    folder: Path, tensors: State | Outcome, facts: dict[str, Any], group: Group = TRIVIAL_GROUP
) -> None:
    """Write the folder aside and put it in place by a rename.

    A failure is raised on all ranks alike, and leaves nothing behind. `tensors` may be the outcome of a snapshot that
    failed on some rank; that failure is raised here.
    """
    partial = folder.with_name(folder.name + ".partial")
    snapshot = tensors if isinstance(tensors, Outcome) else Outcome(tensors)
    try:
        run_on_first_rank(group, lambda: _make_empty(partial))
        written = run_on_all_ranks(group, lambda: _write_file(partial, snapshot.result(), group))
        run_on_first_rank(group, lambda: _complete(partial, folder, written, facts))
    except (RankFailedError, FindingsError):  # every rank raises these, so that all can wait for the removal
        run_on_first_rank(group, lambda: shutil.rmtree(partial, ignore_errors=True))
        raise
    except BaseException:
        if group.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _make_empty(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _write_file(partial: Path, tensors: State, group: Group) -> tuple[RankFile, dict[str, str]]:
    """Write this rank's file; returns its contents and its checksum by file name."""
    if not partial.is_dir():
        raise FileNotFoundError(
            f"{partial} was made by another rank and is not seen here: all ranks must share a file system"
        )
    written = write_rank_file(partial, tensors, group.rank, group.size)
    return written, {path.name: checksum_of(path) for path in partial.glob(f"__{group.rank}_*")}


def _complete(
    partial: Path, folder: Path, written: list[tuple[RankFile, dict[str, str]]], facts: dict[str, Any]
) -> None:
    """Write the index, the facts and the manifest, make all durable, and rename the folder to its final name."""
    sums = {name: value for _, of_rank in written for name, value in of_rank.items()}
    unseen = sorted(name for name in sums if not (partial / name).exists())
    if unseen:
        raise FileNotFoundError(
            f"{unseen[0]}, written by another rank, is not seen here: all ranks must share a file system"
        )
    tensors = write_index(partial, [rank_file for rank_file, _ in written])
    (partial / FACTS).write_text(json.dumps(facts, indent=1), encoding="utf-8")
    sums |= {path.name: checksum_of(path) for path in partial.iterdir() if path.name not in sums}
    write_manifest(partial, dict(sorted(sums.items())), tensors)
    fsync_folder(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    fsync_folder(folder.parent)


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint whose files were compared with its manifest; its tensors are read on request."""

    folder: Path
    manifest: Manifest
    facts: dict[str, Any]  # the JSON values next to the tensors, such as the step and the position in the data
    stored: StoredTensors
    lease: ReadLease  # it is not removed while this is held

    def allocate_tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """Full tensors of the shapes and dtypes that the manifest lists, for `fill`."""
        return {
            name: torch.zeros(shape, dtype=dtype)
            for name, (dtype, shape) in self.manifest.tensors.items()
            if name.startswith(prefix)
        }

    def fill(self, want: State) -> None:
        """Read the tensors and shards that this rank wants, in place."""
        misfits = [
            _misfit(self.folder, name, self.stored.shape(name), tuple(value.size()))
            for name, value in want.items()
            if math.prod(value.size()) and self.stored.shape(name) != tuple(value.size())
        ]
        if misfits:
            raise FindingsError(misfits)
        self.stored.fill({name: value for name, value in want.items() if name in self.stored.tensors})


def open_checkpoint(folder: Path, rank: int = 0, num_ranks: int = 1) -> OpenCheckpoint:
    """Verify sizes and checksums, and read the index and the facts. A rank of several verifies every n-th file."""
    try:
        check_inside(folder, folder.parent)
    except OSError as error:
        raise damaged(folder, f"{folder.name} is not read: {error}") from None
    lease = ReadLease(folder)
    manifest = verify_files(folder, rank, num_ranks)
    stored = StoredTensors(folder, manifest.files, len(manifest.tensors))
    if {name: (tensor.dtype, tensor.shape) for name, tensor in stored.tensors.items()} != manifest.tensors:
        raise damaged(folder / MANIFEST, f"the manifest of {folder.name} has other tensors than its index")
    return OpenCheckpoint(folder, manifest, _read_facts(folder), stored, lease)


def read_checkpoint(folder: Path) -> Loaded:
    """Full tensors and facts of a checkpoint, whatever layout wrote it, after its checksums were verified."""
    opened = open_checkpoint(folder)
    tensors = opened.allocate_tensors()
    opened.fill(tensors)
    return tensors, opened.facts


def _read_facts(folder: Path) -> dict[str, Any]:
    try:
        facts = read_json_object(folder / FACTS, MAX_FACTS_BYTES, within=folder)
    except (OSError, ValueError) as error:
        raise damaged(folder / FACTS, f"{folder.name}/{FACTS} cannot be read: {error}") from None
    number = step_of_folder(folder.name)
    if number is not None and facts.get("step") != number:
        problem = f"{folder.name} holds the checkpoint of step {shown(facts.get('step'))}"
        raise damaged(folder / FACTS, problem)
    return facts


def step_folder(step: int) -> str:
    return f"step-{step:08d}"


def step_of_folder(name: str) -> int | None:
    """The step of a folder's name; None for a name that no checkpoint has."""
    digits = name.removeprefix("step-")
    step = int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= MAX_STEP_DIGITS else None
    return step if step is not None and name == step_folder(step) else None


def _misfit(folder: Path, name: str, found: tuple[int, ...] | None, wanted: tuple[int, ...]) -> Finding:
    has = "lacks" if found is None else f"has {list(found)} for"
    return Finding(
        rule="checkpoint-fits",
        at=str(folder),
        problem=f"{folder.name} {has} {name}, of shape {list(wanted)} here",
        advice="continue with the plan the run was started with, or start a new run",
    )
