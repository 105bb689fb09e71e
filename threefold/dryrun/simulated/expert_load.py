"""How many rows each expert gets in a rehearsal: balanced, by given shares, or as a run recorded them.

Tensors of a rehearsal have no values. Where the engine would read row counts from the device (`dist/host_sizes.py`), it
asks the size source that `ExpertLoads` makes. The shares come from `threefold dry-run --loads` or `--skew`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from threefold.engine.dist.host_sizes import SizeSource


@dataclass(frozen=True)
class ExpertLoads:
    """The distribution of tokens over experts, as seen from one expert-parallel rank."""

    shares: tuple[float, ...] = ()  # tokens of each expert, in any unit; empty if the load is balanced
    ep_rank: int = 0  # the rank whose rows are counted
    # Whether a rank receives from another exactly the rows which that one sends. Otherwise only their sum is right.
    agree_by_pair: bool = False

    def size_source(self) -> SizeSource:
        def sizes(parts: int, total: int, exact: bool) -> list[int]:
            if exact or not (self.shares or self.agree_by_pair):
                return split_total(total, self._share_by_part(parts))
            if self.agree_by_pair:
                return [split_total(total, self._share_by_part(parts))[self.ep_rank % parts]] * parts
            # All ranks route alike, so this rank receives its own share of what each of the `parts` ranks sends.
            received = self._share_by_part(parts)[self.ep_rank % parts]
            return split_total(round(total * parts * received), [1.0] * parts)

        return sizes

    def skew(self, ep: int) -> float:
        """The load of the busiest expert-parallel rank over the mean."""
        return max(self._share_by_part(ep)) * ep

    def busiest(self, ep: int) -> int:
        """The expert-parallel rank with the highest load."""
        shares = self._share_by_part(ep)
        return shares.index(max(shares))

    def _share_by_part(self, parts: int) -> list[float]:
        """The share of each of `parts` equal blocks of experts; the shares add up to 1."""
        if len(self.shares) < parts or len(self.shares) % parts:
            return [1 / parts] * parts
        each, total = len(self.shares) // parts, sum(self.shares)
        return [sum(self.shares[i * each : (i + 1) * each]) / total for i in range(parts)]


def split_total(total: int, shares: Sequence[float]) -> list[int]:
    """Integers that add up to `total`, each as near to its share as rounding allows."""
    sum_of_shares = sum(shares)
    bounds = [round(total * end / sum_of_shares) for end in accumulate(shares, initial=0.0)]
    return [after - before for before, after in pairwise(bounds)]
