"""Tokenizes files into one token shard or Megatron dataset. `threefold tokenize` and `token_cache.py` call it."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from threefold.engine.data.shards.megatron_writer import MegatronWriter
from threefold.engine.data.shards.shard_writer import ShardWriter
from threefold.engine.data.shards.token_shard import CONTINUES
from threefold.engine.data.text.chat.conversation import ChatError
from threefold.engine.data.text.chat_template import encode_chat
from threefold.engine.data.text.read_documents import SUFFIXES, ReadSummary, read_documents
from threefold.engine.data.text.records import Document
from threefold.engine.data.text.tokenizer import Tokenizer
from threefold.findings import Finding, FindingsError
from threefold.plan.data_entries import MEGATRON_SUFFIXES
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
        """What a run on this data should say once."""
        found = []
        if self.num_bad_records:
            problem = f"{format_many(self.num_bad_records, 'record')} skipped: {'; '.join(self.bad_records)}"
            advice = "correct them; job.max_bad_records=0 refuses them"
            found.append(Finding("job.data", problem, advice=advice, severity="warning", rule="records-skipped"))
        if self.num_chats_by_turn:
            problem = (
                f"in {format_many(self.num_chats_by_turn, 'conversation')} each answer is a sample of its own: "
                "the chat template renders earlier turns otherwise when others follow"
            )
            advice = "nothing is to be done; a template with {% generation %} keeps conversations whole"
            found.append(Finding("job.data", problem, advice=advice, severity="warning", rule="chats-split-by-turn"))
        return found


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
        bad_records=tuple(said for file in summary.files.values() for said in file.bad),
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
