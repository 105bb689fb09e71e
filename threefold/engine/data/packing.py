"""Turns the documents of a shard, or of another store, into sequences of `seq_len` tokens.

`TokenShard`, `MegatronDataset` and `DocumentSpans`, the part of a store that a split chooses, are stores. Tokens of a
store are numbered through all its documents. `ShardSource` chooses one of three ways to pack. `concatenated_sample`
cuts the stream of all documents every S tokens, and attention sees across documents. `packed_sample` cuts the same
stream and marks document boundaries. `WholeDocuments` never splits a document, as conversations require, and puts
several or one into a sequence.

Shapes: S tokens of a sequence, N tokens of it that are not padding (N <= S).
"""

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from threefold.engine.data.token_shard import refused

Ints = NDArray[np.int64]


class DocumentStore(Protocol):
    """Documents as tokens, one after another."""

    @property
    def path(self) -> Path: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def offsets(self) -> NDArray[Any]:
        """The first token of each document, and the number of tokens at the end."""

    @property
    def masked(self) -> bool:
        """Return whether there is a loss mask."""

    @property
    def fingerprint(self) -> str: ...

    def read(self, first: int, after: int) -> Ints: ...

    def read_mask(self, first: int, after: int) -> NDArray[np.uint8]:
        """1 for each token of a range that is learned. Only a masked store is asked."""

    def content(self) -> dict[str, Any]:
        """Facts that identify the content, wherever the file lies, as JSON."""


class DocumentSpans:
    """Spans of tokens of a store, in order, read as if they were all of it. Marked spans begin a document."""

    def __init__(
        self, store: DocumentStore, begin_U: Ints, size_U: Ints, opens_U: NDArray[np.bool_], facts: dict[str, Any]
    ) -> None:
        """U spans: where each begins in the store, its tokens, and whether it opens a document. `facts` tell of it."""
        self.store, self._facts = store, facts
        self.path, self.masked = store.path, store.masked
        ends_U = np.cumsum(size_U, dtype=np.int64)
        self.num_tokens = int(ends_U[-1]) if len(ends_U) else 0
        starts_U = ends_U - size_U
        self.offsets: Ints = np.append(starts_U[opens_U], self.num_tokens)
        # Spans that follow each other in the store are read at once.
        joins_U = np.append(True, begin_U[1:] != begin_U[:-1] + size_U[:-1]) if len(begin_U) else np.array([], bool)
        self._run_begins, self._run_starts = begin_U[joins_U], starts_U[joins_U]

    @property
    def fingerprint(self) -> str:
        facts = " ".join(f"{name}={value}" for name, value in self._facts.items())
        return f"{self.store.fingerprint}({facts})"

    def read(self, first: int, after: int) -> Ints:
        return self._read(self.store.read, first, after)

    def read_mask(self, first: int, after: int) -> NDArray[np.uint8]:
        return self._read(self.store.read_mask, first, after)

    def content(self) -> dict[str, Any]:
        return {**self.store.content(), "split": self._facts}

    def _read(self, read: Callable[[int, int], NDArray[Any]], first: int, after: int) -> NDArray[Any]:
        after = min(after, self.num_tokens)
        parts = []
        number = int(np.searchsorted(self._run_starts, first, side="right")) - 1
        while first < after:
            last = number + 1 == len(self._run_starts)
            until = after if last else min(after, int(self._run_starts[number + 1]))
            at = int(self._run_begins[number]) + first - int(self._run_starts[number])
            parts.append(read(at, at + until - first))
            first, number = until, number + 1
        return np.concatenate(parts) if parts else read(0, 0)


IGNORED = -100  # the label of a position without a loss
PAD = 0  # the token at padding positions, which have no loss and which no document attends to
WINDOW = 4096  # documents that are considered together for one packing


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence. `documents_S` and `positions_S` are None if attention sees the whole sequence."""

    tokens_S: Ints
    labels_S: Ints
    documents_S: Ints | None = None  # number of the document, from 0
    positions_S: Ints | None = None  # position in the document
    num_padding: int = 0

    @property
    def num_useful(self) -> int:
        """Tokens that are no padding."""
        return len(self.tokens_S) - self.num_padding


def pad_sample(
    tokens_N: NDArray[Any], labels_N: NDArray[Any], seq_len: int, starts: NDArray[Any] | None = None
) -> Sample:
    """A sample of S tokens. `starts` are the positions where documents begin; padding becomes the last document."""
    count = len(tokens_N)
    tokens_S, labels_S = np.full(seq_len, PAD, np.int64), np.full(seq_len, IGNORED, np.int64)
    tokens_S[:count], labels_S[:count] = tokens_N, labels_N
    if starts is None:
        return Sample(tokens_S, labels_S, num_padding=seq_len - count)
    begin = np.append(starts, count).astype(np.int64) if count < seq_len else np.asarray(starts, np.int64)
    opens_S = np.zeros(seq_len, np.int64)
    opens_S[begin] = 1
    documents_S = np.cumsum(opens_S) - 1
    return Sample(tokens_S, labels_S, documents_S, np.arange(seq_len) - begin[documents_S], seq_len - count)


def num_stream_samples(num_tokens: int, seq_len: int) -> int:
    """The number of sequences of a stream. The last is padded, and the stream's last token has no label."""
    return -(-(num_tokens - 1) // seq_len) if num_tokens > 1 else 0


def concatenated_sample(shard: DocumentStore, index: int, seq_len: int) -> Sample:
    """Sequence `index` of the stream. The label of a document's last token is the first token of the next document."""
    tokens_N, labels_N, _ = _stream(shard, index, seq_len)
    return pad_sample(tokens_N, labels_N, seq_len)


def packed_sample(shard: DocumentStore, index: int, seq_len: int) -> Sample:
    """Sequence `index` of the stream, with document boundaries.

    A document that the end of a sequence splits continues as a new document in the next sequence. The label at the
    split is its next token.
    """
    tokens_N, labels_N, first = _stream(shard, index, seq_len)
    after = first + len(tokens_N)
    span = np.searchsorted(shard.offsets, np.array([first, after], shard.offsets.dtype), side="right")
    # Document ends, in 1..N; the next token is another document's.
    inside = shard.offsets[span[0] : span[1]].astype(np.int64) - first
    if np.any(np.diff(inside, prepend=0) <= 0) or np.any(inside > len(tokens_N)):
        raise refused(shard.path, "its document offsets do not rise")
    labels_N[inside - 1] = IGNORED
    starts = np.concatenate([[0], inside[inside < len(tokens_N)]])
    return pad_sample(tokens_N, labels_N, seq_len, starts)


def _stream(shard: DocumentStore, index: int, seq_len: int) -> tuple[Ints, Ints, int]:
    first = index * seq_len
    chunk = shard.read(first, first + seq_len + 1)
    if len(chunk) <= seq_len:
        return chunk, np.append(chunk[1:], IGNORED), first
    return chunk[:-1], chunk[1:].copy(), first


class WholeDocuments:
    """Sequences of whole documents.

    A document that is longer than a sequence is truncated. A document without any token to learn is left out.
    """

    def __init__(self, shard: DocumentStore, seq_len: int, uses_mask: bool, packs_several: bool = True) -> None:
        """`uses_mask`: learn only tokens of the loss mask. `packs_several`: put several documents into a sequence."""
        self.shard, self.seq_len, self.packs_several = shard, seq_len, packs_several
        self.uses_mask = uses_mask and shard.masked
        sizes = np.diff(shard.offsets.astype(np.int64))
        if np.any(sizes <= 0):
            raise refused(shard.path, "its document offsets do not rise")
        used = np.flatnonzero(sizes > 1)
        if self.uses_mask:
            used = np.array([d for d in used if self._has_labels(int(d))], np.int64)
        lengths = np.minimum(sizes[used], seq_len)
        order, starts = (
            pack_documents(lengths, seq_len) if packs_several else (np.arange(len(used)), np.arange(len(used) + 1))
        )
        self._documents, self._starts = used[order], starts
        self.num_tokens = int(lengths.sum())

    def __len__(self) -> int:
        return len(self._starts) - 1

    def sample(self, index: int) -> Sample:
        tokens, labels, starts, num_tokens = [], [], [], 0
        for document in self._documents[self._starts[index] : self._starts[index + 1]]:
            first, after = self._bounds(int(document))
            document_tokens = self.shard.read(first, after)
            target = np.append(document_tokens[1:], IGNORED)
            if self.uses_mask:
                target[:-1][self.shard.read_mask(first + 1, after) == 0] = IGNORED
            tokens.append(document_tokens)
            labels.append(target)
            starts.append(num_tokens)
            num_tokens += len(document_tokens)
        boundaries = np.array(starts) if self.packs_several else None
        return pad_sample(np.concatenate(tokens), np.concatenate(labels), self.seq_len, boundaries)

    def _bounds(self, document: int) -> tuple[int, int]:
        first, after = (int(offset) for offset in self.shard.offsets[document : document + 2])
        return first, min(after, first + self.seq_len)

    def _has_labels(self, document: int) -> bool:
        first, after = self._bounds(document)
        return bool(self.shard.read_mask(first + 1, after).any())


def pack_documents(lengths: NDArray[Any], seq_len: int, window: int = WINDOW) -> tuple[Ints, Ints]:
    """Best-fit-decreasing packing of whole documents, within windows of consecutive documents.

    Returns the documents in the order of the sequences, and the position in it at which each sequence starts, with one
    more start after the last sequence.
    """
    bins: list[list[int]] = []
    for begin in range(0, len(lengths), window):
        bins += _best_fit(lengths[begin : begin + window], seq_len, begin)
    order = np.array([document for members in bins for document in members], np.int64)
    return order, np.cumsum([0, *(len(members) for members in bins)], dtype=np.int64)


def _best_fit(lengths: NDArray[Any], seq_len: int, begin: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # free tokens and bin, sorted
    for document in np.argsort(-lengths, kind="stable"):
        length = int(lengths[document])
        at = bisect.bisect_left(room, (length, -1))
        free, chosen = room.pop(at) if at < len(room) else (seq_len, len(bins))
        if chosen == len(bins):
            bins.append([])
        bins[chosen].append(begin + int(document))
        if free > length:
            bisect.insort(room, (free - length, chosen))
    return bins
