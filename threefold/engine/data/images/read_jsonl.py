"""Reads records of JSONL, whose pictures are files beside it. `picture_index.py` calls `read_jsonl`."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

from threefold.engine.data.images.decode import PictureFile
from threefold.engine.data.images.records import RawRecord, RecordError
from threefold.safe_files import open_regular
from threefold.units import MIB

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
    return RawRecord(at, fields, lambda name: find_beside(folder, name))


def find_beside(folder: Path, name: str) -> PictureFile:
    """A picture of the folder or of one below it. Nothing else is opened, whatever a stranger's JSONL names."""
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
    return PictureFile(str(path), 0, size, str(folder))
