"""What vouches for a checkpoint: the checksum of every file, and one of the manifest itself."""

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
        raise _not_whole(folder / MANIFEST, f"{folder.name} has no readable manifest: {error}") from None


def verify_files(folder: Path, share: int = 0, num_shares: int = 1) -> dict[str, Any]:
    """The manifest, after every file, or every n-th from `share` on, had the checksum it was written with."""
    manifest = read_manifest(folder)
    for name in sorted(manifest["files"])[share::num_shares]:
        path = folder / name
        if not path.exists():
            raise _not_whole(path, f"{folder.name} lacks {name}")
        try:
            same = checksum(path) == manifest["files"][name]
        except OSError as error:
            raise _not_whole(path, f"{folder.name}/{name} cannot be read: {error}") from None
        if not same:
            raise _not_whole(path, f"{folder.name}/{name} is damaged")
    return manifest


def checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def sync(folder: Path) -> None:
    """Make renames and new files survive a power cut, as far as the system allows."""
    for path in [*(p for p in folder.iterdir() if p.is_file()), folder] if folder.is_dir() else []:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _not_whole(at: Path, problem: str) -> FindingsError:
    advice = "use an earlier checkpoint"
    return FindingsError([Finding(rule="checkpoint-whole", at=str(at), problem=problem, advice=advice)])
