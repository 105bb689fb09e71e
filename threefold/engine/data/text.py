"""Documents from files, folders and JSONL, one at a time and always in the same order."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from threefold.findings import Finding, FindingsError
from threefold.units import MIB, format_bytes

SUFFIXES = (".txt", ".md", ".rst", ".jsonl", ".py", ".c", ".h", ".cc", ".cpp", ".cu", ".rs", ".go", ".java", ".js")
MAX_DOCUMENT_BYTES = 64 * MIB  # a document is held in memory while it is tokenized


@dataclass(frozen=True, slots=True)
class Document:
    """A text, or the messages of a conversation, and where it comes from."""

    at: str
    text: str = ""
    messages: Any = None


@dataclass(slots=True)
class Reading:
    """What was passed over while reading folders."""

    num_files: int = 0
    skipped: list[str] = field(default_factory=list)


def documents(
    sources: Sequence[str], suffixes: Sequence[str] = SUFFIXES, text_field: str = "text", reading: Reading | None = None
) -> Iterator[Document]:
    """A document a text file, a document a line of JSONL. A named file must be text; in a folder others are passed."""
    reading = Reading() if reading is None else reading
    for source in sources:
        path = Path(source)
        if path.is_dir():
            for file in _walk(path, tuple(suffixes)):
                try:
                    yield from _read(file, text_field, reading)
                except _NotTextError as problem:
                    reading.skipped.append(f"{file}: {problem}")
        else:
            try:
                yield from _read(path, text_field, reading)
            except _NotTextError as problem:
                raise _refused(str(path), str(problem), "give a text file, a folder or JSONL") from problem


class _NotTextError(Exception):
    pass


def _walk(folder: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(root, name) for name in sorted(files) if name.endswith(suffixes) and not name.startswith("."))


def _read(path: Path, text_field: str, reading: Reading) -> Iterator[Document]:
    try:
        if path.suffix == ".jsonl":
            yield from _lines(path, text_field)
        else:
            yield _text(path)
    except OSError as error:
        raise _NotTextError(f"cannot be read: {error.strerror or error}") from error
    reading.num_files += 1


def _text(path: Path) -> Document:
    with path.open("rb") as file:
        data = file.read(MAX_DOCUMENT_BYTES + 1)
    if len(data) > MAX_DOCUMENT_BYTES:
        raise _NotTextError(f"more than {format_bytes(MAX_DOCUMENT_BYTES)} are too many for one document")
    if b"\0" in data:
        raise _NotTextError("binary, not text")
    try:
        return Document(str(path), data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _NotTextError(f"not UTF-8 text (byte {error.start})") from error


def _lines(path: Path, text_field: str) -> Iterator[Document]:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_DOCUMENT_BYTES + 1):
            number += 1
            if line.strip():
                yield _record(f"{path}:{number}", line, text_field)


def _record(at: str, line: bytes, text_field: str) -> Document:
    if len(line) > MAX_DOCUMENT_BYTES:
        raise _refused(at, f"a line of more than {format_bytes(MAX_DOCUMENT_BYTES)}", "split the document")
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _refused(at, f"not valid JSON: {error}", "one JSON object a line") from error
    if isinstance(record, dict) and "messages" in record:
        return Document(at, messages=record["messages"])
    if isinstance(record, dict) and isinstance(record.get(text_field), str):
        return Document(at, record[text_field])
    raise _refused(at, f"no text in {text_field!r} and no messages", "name the field with --field")


def _refused(at: str, problem: str, advice: str) -> FindingsError:
    return FindingsError([Finding(rule="text-readable", at=at, problem=problem, advice=advice)])
