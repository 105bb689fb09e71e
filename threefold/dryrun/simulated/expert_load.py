"""Rows that each expert gets in a rehearsal: balanced, by given shares, or drawn by the load of the plan.

Tensors of a rehearsal have no values. Where the engine would read row counts from the device (`dist/host_sizes.py`), it
asks the size source that `ExpertLoads` makes. The shares come from `threefold dry-run --loads` or `--skew`, and
`DrawnLoads` from `job.load` or `--load`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from threefold.engine.dist.host_sizes import SizeSource
from threefold.layout.replicas import place_replicas
from threefold.plan.load import PERIOD, expert_shares
from threefold.plan.plan import Plan


@dataclass(frozen=True)
class ExpertLoads:
    """The distribution of tokens over experts, as seen from one expert-parallel rank."""

    shares: tuple[float, ...] = ()  # tokens of each expert, in any unit; empty if the load is balanced
    ep_rank: int = 0  # the rank whose rows are counted
    # Whether a rank receives from another exactly the rows which that one sends. Otherwise only their sum is right.
    agree_by_pair: bool = False

    def size_source(self, layer: Callable[[], int] = lambda: 0) -> SizeSource:
        """The function that the engine asks. `layer` returns the number of the layer that is running."""

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

    def ranks(self, ep: int) -> list[int]:
        """The expert-parallel ranks that are worth a rehearsal: the one with the highest load."""
        shares = self._share_by_part(ep)
        return [shares.index(max(shares))]

    def skew_of_rank(self) -> float | None:
        """The load of this rank over the mean, where it is known and not that of the busiest one."""
        return None

    def _share_by_part(self, parts: int) -> list[float]:
        """The share of each of `parts` equal blocks of experts; the shares add up to 1."""
        if len(self.shares) < parts or len(self.shares) % parts:
            return [1 / parts] * parts
        each, total = len(self.shares) // parts, sum(self.shares)
        return [sum(self.shares[i * each : (i + 1) * each]) / total for i in range(parts)]


@dataclass(frozen=True)
class DrawnLoads(ExpertLoads):
    """Counts that are drawn by the load of a plan, in the step of its period in which some rank gets most rows.

    All microbatches of a layer have the same draw, so that a recompute sees what the forward saw.
    """

    load: str = ""
    num_experts: int = 1
    top_k: int = 1
    tokens: int = 1  # that a rank routes
    ep: int = 1
    num_layers: int = 1  # with experts, of a stage
    slots: int = 0  # of a rank, for copies of experts

    @classmethod
    def of(cls, plan: Plan) -> "DrawnLoads":
        moe, layout, job = plan.model.moe, plan.layout, plan.job
        assert moe is not None
        tokens = job.micro_batch * job.seq_len // layout.cp // layout.tp
        num_layers = max(1, sum(layer.ffn == "moe" for layer in plan.model.layers) // layout.pp)
        return cls((), 0, False, job.load, moe.num_experts, moe.top_k, tokens, layout.ep, num_layers, plan.expert_slots)

    def size_source(self, layer: Callable[[], int] = lambda: 0) -> SizeSource:
        def sizes(parts: int, total: int, exact: bool) -> list[int]:
            rows_XR, rows_XE = self._rows(layer()), self._drawn(layer())
            copies = self.tokens * self.top_k
            if parts == self.ep and not exact:
                return [round(rows * total / copies) for rows in rows_XR[:, self.ep_rank].tolist()]
            if parts == self.ep and total <= copies:
                return split_total(total, rows_XR[self.ep_rank].tolist())
            mine_E = rows_XE.sum(axis=0).reshape(self.ep, -1)[self.ep_rank]
            return split_total(total, mine_E.tolist() if len(mine_E) == parts and mine_E.any() else [1.0] * parts)

        return sizes

    def skew(self, ep: int) -> float:
        return float(self._skews.max())

    def ranks(self, ep: int) -> list[int]:
        """The rank with most rows, and the one that is nearest to the mean."""
        return [int(self._skews.argmax()), int(np.abs(self._skews - 1).argmin())]

    def skew_of_rank(self) -> float:
        return float(self._skews[self.ep_rank])

    @cached_property
    def _step(self) -> int:
        def largest(step: int) -> float:
            return max(np.reshape(expert_shares(self.load, self.num_experts, 0, step), (self.ep, -1)).sum(axis=1))

        return max(range(PERIOD), key=largest)

    @cached_property
    def _skews(self) -> NDArray[np.float64]:
        """Rows of each rank over the mean, in all layers of a stage."""
        rows_R = sum(self._rows(layer).sum(axis=0) for layer in range(self.num_layers))
        return np.asarray(rows_R / np.mean(rows_R))

    def _rows(self, layer: int) -> NDArray[np.float64]:
        """Rows by source rank and rank that computes them, with copies of experts that the same load has placed."""
        drawn_XE = self._drawn(layer)
        rows_XR = drawn_XE.reshape(self.ep, self.ep, -1).sum(axis=2).astype(np.float64)
        if self.slots:
            replicas = place_replicas(drawn_XE.sum(axis=0).tolist(), self.ep, self.slots)
            for expert in replicas.rows:
                for source in range(self.ep):
                    rows_XR[source, expert // replicas.experts_per_rank] -= drawn_XE[source, expert]
                    for rank, share in replicas.shares(expert, source).items():
                        rows_XR[source, rank] += share * drawn_XE[source, expert]
        return rows_XR

    def _drawn(self, layer: int) -> NDArray[np.int64]:
        """Token copies by source rank and expert."""
        return _draw(self.load, self.num_experts, self.top_k, self.tokens, self.ep, layer, self._step)


@cache
def _draw(load: str, num_experts: int, top_k: int, tokens: int, ep: int, layer: int, step: int) -> NDArray[np.int64]:
    """Copies are drawn apart from each other: tokens, as `drawn_choices` draws them, would take minutes for a plan."""
    draw, rows = np.random.default_rng((layer, step)), []
    for rank in range(ep):
        shares = np.array(expert_shares(load, num_experts, layer, step, rank, top_k))
        count_E = np.zeros(num_experts, dtype=np.int64)
        while missing := tokens * top_k - int(count_E.sum()):  # an expert takes each token once
            room = np.where(count_E < tokens, shares + 1e-9, 0.0)
            count_E = np.minimum(count_E + draw.multinomial(missing, room / room.sum()), tokens)
        rows.append(count_E)
    return np.array(rows)


def split_total(total: int, shares: Sequence[float]) -> list[int]:
    """Integers that add up to `total`, each as near to its share as rounding allows."""
    sum_of_shares = sum(shares)
    bounds = [round(total * end / sum_of_shares) for end in accumulate(shares, initial=0.0)]
    return [after - before for before, after in pairwise(bounds)]
