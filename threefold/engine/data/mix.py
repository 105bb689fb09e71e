"""Sources mixed by weight into one endless sequence of samples, whose n-th member is computed directly.

Samples come in blocks of 4096. Every block holds each source equally often, nearest to its weight, at the same shuffled
places; so shares are exact over blocks, to within one sample. A source hands out its own samples in a shuffled order,
every one once before any comes again: that is an epoch, and each epoch has its own order.
"""

import hashlib
import json
from collections.abc import Sequence
from functools import lru_cache

from threefold.engine.data.order import shuffled
from threefold.engine.data.packing import Sample
from threefold.engine.data.source import Source

BLOCK = 4096


class Mix:
    """`sources` with positive weights of any sum."""

    def __init__(self, sources: Sequence[Source], weights: Sequence[float], seed: int = 0) -> None:
        self.sources, self.seed = tuple(sources), seed
        self.counts = block_counts(weights)
        self._turns = _turns(tuple(self.counts), seed)

    @property
    def benchmark_only(self) -> bool:
        return any(source.benchmark_only for source in self.sources)

    def place(self, n: int) -> tuple[int, int]:
        """Which source sample n comes from, and which of its samples it is."""
        block, slot = divmod(n, BLOCK)
        number, turn = self._turns[slot]
        epoch, index = divmod(block * self.counts[number] + turn, self.sources[number].num_samples)
        return number, shuffled(index, self.sources[number].num_samples, self.seed, number, epoch)

    def sample(self, n: int) -> Sample:
        number, index = self.place(n)
        return self.sources[number].sample(index)

    def fingerprint(self) -> str:
        """Equal for an equal sequence of samples."""
        facts = [self.seed, BLOCK, [[s.fingerprint(), c] for s, c in zip(self.sources, self.counts, strict=True)]]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


@lru_cache(maxsize=16)
def _turns(counts: tuple[int, ...], seed: int) -> list[tuple[int, int]]:
    """For each slot of a block its source, and how many slots of that source stand before it."""
    owners = [number for number, count in enumerate(counts) for _ in range(count)]
    met = [0] * len(counts)
    turns = []
    for slot in range(BLOCK):
        number = owners[shuffled(slot, BLOCK, seed, "block")]
        turns.append((number, met[number]))
        met[number] += 1
    return turns


def block_counts(weights: Sequence[float]) -> list[int]:
    """How often each source stands in a block: by largest remainder, at least once."""
    total = sum(weights)
    free = BLOCK - len(weights)
    shares = [max(0.0, weight / total * BLOCK - 1) for weight in weights]
    scale = free / sum(shares) if sum(shares) else 0
    exact = [share * scale for share in shares]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_remainder[: free - sum(counts)]:
        counts[i] += 1
    return [count + 1 for count in counts]
