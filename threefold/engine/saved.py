"""One checkpoint: a folder that all ranks write together, and that any of them reads whole or in part."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from threefold.engine.agree import ElsewhereError, Outcome, each, first
from threefold.engine.manifest import checksum, read_manifest, sync, verify_files, write_manifest
from threefold.engine.mesh import ALONE, Group
from threefold.engine.pieces import State, Stored, Written, write_index, write_pieces
from threefold.findings import Finding, FindingsError

FACTS = "facts.json"
Loaded = tuple[dict[str, Tensor], dict[str, Any]]


def write_checkpoint(folder: Path, tensors: State | Outcome, facts: dict[str, Any], group: Group = ALONE) -> None:
    """Raises the same on all ranks, with nothing left behind. `tensors` may be an attempt at having them."""
    partial = folder.with_name(folder.name + ".partial")
    taken = tensors if isinstance(tensors, Outcome) else Outcome(tensors)
    try:
        first(group, lambda: _make(partial))
        written = each(group, lambda: _write_file(partial, taken.get(), group))
        first(group, lambda: _complete(partial, folder, written, facts))
    except (ElsewhereError, FindingsError):  # known to all, so that all can wait until it is gone
        first(group, lambda: shutil.rmtree(partial, ignore_errors=True))
        raise
    except BaseException:
        if group.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _make(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _write_file(partial: Path, tensors: State, group: Group) -> tuple[Written, dict[str, str]]:
    """This rank's file and its checksum."""
    if not partial.is_dir():
        raise FileNotFoundError(
            f"{partial} was made by another rank and is not seen here: all ranks must share a file system"
        )
    written = write_pieces(partial, tensors, group.rank, group.size)
    return written, {path.name: checksum(path) for path in partial.glob(f"__{group.rank}_*")}


def _complete(
    partial: Path, folder: Path, written: list[tuple[Written, dict[str, str]]], facts: dict[str, Any]
) -> None:
    sums = {name: value for _, mine in written for name, value in mine.items()}
    unseen = sorted(name for name in sums if not (partial / name).exists())
    if unseen:
        raise FileNotFoundError(
            f"{unseen[0]}, written by another rank, is not seen here: all ranks must share a file system"
        )
    tensors = write_index(partial, [piece for piece, _ in written])
    (partial / FACTS).write_text(json.dumps(facts, indent=1), encoding="utf-8")
    sums |= {path.name: checksum(path) for path in partial.iterdir() if path.name not in sums}
    write_manifest(partial, dict(sorted(sums.items())), tensors)
    sync(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    sync(folder.parent)


def read_checkpoint(folder: Path) -> Loaded:
    """Whole tensors and facts of a checkpoint that verifies, whatever layout wrote it."""
    verify_files(folder)
    tensors = room(folder)
    Stored(folder).fill(tensors)
    return tensors, facts_of(folder)


def room(folder: Path) -> dict[str, Tensor]:
    return {
        name: torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
        for name, (dtype, shape) in read_manifest(folder)["tensors"].items()
    }


def facts_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / FACTS).read_text(encoding="utf-8")))


def fill_from(folder: Path, want: State) -> None:
    """What this rank wants, in place, without verifying."""
    stored = Stored(folder)
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
