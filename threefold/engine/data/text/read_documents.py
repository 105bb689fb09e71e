"""Reads documents from text files, folders and JSONL, one at a time and always in the same order.

`tokenize_files` reads them. A text file is one document, and so is each line of JSONL: {"text": "..."} or, for a
conversation, {"messages": [{"role": "user", "content": "..."}, ...]}.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from threefold.findings import Finding, FindingsError
from threefold.safe_files import open_regular
from threefold.units import MIB, format_bytes

SUFFIXES = (".txt", ".md", ".rst", ".jsonl", ".py", ".c", ".h", ".cc", ".cpp", ".cu", ".rs", ".go", ".java", ".js")
MAX_DOCUMENT_BYTES = 64 * MIB  # a document is in memory while it is tokenized


@dataclass(frozen=True, slots=True)
class Document:
    """A text, or the messages of a conversation."""

    at: str  # the file, with the line number for JSONL
    text: str = ""
    messages: Any = None


@dataclass(slots=True)
class ReadSummary:
    """Counts that are filled in while documents are read."""

    num_files: int = 0
    skipped: list[str] = field(default_factory=list)  # files in folders that are no text, with the reason


def read_documents(
    sources: Sequence[str],
    suffixes: Sequence[str] = SUFFIXES,
    text_field: str = "text",
    summary: ReadSummary | None = None,
) -> Iterator[Document]:
    """All documents of the sources.

    A file that is named itself must be text. A file of a folder that is no text is skipped.
    """
    summary = ReadSummary() if summary is None else summary
    for source in sources:
        path = Path(source)
        if path.is_dir():
            for file in _walk_files(path, tuple(suffixes)):
                try:
                    yield from _read_file(file, text_field, summary, within=path)
                except _NotTextError as problem:
                    summary.skipped.append(f"{file}: {problem}")
        else:
            try:
                yield from _read_file(path, text_field, summary)
            except _NotTextError as problem:
                raise _refused(str(path), str(problem), "give a text file, a folder or JSONL") from problem


class _NotTextError(Exception):
    """A file cannot be read as text."""


def _walk_files(folder: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(root, name) for name in sorted(files) if name.endswith(suffixes) and not name.startswith("."))


def _read_file(path: Path, text_field: str, summary: ReadSummary, within: Path | None = None) -> Iterator[Document]:
    try:
        if path.suffix == ".jsonl":
            yield from _read_jsonl(path, text_field, within)
        else:
            yield _read_text(path, within)
    except OSError as error:
        raise _NotTextError(f"cannot be read: {error.strerror or error}") from error
    summary.num_files += 1


def _read_text(path: Path, within: Path | None) -> Document:
    with open_regular(path, within) as file:
        data = file.read(MAX_DOCUMENT_BYTES + 1)
    if len(data) > MAX_DOCUMENT_BYTES:
        raise _NotTextError(f"more than {format_bytes(MAX_DOCUMENT_BYTES)} are too many for one document")
    if b"\0" in data:
        raise _NotTextError("binary, not text")
    try:
        return Document(str(path), data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _NotTextError(f"not UTF-8 text (byte {error.start})") from error


def _read_jsonl(path: Path, text_field: str, within: Path | None) -> Iterator[Document]:
    with open_regular(path, within) as file:
        number = 0
        while line := file.readline(MAX_DOCUMENT_BYTES + 1):
            number += 1
            if line.strip():
                yield _parse_record(f"{path}:{number}", line, text_field)


def _parse_record(at: str, line: bytes, text_field: str) -> Document:
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
