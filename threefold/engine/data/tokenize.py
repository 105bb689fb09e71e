"""Text files to a token shard: what `threefold tokenize` does."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from threefold.engine.data.chat import ChatError, encode_chat
from threefold.engine.data.shard import Shard
from threefold.engine.data.text import SUFFIXES, Document, Reading, documents
from threefold.engine.data.tokenizer import Tokenizer
from threefold.engine.data.writer import ShardWriter
from threefold.findings import Finding, FindingsError
from threefold.units import MIB

GROUP_CHARACTERS = 4 * MIB  # texts tokenized together: enough to keep every core busy
Progress = Callable[[int, int], None]  # documents and tokens so far


@dataclass(frozen=True, slots=True)
class Tokenized:
    """The shard that was made."""

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


def tokenize(
    sources: Sequence[str],
    out: str | Path,
    tokenizer: Tokenizer,
    suffixes: Sequence[str] = SUFFIXES,
    text_field: str = "text",
    progress: Progress | None = None,
) -> Tokenized:
    """Write the documents of files, folders and JSONL to one shard. Conversations bring a loss mask."""
    begin, reading = time.monotonic(), Reading()
    with ShardWriter(out, tokenizer.vocab, tokenizer.label) as writer:
        for group in _groups(documents(sources, suffixes, text_field, reading)):
            _add(writer, tokenizer, group)
            if progress:
                progress(writer.num_documents, writer.num_tokens)
        if not writer.num_documents:
            problem = f"no document with a suffix of {' '.join(suffixes)}"
            raise FindingsError(
                [Finding(rule="data-empty", at=" ".join(sources), problem=problem, advice="give text, or --suffix")]
            )
    header = Shard(out, verify=False).header
    return Tokenized(
        out=str(out),
        num_files=reading.num_files,
        num_documents=header.num_documents,
        num_tokens=header.num_tokens,
        vocab=header.vocab,
        tokenizer=header.tokenizer,
        fingerprint=header.fingerprint,
        masked=header.masked,
        seconds=time.monotonic() - begin,
        skipped=tuple(reading.skipped),
    )


def _groups(found: Iterator[Document]) -> Iterator[list[Document]]:
    """Documents until they are enough, so that memory stays bounded."""
    for first in found:
        group, size = [first], len(first.text)
        while size < GROUP_CHARACTERS and len(group) < 4096 and (more := next(found, None)) is not None:
            group.append(more)
            size += len(more.text)
        yield group


def _add(writer: ShardWriter, tokenizer: Tokenizer, group: list[Document]) -> None:
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
