"""Distributions of document lengths in tokens, as mixtures of log-normal distributions.

`SyntheticSource` draws the boundaries of packed documents from them. The parameters are chosen, not fitted to one
corpus. Web text has a median of some hundred tokens and a long tail. Long-context mixtures add whole files and books,
so that most documents are short and most tokens are in long documents, which makes the work of ranks uneven.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


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
CHAT = Lengths((LogNormal(0.8, 350, 0.9), LogNormal(0.2, 2_000, 0.8)))
CODE = Lengths((LogNormal(0.9, 900, 1.2), LogNormal(0.1, 12_000, 0.9)))
LONG = Lengths((LogNormal(0.80, 600, 1.2), LogNormal(0.15, 8_000, 0.9), LogNormal(0.05, 80_000, 0.8)))
LENGTHS = {"web": WEB, "chat": CHAT, "code": CODE, "long": LONG}


def draw_lengths(name: str, count: int, seed: int = 0) -> NDArray[np.int64]:
    """`count` lengths of a named distribution, reproducible by the seed."""
    return LENGTHS[name].draw(count, np.random.default_rng(seed))
