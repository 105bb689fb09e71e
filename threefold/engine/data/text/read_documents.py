"""Reads documents from text files, folders, JSONL, JSON, Parquet and Arrow, one at a time, always in the same order.

`tokenize_files` reads them. A text file is one document, and so is each record of the other formats (`records.py`). A
record that is no document is counted in the summary and skipped; the caller decides how many may be. Parquet, Arrow and
folders that `datasets` saves (`Dataset.save_to_disk`) need pyarrow (`pip install threefold[parquet]`), not `datasets`.
"""

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from threefold.engine.data.text.chatml import ChatError
from threefold.engine.data.text.records import (
    FORMS,
    NAME_FIELD,
    PREFERENCES,
    Document,
    PreferenceError,
    RecordError,
    parse_record,
)
from threefold.findings import Finding, FindingsError
from threefold.safe_files import open_regular, read_json_object
from threefold.units import GIB, MIB, format_bytes, format_many

ARROW_SUFFIXES = (".parquet", ".arrow")
BATCH_ROWS = 256
# The fields that records of known forms have (`records.py`): other columns are not even decoded.
KNOWN_COLUMNS = (
    "messages",
    "conversations",
    "tools",
    "system",
    "prompt",
    "completion",
    "response",
    "instruction",
    "input",
    "output",
    "history",
    "chat_template_kwargs",
)
STATE, SPLITS, TRAIN = "state.json", "dataset_dict.json", "train"
_FILE_FORMAT = b"ARROW1"


def dataset_files(folder: Path) -> list[Path] | None:
    """The Arrow files of a folder that `datasets` has saved; None for any other folder.

    A folder of several splits means its split `train`; the others are folders in it, such as `data/test`.
    """
    if (folder / SPLITS).is_file():
        splits = _read_facts(folder / SPLITS).get("splits")
        names = [name for name in splits if isinstance(name, str)] if isinstance(splits, list) else []
        chosen = TRAIN if TRAIN in names else names[0] if len(names) == 1 else None
        if chosen is None:
            raise _refused(str(folder), f"it has the splits {', '.join(names)}", f"name one of them: {folder}/SPLIT")
        folder = folder / chosen
    if not (folder / STATE).is_file():
        return None
    facts = _read_facts(folder / STATE)
    if facts.get("_indices_data_files") or facts.get("_indices_files"):
        raise _refused(str(folder), "its rows are chosen by an index", "save it again after flatten_indices()")
    files = facts.get("_data_files")
    listed = [each.get("filename") for each in files if isinstance(each, dict)] if isinstance(files, list) else []
    if not listed or not all(isinstance(name, str) and Path(name).name == name for name in listed):
        raise _refused(str(folder / STATE), "it names no data files", "save the dataset again")
    return [folder / str(name) for name in listed]


def read_arrow(path: Path, text_field: str, within: Path | None) -> Iterator[tuple[str, Any]]:
    """The rows of a file with their places, from 1. Fields that are null are left out: Arrow has no other absence."""
    try:
        import pyarrow
    except ImportError as error:
        problem, advice = "pyarrow, which reads Parquet and Arrow, is not installed", "pip install threefold[parquet]"
        finding = Finding(rule="pyarrow-installed", at=str(path), problem=problem, advice=advice)
        raise FindingsError([finding]) from error
    number = 0
    with open_regular(path, within) as file:
        try:
            for batch in _batches(file, path, (*KNOWN_COLUMNS, text_field)):
                batch.validate(full=True)  # reading rows of a damaged batch would read any memory
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}:{number}", _without_nulls(row)
        except (pyarrow.ArrowException, OSError, ValueError, MemoryError, OverflowError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise _refused(
                str(path), f"it cannot be read after row {number}: {reason}", "copy or make it again"
            ) from error


def _batches(file: Any, path: Path, columns: tuple[str, ...]) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet

    if path.suffix == ".parquet":
        table = pyarrow.parquet.ParquetFile(file)
        known = _known_columns(path, table.schema_arrow.names, columns)
        yield from table.iter_batches(batch_size=BATCH_ROWS, columns=known)
        return
    in_blocks = file.read(len(_FILE_FORMAT)) == _FILE_FORMAT
    file.seek(0)
    reader = pyarrow.ipc.open_file(file) if in_blocks else pyarrow.ipc.open_stream(file)
    known = _known_columns(path, reader.schema.names, columns)
    if in_blocks:
        batches: Iterator[Any] = (reader.get_batch(number) for number in range(reader.num_record_batches))
    else:
        batches = iter(reader)
    for batch in batches:
        yield batch.select(known)


def _known_columns(path: Path, names: list[str], columns: tuple[str, ...]) -> list[str]:
    known = [name for name in names if name in columns]
    judged = [name for name in PREFERENCES if name in names and name not in known]  # `parse_record` refuses them
    if not known and not {"chosen", "rejected"} <= set(judged):
        raise _refused(str(path), f"none of its columns is known: {', '.join(names)[:200]}", NAME_FIELD)
    return known + judged


def _without_nulls(value: Any) -> Any:
    """A value without the fields that are null. The content of a message stays: a turn may have none but tool calls."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None or name == "content"}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _read_facts(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except (OSError, ValueError) as error:
        raise _refused(str(path), f"cannot be read: {error}", "save the dataset again") from error


TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".c", ".h", ".cc", ".cpp", ".cu", ".rs", ".go", ".java", ".js")
SUFFIXES = (*TEXT_SUFFIXES, ".jsonl", *ARROW_SUFFIXES)
RECORD_SUFFIXES = (".jsonl", ".json", *ARROW_SUFFIXES)  # files whose records can be conversations
MAX_DOCUMENT_BYTES = 64 * MIB  # a document is in memory while it is tokenized
MAX_JSON_BYTES = GIB  # so is a JSON file, of which all records are read at once
HOPELESS = 1000, 0.5  # so many bad records, and so large a share of those so far, end the reading of a file early
NO_PREFERENCES = f"what is read: {FORMS}; write the answers to learn in one of these forms"
NUM_NAMED = 5  # bad records of a file that are named


@dataclass(slots=True)
class FileRecords:
    """The records of one file that were read so far, and those that cannot be used."""

    path: str
    num_records: int = 0
    num_bad: int = 0
    first_bad: Finding | None = None
    bad: list[str] = field(default_factory=list)  # the first few, with the reason

    def add_bad(self, at: str, error: ValueError) -> None:
        """Count a record that is no document, or a conversation that cannot be rendered."""
        self.num_bad += 1
        is_chat = isinstance(error, ChatError)
        advice = (
            '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
            if is_chat
            else f"a JSON object a record with {FORMS}; {NAME_FIELD}"
        )
        if self.first_bad is None:
            rule = "chat-readable" if is_chat else "text-readable"
            self.first_bad = Finding(rule=rule, at=at, problem=str(error), advice=advice)
        if len(self.bad) < NUM_NAMED:
            self.bad.append(f"{at}: {error}")

    def refusal(self, max_bad: float) -> Finding | None:
        """The finding where more records are bad than may be."""
        first = self.first_bad
        if first is None or self.num_bad <= max_bad * self.num_records:
            return None
        counted = f"{self.num_bad} of {format_many(self.num_records, 'record')} cannot be used"
        if self.num_bad == self.num_records:
            limit = ""  # nothing would be left
        else:
            share = math.ceil(100 * self.num_bad / self.num_records) / 100
            limit = (
                f"; or skip them: job.max_bad_records={share:g}, the share of a file's records that may be bad "
                f"(now {max_bad:g}; finetune, tokenize: --max-bad-records)"
            )
        problem = f"{first.problem}; {counted}{', the first for this' if self.num_bad > 1 else ''}"
        return replace(first, problem=problem, advice=f"{first.advice}{limit}")


@dataclass(slots=True)
class ReadSummary:
    """Counts that are filled in while documents are read, and the share of a file's records that may be bad."""

    max_bad: float = 1.0
    num_files: int = 0
    skipped: list[str] = field(default_factory=list)  # files in folders that are no text, with the reason
    files: dict[str, FileRecords] = field(default_factory=dict)  # files of records

    def add_bad(self, at: str, error: ValueError) -> None:
        """Count a record of the file that `at` names as bad."""
        file = self.files[at.rpartition(":")[0]]
        file.add_bad(at, error)
        many, most = HOPELESS
        if file.num_bad >= many and (finding := file.refusal(max(most, self.max_bad))):
            raise FindingsError([finding])

    def check(self) -> None:
        """Raise the finding of the first file of which more records are bad than may be."""
        for file in self.files.values():
            if finding := file.refusal(self.max_bad):
                raise FindingsError([finding])


def read_documents(
    sources: Sequence[str],
    suffixes: Sequence[str] = SUFFIXES,
    text_field: str = "text",
    summary: ReadSummary | None = None,
) -> Iterator[Document]:
    """All documents of the sources.

    A file that is named itself must be readable. A file of a folder that is no text is skipped.
    """
    summary = ReadSummary() if summary is None else summary
    for source in sources:
        path = Path(source)
        for file, within in list_files(path, suffixes):
            try:
                yield from _read_file(file, text_field, summary, within)
            except _NotTextError as problem:
                if within is None:
                    raise _refused(str(path), str(problem), "give a text file, a folder or JSONL") from problem
                summary.skipped.append(f"{file}: {problem}")


def list_files(path: Path, suffixes: Sequence[str] = SUFFIXES) -> Iterator[tuple[Path, Path | None]]:
    """The files of a source, each with the folder that it must lie in; None for a file that is named itself."""
    if not path.is_dir():
        yield path, None
        return
    saved = dataset_files(path)
    yield from ((file, path) for file in (_walk_files(path, tuple(suffixes)) if saved is None else saved))


class _NotTextError(Exception):
    """A file cannot be read as text."""


def _walk_files(folder: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(root, name) for name in sorted(files) if name.endswith(suffixes) and not name.startswith("."))


def _read_file(path: Path, text_field: str, summary: ReadSummary, within: Path | None) -> Iterator[Document]:
    try:
        if path.suffix not in RECORD_SUFFIXES:
            yield _read_text(path, within)
        else:
            counted = summary.files.setdefault(str(path), FileRecords(str(path)))
            for at, record in _read_records(path, text_field, within):
                counted.num_records += 1
                try:
                    if isinstance(record, RecordError):
                        raise record
                    document = parse_record(at, record, text_field)
                except PreferenceError as error:
                    raise _refused(at, str(error), NO_PREFERENCES) from None
                except (RecordError, ChatError) as error:
                    summary.add_bad(at, error)
                    continue
                yield document
    except OSError as error:
        raise _NotTextError(f"cannot be read: {error.strerror or error}") from error
    summary.num_files += 1


def _read_records(path: Path, text_field: str, within: Path | None) -> Iterator[tuple[str, Any]]:
    """The records of a file with their places. A RecordError in place of a record says why it cannot be read."""
    if path.suffix == ".jsonl":
        return _read_jsonl(path, within)
    return _read_json(path, within) if path.suffix == ".json" else read_arrow(path, text_field, within)


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


def _read_jsonl(path: Path, within: Path | None) -> Iterator[tuple[str, Any]]:
    with open_regular(path, within) as file:
        number = 0
        while line := file.readline(MAX_DOCUMENT_BYTES + 1):
            number += 1
            at = f"{path}:{number}"
            if len(line) > MAX_DOCUMENT_BYTES:
                raise _refused(at, f"a line of more than {format_bytes(MAX_DOCUMENT_BYTES)}", "split the document")
            if not line.strip():
                continue
            try:
                yield at, json.loads(line)
            except (ValueError, RecursionError) as error:
                yield at, RecordError(f"not valid JSON: {error}")


def _read_json(path: Path, within: Path | None) -> Iterator[tuple[str, Any]]:
    with open_regular(path, within) as file:
        data = file.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        advice = "write it as JSONL, a record a line: that is read one by one"
        raise _refused(str(path), f"more than {format_bytes(MAX_JSON_BYTES)} of JSON", advice)
    try:
        records = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _refused(str(path), f"not valid JSON: {error}", "a list of records, or JSONL (.jsonl)") from error
    for number, record in enumerate(records if isinstance(records, list) else [records], 1):
        yield f"{path}:{number}", record


def _refused(at: str, problem: str, advice: str) -> FindingsError:
    return FindingsError([Finding(rule="text-readable", at=at, problem=problem, advice=advice)])
