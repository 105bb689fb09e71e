"""A shuffle without stored state: the position of an index is computed from a key, with a Feistel network.

`Mixture` uses it to find sample n directly, in any epoch, without a table of all samples.
"""

import hashlib
from functools import lru_cache

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
    """SplitMix64's finaliser (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


@lru_cache(maxsize=1024)
def _round_keys(key: tuple[int | str, ...]) -> tuple[int, ...]:
    digest = hashlib.sha512(repr(key).encode()).digest()
    return tuple(int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(ROUNDS))
