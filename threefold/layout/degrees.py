"""The degrees of a layout and the two grids they fold over one set of ranks.

Attention lives on pp x dp x cp x tp, experts on pp x edp x ep x etp. Ranks are numbered with the last axis
fastest, so one pipeline stage is a contiguous block of ranks and both grids cut the same blocks.
"""

import math
from dataclasses import dataclass

from threefold.fields import MAX_RANKS, item

DENSE_AXES = ("pp", "dp", "cp", "tp")
EXPERT_AXES = ("pp", "edp", "ep", "etp")
AXES = (*DENSE_AXES, "edp", "ep", "etp")
SCHEDULES = ("1f1b", "interleaved", "zero-bubble", "dualpipev")


@dataclass(frozen=True, slots=True)
class Layout:
    """Degrees over a number of ranks. `dp` and `edp` follow; they are never written."""

    tp: int = item("tensor parallel, with sequence parallel", 1, at_least=1, at_most=MAX_RANKS)
    cp: int = item("context parallel: shards of one sequence", 1, at_least=1, at_most=MAX_RANKS)
    pp: int = item("pipeline stages", 1, at_least=1, at_most=MAX_RANKS)
    vpp: int = item("chunks (virtual stages) on each pipeline rank", 1, at_least=1, at_most=MAX_RANKS)
    ep: int = item("expert parallel: ranks that share the experts", 1, at_least=1, at_most=MAX_RANKS)
    etp: int = item("expert tensor parallel: ranks that share each expert", 1, at_least=1, at_most=MAX_RANKS)
    replicate: int = item("HSDP: copies of the sharded model", 1, at_least=1, at_most=MAX_RANKS)
    stages: str | None = item("pipeline layout string, such as 'Et*3|(tt|)*29m|L'; absent: balanced")
    schedule: str | None = item("pipeline schedule; absent: interleaved when vpp > 1, else 1f1b", choices=SCHEDULES)
    gpus: int = item("ranks in all", 1, in_file=False)

    @property
    def dp(self) -> int:
        """Data parallel degree; 0 when the degrees need more ranks than there are."""
        return self.gpus // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        """Expert data parallel degree."""
        return self.gpus // (self.ep * self.etp * self.pp)

    @property
    def chunks(self) -> int:
        return self.pp * self.vpp

    @property
    def min_gpus(self) -> int:
        """The smallest rank count that both grids divide: PP x lcm(TP x CP, EP x ETP)."""
        return self.pp * math.lcm(self.tp * self.cp, self.ep * self.etp)

    @property
    def packed_multiple(self) -> int:
        """What Megatron pads each packed document to a multiple of: 2 CP parts of a ring, CP x TP of a sequence."""
        return math.lcm(2 * self.cp if self.cp > 1 else 1, self.cp * self.tp if self.tp > 1 else 1)

    @property
    def fits_ranks(self) -> bool:
        return self.gpus % self.min_gpus == 0

    @property
    def pipeline_schedule(self) -> str:
        return self.schedule or ("interleaved" if self.vpp > 1 else "1f1b")

    def degree(self, axis: str) -> int:
        return int(getattr(self, axis))

    def _extent(self, axis: str) -> int:
        # Too few ranks leave dp and edp at 0; arithmetic on such a layout must not fail before a rule speaks.
        return max(1, self.degree(axis))

    def axes_of(self, axis: str) -> tuple[str, ...]:
        """The grid an axis belongs to; `pp` belongs to both."""
        return DENSE_AXES if axis in DENSE_AXES else EXPERT_AXES

    def stride(self, axis: str) -> int:
        """Distance in rank numbers between neighbors along an axis."""
        axes = self.axes_of(axis)
        return math.prod(self._extent(a) for a in axes[axes.index(axis) + 1 :])

    def coordinate(self, axis: str, rank: int) -> int:
        return rank // self.stride(axis) % self._extent(axis)

    def coordinates(self, rank: int) -> dict[str, int]:
        return {axis: self.coordinate(axis, rank) for axis in AXES}

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """The ranks that share every coordinate of the axis' grid with `rank` except this one."""
        stride = self.stride(axis)
        first = rank - self.coordinate(axis, rank) * stride
        return tuple(first + i * stride for i in range(self.degree(axis)))

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """Every group of an axis, each once, in order of its first rank."""
        return [self.group(axis, rank) for rank in range(self.gpus) if self.coordinate(axis, rank) == 0]
