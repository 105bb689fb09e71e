"""Reads records of images out of tar shards and JSONL. `image_index.py` calls `read_tar` and `read_jsonl`.

In WebDataset-style tar shards members whose names are equal up to the first dot are one record: `000017.jpg` and
`000017.json` are an image and its record; `000017.0.jpg` and `000017.1.jpg` are two images, which the record names
`0.jpg` and `1.jpg`; `000017.txt` is a caption. Nothing is extracted: an image is found again by its offset in the
shard. Images of JSONL are files next to it.
"""

import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from threefold.engine.data.images.decode import ImageFile
from threefold.engine.data.images.records import RawRecord, RecordError
from threefold.safe_files import open_regular
from threefold.units import MIB

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp")
MAX_RECORD_BYTES = 64 * MIB


class TarError(Exception):
    """A file is no readable tar shard; the message says why."""


def read_tar(path: Path, within: Path | None = None) -> Iterator[tuple[str, RawRecord | str]]:
    """Each key's place, with its record or with the reason why it is none. Raises OSError or TarError for the shard."""
    with open_regular(path, within) as file:
        group: list[tarfile.TarInfo] = []
        try:
            with tarfile.open(fileobj=file, mode="r:") as shard:
                while (member := shard.next()) is not None:
                    shard.members = []  # type: ignore[attr-defined]  # a shard of millions would fill the memory
                    if not member.isreg() or member.issparse():
                        continue
                    if group and _key(member) != _key(group[0]):
                        yield _make_record(path, shard, group, within)
                        group = []
                    group.append(member)
                if group:
                    yield _make_record(path, shard, group, within)
                _check_end(file, shard.offset)
        except (tarfile.TarError, ValueError, EOFError) as error:
            raise TarError(f"no readable tar shard: {error}") from None


def _check_end(file: BinaryIO, offset: int) -> None:
    """Raise where the marker at the end of a shard is missing: `tarfile` takes a cut for the end."""
    file.seek(offset)
    if file.read(tarfile.BLOCKSIZE) != tarfile.NUL * tarfile.BLOCKSIZE:
        raise tarfile.ReadError("it is cut off: the marker at its end is missing")


def _make_record(
    path: Path, shard: tarfile.TarFile, group: list[tarfile.TarInfo], within: Path | None
) -> tuple[str, RawRecord | str]:
    at = f"{path}:{_key(group[0])}"
    files: dict[str, ImageFile] = {}
    fields: dict[str, object] | None = None
    for member in group:
        extension = PurePosixPath(member.name).name.partition(".")[2]
        if f".{extension}".lower().endswith(IMAGE_SUFFIXES):
            files[extension] = ImageFile(
                str(path), member.offset_data, member.size, str(within) if within is not None else None
            )
        elif extension in ("json", "txt"):
            if member.size > MAX_RECORD_BYTES:
                return at, f"{member.name} has {member.size} bytes, more than {MAX_RECORD_BYTES}"
            content = shard.extractfile(member)
            data = content.read() if content else b""
            try:
                read = json.loads(data) if extension == "json" else {"caption": data.decode("utf-8")}
            except (ValueError, RecursionError) as error:
                return at, f"{member.name} cannot be read: {error}"
            if not isinstance(read, dict):
                return at, f"{member.name} holds no JSON object"
            fields = {**read, **(fields or {})}
    if fields is None:
        return at, "it has images and no .json or .txt"

    def find_file(name: str) -> ImageFile:
        extension = PurePosixPath(name).name
        file = files.get(extension) or files.get(extension.partition(".")[2])
        if file is None:
            raise RecordError(f"{name[:80]!r} is no image with this key")
        return file

    return at, RawRecord(at, fields, find_file, tuple(files))


def _key(member: tarfile.TarInfo) -> str:
    """The name up to the first dot after the last slash, as WebDataset groups members."""
    path = PurePosixPath(member.name)
    return str(path.with_name(path.name.partition(".")[0] or path.name))


MAX_LINE_BYTES = 64 * MIB


def read_jsonl(path: Path) -> Iterator[tuple[str, RawRecord | str]]:
    """Each line's place, with its record or with the reason why it is none. Raises OSError for the file itself."""
    folder = path.parent
    with open_regular(path) as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            at = f"{path}:{number}"
            if len(line) > MAX_LINE_BYTES:
                yield at, f"a line of more than {MAX_LINE_BYTES} bytes"
                return  # what follows is the rest of this line
            if line.strip():
                yield at, _parse_line(at, line, folder)


def _parse_line(at: str, line: bytes, folder: Path) -> RawRecord | str:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"not valid JSON: {error}"
    if not isinstance(fields, dict):
        return "no JSON object"
    return RawRecord(at, fields, lambda name: find_next_to(folder, name))


def find_next_to(folder: Path, name: str) -> ImageFile:
    """An image of the folder or of one below it. Nothing else is opened, whatever an untrusted JSONL names."""
    if "\0" in name or "://" in name or name.startswith("data:"):
        raise RecordError(f"{name[:80]!r} is not the name of a file")
    path = folder / name
    root, target = os.path.realpath(folder), os.path.realpath(path)
    if os.path.commonpath([root, target]) != root:
        raise RecordError(f"{name[:80]!r} lies outside the folder of the JSONL file")
    try:
        size = path.stat().st_size
    except OSError as error:
        raise RecordError(f"{name[:80]!r} cannot be read: {error.strerror or error}") from None
    return ImageFile(str(path), 0, size, str(folder))
