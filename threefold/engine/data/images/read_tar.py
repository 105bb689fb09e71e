"""Reads records of WebDataset-style tar shards: members whose names are equal up to the first dot are one record.

`000017.jpg` and `000017.json` are a picture and its record; `000017.0.jpg` and `000017.1.jpg` are two pictures, which
the record names `0.jpg` and `1.jpg`; `000017.txt` is a caption. Nothing is extracted: a picture is found again by its
offset in the shard. `picture_index.py` calls `read_tar`.
"""

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from threefold.engine.data.images.decode import PictureFile
from threefold.engine.data.images.records import RawRecord, RecordError
from threefold.safe_files import open_regular
from threefold.units import MIB

PICTURE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp")
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
    files: dict[str, PictureFile] = {}
    fields: dict[str, object] | None = None
    for member in group:
        extension = PurePosixPath(member.name).name.partition(".")[2]
        if f".{extension}".lower().endswith(PICTURE_SUFFIXES):
            files[extension] = PictureFile(
                str(path), member.offset_data, member.size, str(within) if within is not None else None
            )
        elif extension in ("json", "txt"):
            if member.size > MAX_RECORD_BYTES:
                return at, f"{member.name} has {member.size} bytes, more than {MAX_RECORD_BYTES}"
            content = shard.extractfile(member)
            data = content.read() if content else b""
            try:
                found = json.loads(data) if extension == "json" else {"caption": data.decode("utf-8")}
            except (ValueError, RecursionError) as error:
                return at, f"{member.name} cannot be read: {error}"
            if not isinstance(found, dict):
                return at, f"{member.name} holds no JSON object"
            fields = {**found, **(fields or {})}
    if fields is None:
        return at, "it has pictures and no .json or .txt"

    def find_file(name: str) -> PictureFile:
        extension = PurePosixPath(name).name
        found = files.get(extension) or files.get(extension.partition(".")[2])
        if found is None:
            raise RecordError(f"{name[:80]!r} is no picture with this key")
        return found

    return at, RawRecord(at, fields, find_file, tuple(files))


def _key(member: tarfile.TarInfo) -> str:
    """The name up to the first dot behind the last slash, as WebDataset groups members."""
    path = PurePosixPath(member.name)
    return str(path.with_name(path.name.partition(".")[0] or path.name))
