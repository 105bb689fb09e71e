"""Copies of hot experts on expert-parallel ranks with room: which experts are copied where, and how rows are split.

The engine plans a step with it from the counts of the step before (`engine/moe/copies.py`), and `cost` prices a load
with it. It is plain arithmetic on counts that all ranks share, so every rank comes to the same placement. A rank owns a
block of experts and has some slots more for copies of the experts of other ranks.

    load (12, 2, 1, 1), two ranks, one slot each: rank 0 owns experts 0 and 1 with 14 of 16 rows. Expert 0 is copied to
    rank 1, which takes 6 of its 12 rows: those of the tokens of rank 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

SPLITS = 64  # parts into which the rows of an expert are split between its copies
_STRIDE = 39  # about SPLITS over the golden ratio, and odd: parts of a copy are spread over any run of tokens
_WORTH = 0.01  # of a rank's mean load: less is not worth a copy


@dataclass(frozen=True)
class Replicas:
    """The placement of one layer."""

    num_experts: int
    num_ranks: int
    slots: int  # for copies, on each rank
    rows: Mapping[int, Mapping[int, float]]  # of each expert that has copies: rows by rank, its owner included

    @property
    def experts_per_rank(self) -> int:
        return -(-self.num_experts // self.num_ranks)  # a plan whose EP does not divide them is priced all the same

    @cached_property
    def copied_to(self) -> tuple[tuple[int, ...], ...]:
        """The experts whose copies are in the slots of each rank, in ascending order."""
        experts: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for expert, by_rank in sorted(self.rows.items()):
            for rank in by_rank:
                if rank != expert // self.experts_per_rank:
                    experts[rank].append(expert)
        return tuple(map(tuple, experts))

    def copied_between(self, owner: int, rank: int) -> tuple[int, ...]:
        """The experts of rank `owner` that have copies on `rank`, in the order of its slots."""
        return tuple(expert for expert in self.copied_to[rank] if expert // self.experts_per_rank == owner)

    def slot(self, expert: int, rank: int) -> int:
        """The number of the slot of an expert on a rank, where each rank has its own experts and then its copies."""
        local, first = self.experts_per_rank, rank * (self.experts_per_rank + self.slots)
        if expert // local == rank:
            return first + expert % local
        return first + local + self.copied_to[rank].index(expert)

    def shares(self, expert: int, source: int) -> dict[int, float]:
        """The parts of the rows of an expert from rank `source` that go to each rank that has it.

        Every rank is the source of as many rows. A rank that has the expert computes its own rows first.
        """
        by_rank = self.rows[expert]
        total = sum(by_rank.values())
        own = {rank: min(total / self.num_ranks, rows) for rank, rows in by_rank.items()}
        left = {rank: rows - own[rank] for rank, rows in by_rank.items()}
        kept, sum_left = own.get(source, 0.0) * self.num_ranks / total, sum(left.values())
        sent = 1 - kept if sum_left > 1e-9 * total else 0.0
        shares = {rank: sent * rows / sum_left if sent else 0.0 for rank, rows in left.items()}
        if source in by_rank:
            shares[source] += 1 - sum(shares.values())
        return shares

    def split(self, expert: int, source: int) -> list[int]:
        """The slot of each of the SPLITS parts of the rows of an expert from rank `source`."""
        parts: list[int] = []
        end = 0.0
        for rank, share in sorted(self.shares(expert, source).items()):
            end += share
            parts += [self.slot(expert, rank)] * (round(end * SPLITS) - len(parts))
        parts += parts[-1:] * (SPLITS - len(parts))
        return [parts[n * _STRIDE % SPLITS] for n in range(SPLITS)]

    def rank_loads(self, load_E: Sequence[float]) -> list[float]:
        """The rows that each rank computes of this load, which may be another than the placement was planned for."""
        loads = [0.0] * self.num_ranks
        for expert, load in enumerate(load_E):
            by_rank = self.rows.get(expert, {expert // self.experts_per_rank: 1.0})
            total = sum(by_rank.values())
            for rank, rows in by_rank.items():
                loads[rank] += load * rows / total
        return loads


def ring_of_copies(num_experts: int, num_ranks: int, slots: int) -> Replicas:
    """Copy the first experts of the ranks after it into all slots of each rank, for a rehearsal: each rank owns as many
    experts that have copies."""
    local, rows = num_experts // num_ranks, dict[int, dict[int, float]]()
    for rank in range(num_ranks):
        for n in range(slots):
            expert = ((rank + 1) * local + n) % num_experts
            rows.setdefault(expert, {expert // local: 1.0})[rank] = 1.0
    return Replicas(num_experts, num_ranks, slots, rows)


def place_replicas(load_E: Sequence[float], num_ranks: int, slots: int) -> Replicas:
    """Copy experts of the largest rank to the emptiest one that has a slot, until no rank is above the mean.

    Each copy fills its rank up to the mean, or empties the other down to it.
    """
    num_experts = len(load_E)
    local = num_experts // num_ranks
    loads = [sum(load_E[rank * local : (rank + 1) * local]) for rank in range(num_ranks)]
    mean = sum(loads) / num_ranks
    rows: dict[int, dict[int, float]] = {}
    free = [slots] * num_ranks
    while True:
        largest = max(range(num_ranks), key=lambda rank: (loads[rank], -rank))
        emptiest = min(range(num_ranks), key=lambda rank: (not free[rank], loads[rank], rank))
        moved = min(loads[largest] - mean, mean - loads[emptiest])
        if not free[emptiest] or moved <= _WORTH * mean:
            break
        here = {e: rows.get(e, {}).get(largest, load_E[e]) for e in range(largest * local, (largest + 1) * local)}
        fitting = [e for e in here if emptiest not in rows.get(e, {})]
        if not fitting:
            break
        expert = max(fitting, key=lambda e: (here[e], -e))
        moved = min(moved, here[expert])
        if moved <= _WORTH * mean:
            break
        by_rank = rows.setdefault(expert, {largest: float(load_E[expert])})
        by_rank[largest] -= moved
        by_rank[emptiest] = moved
        loads[largest] -= moved
        loads[emptiest] += moved
        free[emptiest] -= 1
    return Replicas(num_experts, num_ranks, slots, rows)
