"""Where samples come from. A source gives sample `index` of `num_samples`, always the same one."""

import hashlib
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from threefold.engine.data.lengths import LONG, WEB, Lengths
from threefold.engine.data.packing import PackedWhole, Sample, concatenated, num_stream_samples, packed, padded
from threefold.engine.data.shard import Shard

ENDLESS = 2**40  # samples of a synthetic source: no run reaches the end
LONG_TOKENS = 32_768  # sequences from here on get long documents


class Source(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def num_samples(self) -> int: ...

    @property
    def benchmark_only(self) -> bool:
        """A run on it says nothing about learning."""

    def sample(self, index: int) -> Sample: ...

    def fingerprint(self) -> str: ...


class ShardSource:
    """A shard, cut into sequences as the job says."""

    benchmark_only = False

    def __init__(self, shard: Shard, seq_len: int, packing: bool, sft: bool = False) -> None:
        self.name, self.shard, self.seq_len, self.packing = str(shard.path), shard, seq_len, packing
        self._whole = PackedWhole(shard, seq_len, masked=True, together=packing) if sft else None
        if self._whole is not None:
            self.num_samples = len(self._whole)
        else:
            self.num_samples = num_stream_samples(shard.header.num_tokens, seq_len)

    def sample(self, index: int) -> Sample:
        if self._whole is not None:
            return self._whole.sample(index)
        return (packed if self.packing else concatenated)(self.shard, index, self.seq_len)

    def fingerprint(self) -> str:
        return self.shard.header.fingerprint


class SyntheticSource:
    """Random tokens: uniform, or by Zipf's law (token k in proportion to 1 / (k + 1)). Nothing can be learned."""

    benchmark_only = True
    num_samples = ENDLESS

    def __init__(
        self,
        vocab: int,
        seq_len: int,
        packing: bool = False,
        zipf: bool = False,
        seed: int = 0,
        lengths: Lengths | None = None,
    ) -> None:
        """`lengths` of the documents when packing; absent: long ones for long sequences, else those of web text."""
        self.name = "synthetic-zipf" if zipf else "synthetic"
        self.vocab, self.seq_len, self.packing, self.seed = vocab, seq_len, packing, seed
        self.lengths = lengths or (LONG if seq_len >= LONG_TOKENS else WEB)
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
            tokens = np.minimum(drawn, self.vocab - 1)  # the sum can fall short of 1 by rounding
        labels = tokens[1:].copy()
        if not self.packing:
            return padded(tokens[:-1], labels, self.seq_len)
        ends = np.cumsum(self.lengths.fill(self.seq_len, rng))
        labels[ends - 1] = -100
        return padded(tokens[:-1], labels, self.seq_len, np.concatenate([[0], ends[:-1]]))

    def fingerprint(self) -> str:
        facts = (self.name, self.vocab, self.seq_len, self.packing, self.seed, self.lengths)
        return hashlib.sha256(repr(facts).encode()).hexdigest()


@dataclass(frozen=True)
class Joined:
    """Several sources one after the other, as the shards of a folder."""

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


@dataclass(frozen=True)
class Range:
    """A run of a source's samples: what is held out for evaluation, or what remains for training."""

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

    def fingerprint(self) -> str:
        return f"{self.source.fingerprint()}[{self.first}:{self.first + self.num_samples}]"


def split(source: Source, held_out: float, evaluation: bool) -> Source:
    """The last `held_out` of a source for evaluation, the rest for training. One sample is never both."""
    kept_back = round(source.num_samples * held_out)
    if held_out > 0:
        kept_back = min(max(kept_back, 1), source.num_samples - 1)
    first = source.num_samples - kept_back
    return Range(source, first, kept_back) if evaluation else Range(source, 0, first)
