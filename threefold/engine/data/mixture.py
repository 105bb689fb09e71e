"""Mixes sources by weight into one endless sequence of samples. Sample n is computed directly from n.

The sequence consists of blocks of 4096 slots. Every block has for each source the same shuffled slots, as many as its
weight says, rounded, so that shares are exact to within one sample per block. Each source returns all of its samples
once, in a shuffled order, before any is repeated: that is an epoch, and each epoch has another order. The shuffle has
no stored state: a Feistel network computes the position of an index from a key. `Loader` makes the mixture and asks it
for samples.
"""

import hashlib
import json
from collections.abc import Sequence
from functools import lru_cache

from threefold.engine.data.packing import Sample
from threefold.engine.data.sources import Source, num_vision_tokens

ROUNDS = 6
_MASK64 = 2**64 - 1


def shuffled_index(index: int, size: int, *key: int | str) -> int:
    """The position of `index` in a permutation of range(size) that the key chooses.

    The Feistel network permutes the numbers up to the next power of four. It is applied again until the result is below
    `size`. That power is less than four times `size`, so this takes fewer than four rounds on average.
    """
    if not 0 <= index < size:
        raise IndexError(f"{index} is not in range({size})")
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = _round_keys(key)
    while True:
        index = _feistel(index, half, keys)
        if index < size:
            return index


def _feistel(index: int, half: int, keys: tuple[int, ...]) -> int:
    low = (1 << half) - 1
    left, right = index >> half, index & low
    for key in keys:
        left, right = right, left ^ (_scramble(right ^ key) & low)
    return left << half | right


def _scramble(x: int) -> int:
    """SplitMix64's finalizer (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


@lru_cache(maxsize=1024)
def _round_keys(key: tuple[int | str, ...]) -> tuple[int, ...]:
    digest = hashlib.sha512(repr(key).encode()).digest()
    return tuple(int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(ROUNDS))


BLOCK = 4096


class Mixture:
    """Sources with positive weights, which need not add up to 1."""

    def __init__(self, sources: Sequence[Source], weights: Sequence[float], seed: int = 0) -> None:
        self.sources, self.seed = tuple(sources), seed
        self.counts = block_counts(weights)
        self._slots = _block_slots(tuple(self.counts), seed)

    @property
    def benchmark_only(self) -> bool:
        return any(source.benchmark_only for source in self.sources)

    def locate(self, n: int) -> tuple[int, int]:
        """The source that sample n comes from, and the index of the sample in that source."""
        block, slot = divmod(n, BLOCK)
        number, earlier_slots = self._slots[slot]
        epoch, index = divmod(block * self.counts[number] + earlier_slots, self.sources[number].num_samples)
        return number, shuffled_index(index, self.sources[number].num_samples, self.seed, number, epoch)

    def sample(self, n: int) -> Sample:
        number, index = self.locate(n)
        return self.sources[number].sample(index)

    def num_vision_tokens(self, n: int) -> int:
        """The image tokens of sample n."""
        number, index = self.locate(n)
        return num_vision_tokens(self.sources[number], index)

    def fingerprint(self) -> str:
        """A digest that is equal for equal sequences of samples."""
        facts = [self.seed, BLOCK, [[s.fingerprint(), c] for s, c in zip(self.sources, self.counts, strict=True)]]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


@lru_cache(maxsize=16)
def _block_slots(counts: tuple[int, ...], seed: int) -> list[tuple[int, int]]:
    """For each slot of a block, its source and the number of earlier slots of the same source."""
    owners = [number for number, count in enumerate(counts) for _ in range(count)]
    num_seen = [0] * len(counts)
    slots = []
    for slot in range(BLOCK):
        number = owners[shuffled_index(slot, BLOCK, seed, "block")]
        slots.append((number, num_seen[number]))
        num_seen[number] += 1
    return slots


def block_counts(weights: Sequence[float]) -> list[int]:
    """The number of slots of a block for each source: by the largest-remainder method, and at least one."""
    total = sum(weights)
    num_free = BLOCK - len(weights)  # slots that are left when each source has one
    shares = [max(0.0, weight / total * BLOCK - 1) for weight in weights]
    scale = num_free / sum(shares) if sum(shares) else 0
    exact = [share * scale for share in shares]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_remainder[: num_free - sum(counts)]:
        counts[i] += 1
    return [count + 1 for count in counts]
