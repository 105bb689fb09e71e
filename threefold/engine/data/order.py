"""The stateless shuffle: where an index goes is computed, not looked up, so any sample can be reached directly."""

import hashlib
from functools import lru_cache

ROUNDS = 6
_MASK64 = 2**64 - 1


def shuffled(index: int, size: int, *key: int | str) -> int:
    """A permutation of range(size), chosen by the key: a Feistel network, walked until it lands inside.

    The network permutes the next power of four, less than four times `size`, so a walk takes under four steps on
    average.
    """
    if not 0 <= index < size:
        raise IndexError(f"{index} is not in range({size})")
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = _round_keys(key)
    while True:
        index = _network(index, half, keys)
        if index < size:
            return index


def _network(index: int, half: int, keys: tuple[int, ...]) -> int:
    low = (1 << half) - 1
    left, right = index >> half, index & low
    for key in keys:
        left, right = right, left ^ (_scramble(right ^ key) & low)
    return left << half | right


def _scramble(x: int) -> int:
    """SplitMix64's finaliser (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


@lru_cache(maxsize=1024)
def _round_keys(key: tuple[int | str, ...]) -> tuple[int, ...]:
    digest = hashlib.sha512(repr(key).encode()).digest()
    return tuple(int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(ROUNDS))
