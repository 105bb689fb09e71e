"""The manifest of a checkpoint: the checksum of every file and of the manifest itself, and the shapes of tensors.

`checkpoint_io.py` writes it; `checkpoints.py` and `weights/convert.py` read it. For example: {"files":
{"__0_0.distcp": "9f86d0..."}, "tensors": {"model.embed.weight": ["torch.float32", [512, 64]]}, "sha256": "..."}.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from threefold.findings import Finding, FindingsError

MANIFEST = "manifest.json"


def write_manifest(folder: Path, files: Mapping[str, str], tensors: Mapping[str, Any]) -> None:
    manifest = {"files": dict(files), "tensors": dict(tensors)}
    (folder / MANIFEST).write_text(json.dumps({**manifest, "sha256": _digest(manifest)}), encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest.pop("sha256") != _digest(manifest):
            raise ValueError("its checksum is another")
        return dict(manifest)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(folder / MANIFEST, f"{folder.name} has no readable manifest: {error}") from None


def verify_files(folder: Path, rank: int = 0, num_ranks: int = 1) -> dict[str, Any]:
    """Compare files with their checksums and return the manifest. A rank of several checks every n-th file."""
    manifest = read_manifest(folder)
    for name in sorted(manifest["files"])[rank::num_ranks]:
        path = folder / name
        if not path.exists():
            raise _damaged(path, f"{folder.name} lacks {name}")
        try:
            is_same = checksum(path) == manifest["files"][name]
        except OSError as error:
            raise _damaged(path, f"{folder.name}/{name} cannot be read: {error}") from None
        if not is_same:
            raise _damaged(path, f"{folder.name}/{name} is damaged")
    return manifest


def checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def fsync_folder(folder: Path) -> None:
    """Flush the files of a folder and its entries to disk, so that they survive a power cut."""
    for path in [*(p for p in folder.iterdir() if p.is_file()), folder] if folder.is_dir() else []:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _damaged(at: Path, problem: str) -> FindingsError:
    advice = "use an earlier checkpoint"
    return FindingsError([Finding(rule="checkpoint-whole", at=str(at), problem=problem, advice=advice)])
