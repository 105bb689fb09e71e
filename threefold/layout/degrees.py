"""The degrees of a layout and the two grids they fold over one set of ranks.

Attention lives on pp x dp x cp x tp, experts on pp x edp x ep x etp. Ranks are numbered with the last axis
fastest, so one pipeline stage is a contiguous block of ranks and both grids cut the same blocks. `axis_link` says which
link an axis crosses: the NVLink domain or the network.
"""

import math
from dataclasses import dataclass
from typing import Literal

from threefold.fields import MAX_RANKS, item
from threefold.spec.chips import ChipSpec

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


Link = Literal["none", "domain", "network"]


@dataclass(frozen=True, slots=True)
class AxisLink:
    """Where the traffic of one axis goes."""

    axis: str
    degree: int
    stride: int
    in_domain: int  # members of a group that share one domain
    link: Link


def domain_ranks(chip: ChipSpec, gpus: int, domain: int | None = None) -> int:
    """Consecutive ranks that share a domain.

    A job larger than one 72-GPU rack is scheduled in equal blocks, by custom of the largest power of two,
    so that groups do not straddle racks: 64 of 72.
    """
    size = domain or chip.domain
    if gpus <= size:
        return gpus
    return int(2 ** (size.bit_length() - 1))


def axis_link(layout: Layout, axis: str, ranks_per_domain: int) -> AxisLink:
    """All groups of an axis look alike when domains hold whole blocks; the first one is the model."""
    degree, stride = layout.degree(axis), layout.stride(axis)
    in_domain = min(degree, -(-ranks_per_domain // stride))
    link: Link = "none" if degree <= 1 else "domain" if in_domain == degree else "network"
    return AxisLink(axis, degree, stride, in_domain, link)


def cp_degrees(cp: int) -> tuple[int, ...]:
    """The degrees that a sequence can have: the powers of two up to `cp`, which is one itself."""
    return tuple(2**power for power in range(cp.bit_length()))


def cp_degree(length: int, seq_len: int, cp: int) -> int:
    """The smallest degree that leaves a rank at most the tokens of a full sequence over all `cp` ranks."""
    return next(degree for degree in cp_degrees(cp) if length * cp <= seq_len * degree)


def row_multiple(degree: int, tp: int) -> int:
    """Lengths of sequences are multiples of this: two zigzag pieces a rank, and equal parts for tensor parallelism."""
    return (2 * degree if degree > 1 else 1) * tp


def num_dynamic_groups(cp: int, tp: int) -> int:
    """Process groups of a rank beyond those of its layout: for each degree between 1 and `cp` the block of CP ranks,
    and with tensor parallelism the block with all its TP ranks."""
    return max(0, len(cp_degrees(cp)) - 2) * (2 if tp > 1 else 1)
