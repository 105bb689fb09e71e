"""Documents into sequences.

S: tokens of a sequence; N: those of them that are not padding, N <= S.

Three ways. `concatenated`: the shard is one stream, cut every S tokens, and attention sees across documents.
`packed`: the same stream with boundaries. `PackedWhole`: documents stay whole, as conversations must; sequences are
filled as tightly as fits, or hold one document each.
"""

import bisect
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from threefold.engine.data.shard import Shard

Ints = NDArray[np.int64]
IGNORED = -100  # the label of a position without a loss
PAD = 0  # the token under padding: never learned, never seen by other documents
WINDOW = 4096  # documents that are packed together


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence. Documents count from 0, positions restart in each; both absent: one document, no boundaries."""

    tokens_S: Ints
    labels_S: Ints
    documents_S: Ints | None = None
    positions_S: Ints | None = None
    num_padding: int = 0


def padded(tokens_N: NDArray[Any], labels_N: NDArray[Any], seq_len: int, starts: NDArray[Any] | None = None) -> Sample:
    """A sample of S tokens. `starts` are where documents begin; padding is a document of its own, the last one."""
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
    """Sequences that a stream gives, the last one padded. A stream's last token has no successor to learn."""
    return -(-(num_tokens - 1) // seq_len) if num_tokens > 1 else 0


def concatenated(shard: Shard, index: int, seq_len: int) -> Sample:
    """Sequence `index` of the stream; labels cross documents, whose ends are marked by the end token alone."""
    tokens_N, labels_N, _ = _stream(shard, index, seq_len)
    return padded(tokens_N, labels_N, seq_len)


def packed(shard: Shard, index: int, seq_len: int) -> Sample:
    """Sequence `index` of the stream, with boundaries.

    A document cut by the end of a sequence goes on as a new one in the next; the label at the cut is its next token.
    """
    tokens_N, labels_N, first = _stream(shard, index, seq_len)
    after = first + len(tokens_N)
    span = np.searchsorted(shard.offsets, [np.uint64(first), np.uint64(after)], side="right")
    inside = shard.offsets[span[0] : span[1]].astype(np.int64) - first  # ends in 1..N: the next token is another's
    labels_N[inside - 1] = IGNORED
    starts = np.concatenate([[0], inside[inside < len(tokens_N)]])
    return padded(tokens_N, labels_N, seq_len, starts)


def _stream(shard: Shard, index: int, seq_len: int) -> tuple[Ints, Ints, int]:
    first = index * seq_len
    chunk = shard.tokens[first : first + seq_len + 1].astype(np.int64)
    if len(chunk) <= seq_len:
        return chunk, np.append(chunk[1:], IGNORED), first
    return chunk[:-1], chunk[1:].copy(), first


class PackedWhole:
    """Sequences of whole documents. One longer than a sequence keeps its beginning; one with nothing to learn goes."""

    def __init__(self, shard: Shard, seq_len: int, masked: bool, together: bool = True) -> None:
        """`masked`: only tokens of the loss mask are learned. `together`: fill sequences, or one document in each."""
        self.shard, self.seq_len, self.together = shard, seq_len, together
        self.mask = shard.mask if masked else None
        sizes = np.diff(shard.offsets.astype(np.int64))
        kept = np.flatnonzero(sizes > 1)
        self.num_truncated = int((sizes > seq_len).sum())
        if self.mask is not None:
            kept = np.array([d for d in kept if self._learns(int(d))], np.int64)
        lengths = np.minimum(sizes[kept], seq_len)
        order, starts = pack(lengths, seq_len) if together else (np.arange(len(kept)), np.arange(len(kept) + 1))
        self._documents, self._starts = kept[order], starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    def sample(self, index: int) -> Sample:
        tokens, labels, starts, at = [], [], [], 0
        for document in self._documents[self._starts[index] : self._starts[index + 1]]:
            first, after = self._bounds(int(document))
            piece = self.shard.tokens[first:after].astype(np.int64)
            target = np.append(piece[1:], IGNORED)
            if self.mask is not None:
                target[:-1][self.mask[first + 1 : after] == 0] = IGNORED
            tokens.append(piece)
            labels.append(target)
            starts.append(at)
            at += len(piece)
        begin = np.array(starts) if self.together else None
        return padded(np.concatenate(tokens), np.concatenate(labels), self.seq_len, begin)

    def _bounds(self, document: int) -> tuple[int, int]:
        first, after = (int(offset) for offset in self.shard.offsets[document : document + 2])
        return first, min(after, first + self.seq_len)

    def _learns(self, document: int) -> bool:
        first, after = self._bounds(document)
        return self.mask is None or bool(self.mask[first + 1 : after].any())


def pack(lengths: NDArray[Any], seq_len: int, window: int = WINDOW) -> tuple[Ints, Ints]:
    """Best fit of whole documents, longest first, within windows of documents that stand together.

    Returns the order of documents and where each sequence begins in it; one more start than sequences.
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
