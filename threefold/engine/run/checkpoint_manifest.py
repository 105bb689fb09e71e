"""The manifest of a checkpoint: size and checksum of every file, shapes of tensors, and a checksum of its own.

`checkpoint_io.py` writes and reads it. For example: {"files": {"__0_0.distcp": "9f86d0..."}, "tensors":
{"model.embed.weight": ["torch.float32", [512, 64]]}, "sizes": {"__0_0.distcp": 8192}, "sha256": "..."}. Checkpoints of
earlier versions have no sizes.

The checksums have no key: they find damage, not malice. Whoever makes a folder can make its manifest, so that a
manifest is held to what it must list, and whatever it vouches for is checked like any other untrusted file.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from threefold.findings import Finding, FindingsError
from threefold.safe_files import open_regular, read_json_object

MANIFEST, FACTS, INDEX = "manifest.json", "facts.json", ".metadata"
MAX_MANIFEST_BYTES = 2**28
MAX_ELEMENTS, MAX_DIMS = 2**48, 16  # of a tensor
DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_FILE_NAME = re.compile(r"__\d{1,9}_\d{1,9}\.distcp")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Manifest:
    """The manifest of a checkpoint."""

    files: dict[str, str]  # SHA-256 of each file
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]  # dtype and full shape
    sizes: dict[str, int] | None  # bytes of each file; None in checkpoints of earlier versions

    @property
    def tensor_bytes(self) -> int:
        return sum(math.prod(shape) * dtype.itemsize for dtype, shape in self.tensors.values())


def write_manifest(folder: Path, files: Mapping[str, str], tensors: Mapping[str, Any]) -> None:
    sizes = {name: (folder / name).stat().st_size for name in files}
    manifest = {"files": dict(files), "tensors": dict(tensors), "sizes": sizes}
    (folder / MANIFEST).write_text(json.dumps({**manifest, "sha256": _digest(manifest)}), encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    try:
        manifest = read_json_object(folder / MANIFEST, MAX_MANIFEST_BYTES, within=folder)
        if manifest.pop("sha256", None) != _digest(manifest):
            raise ValueError("its checksum is another")
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(folder / MANIFEST, f"{folder.name} has no readable manifest: {error}") from None
    try:
        return _parse(manifest)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(folder / MANIFEST, f"the manifest of {folder.name} is not complete: {error}") from None


def _parse(manifest: dict[str, Any]) -> Manifest:
    files = dict(manifest["files"])
    missing = sorted({INDEX, FACTS} - files.keys())
    if missing:
        raise ValueError(f"it does not list {missing[0]}, which is read")
    for name, value in files.items():
        if name not in (INDEX, FACTS) and not _FILE_NAME.fullmatch(name):
            raise ValueError(f"it lists {name[:100]!r}, no file of a checkpoint")
        if not isinstance(value, str) or not _SHA256.fullmatch(value):
            raise ValueError(f"it has no checksum of {name}")
    sizes = manifest.get("sizes")
    if sizes is not None and (sizes.keys() != files.keys() or not all(_is_count(size) for size in sizes.values())):
        raise ValueError("it does not have the size of each file")
    return Manifest(files, dict(_tensors(manifest["tensors"])), sizes)


def _tensors(table: Any) -> Iterator[tuple[str, tuple[torch.dtype, tuple[int, ...]]]]:
    for name, (dtype, shape) in table.items():
        if dtype not in DTYPES or not isinstance(shape, list) or len(shape) > MAX_DIMS:
            raise ValueError(f"it has no dtype and shape of {name[:100]}")
        if not all(map(_is_count, shape)) or math.prod(shape) > MAX_ELEMENTS:
            raise ValueError(f"{name[:100]} has a shape that no tensor has")
        yield name, (DTYPES[dtype], tuple(shape))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_ELEMENTS


def verify_files(folder: Path, rank: int = 0, num_ranks: int = 1) -> Manifest:
    """Compare files with their sizes and checksums; returns the manifest. A rank of several checks every n-th file."""
    manifest = read_manifest(folder)
    for name in sorted(manifest.files)[rank::num_ranks]:
        path = folder / name
        try:
            with open_regular(path, within=folder) as file:
                size = os.fstat(file.fileno()).st_size
                whole = manifest.sizes is None or size == manifest.sizes[name]
                is_same = whole and checksum(file) == manifest.files[name]
        except FileNotFoundError:
            raise damaged(path, f"{folder.name} lacks {name}") from None
        except OSError as error:
            raise damaged(path, f"{folder.name}/{name} cannot be read: {error.strerror or error}") from None
        if not whole:
            raise damaged(path, f"{folder.name}/{name} is damaged: it has {size} bytes, its manifest says otherwise")
        if not is_same:
            raise damaged(path, f"{folder.name}/{name} is damaged")
    _check_sizes(folder, manifest)
    return manifest


def _check_sizes(folder: Path, manifest: Manifest) -> None:
    """Each element of a tensor is stored once, so that tensors are no larger than the files."""
    try:
        sizes = manifest.sizes or {name: (folder / name).stat().st_size for name in manifest.files}
    except OSError:  # another rank verifies that file, and says so
        return
    if manifest.tensor_bytes > sum(sizes.values()):
        problem = f"the manifest of {folder.name} tells of {manifest.tensor_bytes} bytes of tensors in smaller files"
        raise damaged(folder / MANIFEST, problem)


def checksum(file: Any) -> str:
    """The SHA-256 of an open file."""
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def checksum_of(path: Path) -> str:
    with path.open("rb") as file:
        return checksum(file)


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


def damaged(at: Path, problem: str) -> FindingsError:
    advice = "restore the folder, or delete it: then the checkpoint before it is used"
    return FindingsError([Finding(rule="checkpoint-whole", at=str(at), problem=problem, advice=advice)])
