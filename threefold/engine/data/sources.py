"""Sources of samples: a shard, synthetic tokens, several sources in a row, or a range of a source.

A source returns the same sample for the same index, always. `open_sources` makes the sources of a job, `Mixture` reads
them. Synthetic documents have lengths from mixtures of log-normal distributions, whose parameters are chosen, not
fitted to one corpus. Web text has a median of some hundred tokens and a long tail. Long-context mixtures add whole
files and books, so that most documents are short and most tokens are in long documents, which makes the work of ranks
uneven.
"""

import hashlib
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from threefold.engine.data.packing import (
    DocumentStore,
    Sample,
    WholeDocuments,
    concatenated_sample,
    num_stream_samples,
    packed_sample,
    pad_sample,
)
from threefold.engine.data.token_shard import DIGITS


@dataclass(frozen=True, slots=True)
class LogNormal:
    """One part of a mixture. Class and field names enter the data fingerprint of runs, so they cannot change."""

    weight: float
    median: float  # tokens
    sigma: float  # standard deviation of the logarithm

    @property
    def mean(self) -> float:
        return self.median * float(np.exp(self.sigma**2 / 2))


@dataclass(frozen=True, slots=True)
class Lengths:
    """A mixture of distributions. `SyntheticSource.fingerprint` hashes its repr, so its names cannot change."""

    parts: tuple[LogNormal, ...]
    least: int = 16  # draws are clipped to least..most
    most: int = 2**20

    @property
    def mean(self) -> float:
        """The mean length of a document before clipping."""
        return sum(p.weight * p.mean for p in self.parts) / sum(p.weight for p in self.parts)

    def draw(self, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """`count` lengths."""
        weight = np.array([p.weight for p in self.parts])
        part = rng.choice(len(self.parts), size=count, p=weight / weight.sum())
        median = np.array([p.median for p in self.parts])[part]
        sigma = np.array([p.sigma for p in self.parts])[part]
        drawn = np.exp(np.log(median) + sigma * rng.standard_normal(count))
        return np.asarray(np.clip(drawn, self.least, self.most), np.int64)

    def fill(self, seq_len: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Lengths that add up to `seq_len`; the last one is cut to fit."""
        drawn = self.draw(8, rng)
        while drawn.sum() < seq_len:
            drawn = np.concatenate([drawn, self.draw(len(drawn), rng)])
        ends = np.minimum(np.cumsum(drawn), seq_len)
        ends = ends[: int(np.searchsorted(ends, seq_len)) + 1]
        return np.diff(ends, prepend=0)


WEB = Lengths((LogNormal(1.0, 450, 1.1),))
LONG = Lengths((LogNormal(0.80, 600, 1.2), LogNormal(0.15, 8_000, 0.9), LogNormal(0.05, 80_000, 0.8)))


SYNTHETIC_SAMPLES = 2**40  # samples of a synthetic source; no run reaches the end
LONG_TOKENS = 32_768  # sequences of at least this length are packed from long documents


class Source(Protocol):
    """The interface that `Mixture` needs of a source."""

    @property
    def name(self) -> str: ...

    @property
    def num_samples(self) -> int: ...

    @property
    def benchmark_only(self) -> bool:
        """Return whether a run on this source says nothing about learning."""

    def sample(self, index: int) -> Sample: ...

    def fingerprint(self) -> str: ...

    def content(self) -> dict[str, Any]:
        """The content of the source, wherever it lies, as JSON, for the contract of a run."""


class ShardSource:
    """The sequences of a shard or other store. Fine-tuning (`sft`) keeps documents whole; else they are one stream."""

    benchmark_only = False

    def __init__(self, shard: DocumentStore, seq_len: int, packing: bool, sft: bool = False) -> None:
        self.name, self.shard, self.seq_len, self.packing = str(shard.path), shard, seq_len, packing
        self._whole_documents = WholeDocuments(shard, seq_len, uses_mask=True, packs_several=packing) if sft else None
        if self._whole_documents is not None:
            self.num_samples = len(self._whole_documents)
        else:
            self.num_samples = num_stream_samples(shard.num_tokens, seq_len)

    @property
    def packed_tokens(self) -> int | None:
        """The tokens of conversations in all sequences, where these are packed."""
        whole = self._whole_documents
        return whole.num_tokens if whole is not None and whole.packs_several else None

    def sample(self, index: int) -> Sample:
        if self._whole_documents is not None:
            return self._whole_documents.sample(index)
        return (packed_sample if self.packing else concatenated_sample)(self.shard, index, self.seq_len)

    def fingerprint(self) -> str:
        return self.shard.fingerprint

    def content(self) -> dict[str, Any]:
        return self.shard.content()


class SyntheticSource:
    """Random tokens for benchmarks: uniform, or by Zipf's law (token k in proportion to 1 / (k + 1))."""

    benchmark_only = True
    num_samples = SYNTHETIC_SAMPLES

    def __init__(self, vocab: int, seq_len: int, packing: bool = False, zipf: bool = False, seed: int = 0) -> None:
        self.name = "synthetic-zipf" if zipf else "synthetic"
        self.vocab, self.seq_len, self.packing, self.seed = vocab, seq_len, packing, seed
        self.lengths = LONG if seq_len >= LONG_TOKENS else WEB  # of packed documents
        self._cumulative: NDArray[np.float64] | None = None
        if zipf:
            share = 1 / np.arange(1, vocab + 1)
            self._cumulative = np.cumsum(share / share.sum())

    def sample(self, index: int) -> Sample:
        rng = np.random.Generator(np.random.Philox(key=[self.seed % 2**64, index]))
        if self._cumulative is None:
            tokens = rng.integers(0, self.vocab, self.seq_len + 1)
        else:
            drawn = np.searchsorted(self._cumulative, rng.random(self.seq_len + 1))
            tokens = np.minimum(drawn, self.vocab - 1)  # rounding can leave the last sum below 1
        labels = tokens[1:].copy()
        if not self.packing:
            return pad_sample(tokens[:-1], labels, self.seq_len)
        ends = np.cumsum(self.lengths.fill(self.seq_len, rng))
        labels[ends - 1] = -100
        return pad_sample(tokens[:-1], labels, self.seq_len, np.concatenate([[0], ends[:-1]]))

    def fingerprint(self) -> str:
        facts = (self.name, self.vocab, self.seq_len, self.packing, self.seed, self.lengths)
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def content(self) -> dict[str, Any]:
        return {"name": self.name, "vocab": self.vocab, "sha256": self.fingerprint()[:DIGITS]}


@dataclass(frozen=True)
class ConcatenatedSource:
    """Several sources one after another, such as the shards of a folder."""

    name: str
    parts: tuple[Source, ...]

    @property
    def num_samples(self) -> int:
        return sum(part.num_samples for part in self.parts)

    @property
    def benchmark_only(self) -> bool:
        return any(part.benchmark_only for part in self.parts)

    def sample(self, index: int) -> Sample:
        for part in self.parts:
            if index < part.num_samples:
                return part.sample(index)
            index -= part.num_samples
        raise IndexError(index)

    def fingerprint(self) -> str:
        return hashlib.sha256(" ".join(part.fingerprint() for part in self.parts).encode()).hexdigest()

    def content(self) -> dict[str, Any]:
        shards = {str(number): part.content() for number, part in enumerate(self.parts)}
        return {"num_shards": len(self.parts), "shard": shards}


@dataclass(frozen=True)
class SampleRange:
    """A range of a source's samples: all of them, or of synthetic ones those held out for evaluation or the rest."""

    source: Source
    first: int
    num_samples: int

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def benchmark_only(self) -> bool:
        return self.source.benchmark_only

    def sample(self, index: int) -> Sample:
        return self.source.sample(self.first + index)

    def num_vision_tokens(self, index: int) -> int:
        return num_vision_tokens(self.source, self.first + index)

    def fingerprint(self) -> str:
        return f"{self.source.fingerprint()}[{self.first}:{self.first + self.num_samples}]"

    def content(self) -> dict[str, Any]:
        return {"num_samples": self.num_samples, **self.source.content()}


def num_vision_tokens(source: Source, index: int) -> int:
    """The image tokens of a sample; 0 where the source has no images."""
    count = getattr(source, "num_vision_tokens", None)
    return int(count(index)) if count is not None else 0


def split_held_out(source: Source, held_out: float, evaluation: bool) -> Source:
    """The part of a synthetic source for evaluation (its last samples) or the part for training (the others).

    Its samples are drawn independently of each other, so that any of them do. Documents are split by `held_out.py`.
    """
    first = source.num_samples - round(source.num_samples * held_out)
    return SampleRange(source, first, source.num_samples - first) if evaluation else SampleRange(source, 0, first)


def whole_range(source: Source) -> Source:
    """All samples of a source. A source that is a range already stays as it is."""
    return source if isinstance(source, SampleRange) else SampleRange(source, 0, source.num_samples)
