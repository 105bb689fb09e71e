"""Tokenizes files into one token shard or Megatron dataset, also one that is kept in the cache folder.

`threefold tokenize` calls `tokenize_files`. `open_sources` calls `cached_shard` for text, JSONL, JSON, Parquet, Arrow
and folders of them: a shard for the content of files, tokenizer and chat template. Next to the shard lies a small JSON
file with the warnings of when it was made, so that every run on it prints them too.
"""

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from threefold.engine.data.cache_files import cache_folder, locked
from threefold.engine.data.megatron_dataset import MegatronWriter
from threefold.engine.data.shard_writer import ShardWriter
from threefold.engine.data.text.chat_template import encode_chat
from threefold.engine.data.text.chatml import ChatError
from threefold.engine.data.text.read_documents import SUFFIXES, ReadSummary, list_files, read_documents
from threefold.engine.data.text.records import Document
from threefold.engine.data.text.tokenizer import Tokenizer
from threefold.engine.data.token_shard import CONTINUES, SUFFIX, TokenShard
from threefold.findings import Finding, FindingsError
from threefold.plan.data_entries import MEGATRON_SUFFIXES
from threefold.safe_files import open_regular, read_json, write_aside
from threefold.units import MIB, format_many

GROUP_CHARACTERS = 4 * MIB  # texts that are tokenized together, enough to keep all cores busy
MAX_BAD_RECORDS = 0.01  # of the records of a file, how many may be unreadable: the default of job.max_bad_records
Progress = Callable[[int, int], None]  # called with the numbers of documents and tokens so far


@dataclass(frozen=True, slots=True)
class Tokenized:
    """The shard that was made. `threefold tokenize --json` prints the fields under these names."""

    out: str
    num_files: int
    num_documents: int
    num_tokens: int
    vocab: int
    tokenizer: str
    fingerprint: str
    masked: bool
    seconds: float
    skipped: tuple[str, ...] = ()
    num_bad_records: int = 0
    bad_records: tuple[str, ...] = ()  # the first few of each file, with the reason
    num_chats_by_turn: int = 0  # conversations of which each answer became a sample of its own

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def warnings(self) -> list[Finding]:
        """Warnings that a run on this data should print once."""
        findings = []
        if self.num_bad_records:
            problem = f"{format_many(self.num_bad_records, 'record')} skipped: {'; '.join(self.bad_records)}"
            advice = "correct them; job.max_bad_records=0 refuses them"
            findings.append(Finding("job.data", problem, advice=advice, severity="warning", rule="records-skipped"))
        if self.num_chats_by_turn:
            problem = (
                f"in {format_many(self.num_chats_by_turn, 'conversation')} each answer is a sample of its own: "
                "the chat template renders earlier turns otherwise when others follow"
            )
            advice = "nothing is to be done; a template with {% generation %} keeps conversations whole"
            findings.append(Finding("job.data", problem, advice=advice, severity="warning", rule="chats-split-by-turn"))
        return findings


def tokenize_files(
    sources: Sequence[str],
    out: str | Path,
    tokenizer: Tokenizer,
    suffixes: Sequence[str] = SUFFIXES,
    text_field: str = "text",
    progress: Progress | None = None,
    max_bad_records: float = MAX_BAD_RECORDS,
) -> Tokenized:
    """Write the documents of files and folders to one file. Conversations and completions add a loss mask to it.

    A name that ends with .bin or .idx makes Megatron's two files, which have no loss mask.
    """
    begin, summary = time.monotonic(), ReadSummary(max_bad_records)
    kind = MegatronWriter if Path(out).suffix in MEGATRON_SUFFIXES else ShardWriter
    with kind(out, tokenizer.vocab, tokenizer.label) as writer:
        encoder = _Encoder(writer, tokenizer, summary)
        for group in _group_documents(read_documents(sources, suffixes, text_field, summary)):
            encoder.add(group)
            if progress:
                progress(writer.num_documents, writer.num_tokens)
        summary.check()
        if not writer.num_documents:
            raise _no_documents(sources, suffixes)
    return Tokenized(
        out=str(out),
        num_files=summary.num_files,
        num_documents=writer.num_documents,
        num_tokens=writer.num_tokens,
        vocab=tokenizer.vocab,
        tokenizer=tokenizer.label,
        fingerprint=writer.fingerprint,
        masked=writer.masked,
        seconds=time.monotonic() - begin,
        skipped=tuple(summary.skipped),
        num_bad_records=sum(file.num_bad for file in summary.files.values()),
        bad_records=tuple(reason for file in summary.files.values() for reason in file.bad),
        num_chats_by_turn=encoder.num_chats_by_turn,
    )


def _no_documents(sources: Sequence[str], suffixes: Sequence[str]) -> FindingsError:
    problem, advice = "there is no text in it", "give files with text or records"
    if any(Path(source).is_dir() for source in sources):
        problem = f"no text in files that end with {' '.join(suffixes)}"
        advice = "give files or folders with text; `threefold tokenize --suffix` reads others"
    return FindingsError([Finding(rule="data-empty", at=" ".join(sources), problem=problem, advice=advice)])


def _group_documents(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Groups of documents that are tokenized together, small enough to keep memory bounded."""
    for first in documents:
        group, size = [first], first.num_characters
        while size < GROUP_CHARACTERS and len(group) < 4096 and (more := next(documents, None)) is not None:
            group.append(more)
            size += more.num_characters
        yield group


class _Encoder:
    """Encodes documents into a writer. A conversation that cannot be rendered is counted in the summary."""

    def __init__(self, writer: ShardWriter | MegatronWriter, tokenizer: Tokenizer, summary: ReadSummary) -> None:
        self.writer, self.tokenizer, self.summary = writer, tokenizer, summary
        self.num_chats_by_turn = 0
        self._end = np.array([] if tokenizer.end is None else [tokenizer.end], np.int64)

    def add(self, group: list[Document]) -> None:
        plain = [document.text for document in group if document.chat is None and document.completion is None]
        texts = self.tokenizer.encode_all(plain)
        for document in group:
            if document.chat is not None:
                self._add_chat(document)
            elif document.completion is not None:
                tokens, mask = self.tokenizer.encode_completion(document.text, document.completion)
                learned = np.append(mask, np.ones(len(self._end), np.uint8))
                self.writer.add(np.concatenate([tokens, self._end]), learned)
            elif (tokens := next(texts)).size:
                self.writer.add(np.concatenate([tokens, self._end]))

    def _add_chat(self, document: Document) -> None:
        assert document.chat is not None
        try:
            encoded = encode_chat(self.tokenizer, document.chat)
        except ChatError as error:
            self.summary.add_bad(document.at, error)
            return
        self.num_chats_by_turn += encoded.by_turn
        for number, (tokens, mask) in enumerate(encoded.samples):
            if number:
                mask[0] |= CONTINUES
            self.writer.add(tokens, mask)


CACHE_VERSION = 3  # of how text becomes tokens
_FIELDS = ("at", "problem", "advice", "rule")


def cached_shard(
    source: str,
    tokenizer: Tokenizer,
    cache: str | Path | None = None,
    max_bad_records: float = MAX_BAD_RECORDS,
    text_field: str = "text",
) -> tuple[TokenShard, list[Finding]]:
    """The tokenized source as a shard in the cache folder, made at first use, and warnings about it."""
    template = tokenizer.settings.template_digest
    settings = (tokenizer.label, tokenizer.end, template, max_bad_records, text_field, CACHE_VERSION)
    digest = hashlib.sha256(repr(settings).encode())
    _add_files(digest, Path(source))
    out = cache_folder(cache) / f"text-{digest.hexdigest()[:24]}{SUFFIX}"
    try:
        return TokenShard(out, verify=True), _read_warnings(out)
    except FindingsError:
        pass
    with locked(out):  # the other ranks of a machine wait, and find the shard made
        try:
            return TokenShard(out, verify=True), _read_warnings(out)
        except FindingsError:
            made = tokenize_files([source], out, tokenizer, text_field=text_field, max_bad_records=max_bad_records)
        entries = [{name: getattr(warning, name) for name in _FIELDS} for warning in made.warnings()]
        with contextlib.suppress(OSError):  # the shard is what counts
            write_aside(out.with_suffix(".json"), json.dumps(entries).encode())
        return TokenShard(out, verify=True), made.warnings()


def _add_files(digest: "hashlib._Hash", source: Path) -> None:
    """Add names and content of all files. Those of a folder that cannot be read are skipped by `read_documents` too."""
    for path, within in list_files(source):
        digest.update(f"\0{path.suffix if within is None else path.relative_to(within)}\0".encode("utf-8", "replace"))
        try:
            with open_regular(path, within) as file:
                while part := file.read(MIB):
                    digest.update(part)
        except OSError as error:
            if within is None:
                raise _unreadable(source, error) from error


def _read_warnings(shard: Path) -> list[Finding]:
    try:
        entries = read_json(shard.with_suffix(".json"))
        texts = [[str(each[name]) for name in _FIELDS] for each in entries]
    except (OSError, ValueError, TypeError, KeyError):
        return []
    return [
        Finding(at=at, problem=problem, advice=advice, rule=rule, severity="warning")
        for at, problem, advice, rule in texts
    ]


def _unreadable(path: Path, error: OSError) -> FindingsError:
    problem = f"cannot be read: {error.strerror or error}"
    advice = "give the path of a text file, JSONL, Parquet or a folder"
    return FindingsError([Finding(rule="text-readable", at=str(path), problem=problem, advice=advice)])
