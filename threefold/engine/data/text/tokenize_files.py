"""Tokenizes files into one token shard. `threefold tokenize` and, for JSONL, `open_sources` call `tokenize_files`."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from threefold.engine.data.shards.shard_writer import ShardWriter
from threefold.engine.data.shards.token_shard import TokenShard
from threefold.engine.data.text.chat_template import ChatError, encode_chat
from threefold.engine.data.text.read_documents import SUFFIXES, Document, ReadSummary, read_documents
from threefold.engine.data.text.tokenizer import Tokenizer
from threefold.findings import Finding, FindingsError
from threefold.units import MIB

GROUP_CHARACTERS = 4 * MIB  # texts that are tokenized together, enough to keep all cores busy
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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def tokenize_files(
    sources: Sequence[str],
    out: str | Path,
    tokenizer: Tokenizer,
    suffixes: Sequence[str] = SUFFIXES,
    text_field: str = "text",
    progress: Progress | None = None,
) -> Tokenized:
    """Write the documents of files, folders and JSONL to one shard. Conversations add a loss mask to it."""
    begin, summary = time.monotonic(), ReadSummary()
    with ShardWriter(out, tokenizer.vocab, tokenizer.label) as writer:
        for group in _group_documents(read_documents(sources, suffixes, text_field, summary)):
            _add_documents(writer, tokenizer, group)
            if progress:
                progress(writer.num_documents, writer.num_tokens)
        if not writer.num_documents:
            problem = f"no document with a suffix of {' '.join(suffixes)}"
            raise FindingsError(
                [Finding(rule="data-empty", at=" ".join(sources), problem=problem, advice="give text, or --suffix")]
            )
    header = TokenShard(out, verify=False).header
    return Tokenized(
        out=str(out),
        num_files=summary.num_files,
        num_documents=header.num_documents,
        num_tokens=header.num_tokens,
        vocab=header.vocab,
        tokenizer=header.tokenizer,
        fingerprint=header.fingerprint,
        masked=header.masked,
        seconds=time.monotonic() - begin,
        skipped=tuple(summary.skipped),
    )


def _group_documents(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Groups of documents that are tokenized together, small enough to keep memory bounded."""
    for first in documents:
        group, size = [first], len(first.text)
        while size < GROUP_CHARACTERS and len(group) < 4096 and (more := next(documents, None)) is not None:
            group.append(more)
            size += len(more.text)
        yield group


def _add_documents(writer: ShardWriter, tokenizer: Tokenizer, group: list[Document]) -> None:
    texts = tokenizer.encode_all([document.text for document in group if document.messages is None])
    end = [] if tokenizer.end is None else [tokenizer.end]
    for document in group:
        if document.messages is None:
            tokens = next(texts)
            if tokens.size:
                writer.add(np.concatenate([tokens, np.array(end, np.int64)]))
            continue
        try:
            writer.add(*encode_chat(tokenizer, document.messages))
        except ChatError as error:
            advice = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
            raise FindingsError(
                [Finding(rule="chat-readable", at=document.at, problem=str(error), advice=advice)]
            ) from error
