"""How many rows an expert rank gets: balanced, by a distribution over experts, or as a run recorded it.

The tensors of a rehearsal have no values, so the host asks here for the sizes it would read from the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from threefold.engine.dispatch.splits import Source


@dataclass(frozen=True)
class Loads:
    """`shares` of the experts in the tokens of a step; empty: balanced. `ep_rank` is whose rows are counted."""

    shares: tuple[float, ...] = ()
    ep_rank: int = 0

    def source(self) -> Source:
        def sizes(parts: int, total: int, exact: bool) -> list[int]:
            if exact or not self.shares:
                return split(total, self._by_part(parts))
            # What comes here, from ranks that all route alike.
            here = self._by_part(parts)[self.ep_rank % parts]
            return split(round(total * parts * here), [1.0] * parts)

        return sizes

    def skew(self, ep: int) -> float:
        """The load of the busiest expert rank over the mean."""
        return max(self._by_part(ep)) * ep

    def busiest(self, ep: int) -> int:
        shares = self._by_part(ep)
        return shares.index(max(shares))

    def _by_part(self, parts: int) -> list[float]:
        """The share of each of `parts` equal blocks of experts."""
        if len(self.shares) < parts or len(self.shares) % parts:
            return [1 / parts] * parts
        each, whole = len(self.shares) // parts, sum(self.shares)
        return [sum(self.shares[i * each : (i + 1) * each]) / whole for i in range(parts)]


def split(total: int, shares: Sequence[float]) -> list[int]:
    """Whole numbers as near to the shares as can be, that add up to `total`."""
    whole = sum(shares)
    cuts = [round(total * end / whole) for end in accumulate(shares, initial=0.0)]
    return [after - before for before, after in pairwise(cuts)]
