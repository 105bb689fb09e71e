"""One checkpoint: a folder that all ranks write together, and that any rank reads in full or in part.

The folder holds DCP files (`dcp.py`), `facts.json` and `manifest.json`. `Checkpoints` in `checkpoints.py` calls this.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from threefold.engine.dist.consensus import Outcome, RankFailedError, run_on_all_ranks, run_on_first_rank
from threefold.engine.dist.mesh import TRIVIAL_GROUP, Group
from threefold.engine.run.checkpoint_manifest import checksum, fsync_folder, read_manifest, verify_files, write_manifest
from threefold.engine.run.dcp import RankFile, State, StoredTensors, write_index, write_rank_file
from threefold.findings import Finding, FindingsError

FACTS = "facts.json"
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
    return written, {path.name: checksum(path) for path in partial.glob(f"__{group.rank}_*")}


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
    sums |= {path.name: checksum(path) for path in partial.iterdir() if path.name not in sums}
    write_manifest(partial, dict(sorted(sums.items())), tensors)
    fsync_folder(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    fsync_folder(folder.parent)


def read_checkpoint(folder: Path) -> Loaded:
    """Full tensors and facts of a checkpoint, whatever layout wrote it, after its checksums were verified."""
    verify_files(folder)
    tensors = allocate_tensors(folder)
    StoredTensors(folder).fill(tensors)
    return tensors, read_facts(folder)


def allocate_tensors(folder: Path) -> dict[str, Tensor]:
    """Uninitialized full tensors of the shapes and dtypes that the manifest lists."""
    return {
        name: torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
        for name, (dtype, shape) in read_manifest(folder)["tensors"].items()
    }


def read_facts(folder: Path) -> dict[str, Any]:
    """The JSON values saved beside the tensors, such as the step and the position in the data."""
    return dict(json.loads((folder / FACTS).read_text(encoding="utf-8")))


def fill_from(folder: Path, want: State) -> None:
    """Read the tensors and shards that this rank wants, in place, without verifying checksums."""
    stored = StoredTensors(folder)
    misfits = [
        _misfit(folder, name, stored.shape(name), tuple(value.size()))
        for name, value in want.items()
        if math.prod(value.size()) and stored.shape(name) != tuple(value.size())
    ]
    if misfits:
        raise FindingsError(misfits)
    stored.fill(want)


def _misfit(folder: Path, name: str, found: tuple[int, ...] | None, wanted: tuple[int, ...]) -> Finding:
    has = "lacks" if found is None else f"has {list(found)} for"
    return Finding(
        rule="checkpoint-fits",
        at=str(folder),
        problem=f"{folder.name} {has} {name}, of shape {list(wanted)} here",
        advice="go on with the plan the run was started with, or start a new run",
    )
