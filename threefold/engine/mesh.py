"""The two grids as process groups. The only place that makes them.

Every rank makes the groups it belongs to and no others, in one order of axes, so that no two ranks wait for each other
in different groups. Groups of the same ranks are one group: a communicator costs memory. The default group is bound to
no device (`launch.join`): else NCCL would have every rank of the world take part in the making of each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from itertools import product

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from threefold.layout.degrees import DENSE_AXES, EXPERT_AXES, Layout


@dataclass(frozen=True, eq=False)
class Group:
    """Some ranks, in ascending order, and this one's place among them. `handle` is None where it is alone."""

    name: str  # the axes, for ledgers and messages: "tp", "dp x cp"
    ranks: tuple[int, ...]
    rank: int  # place in `ranks`
    handle: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def alone(self) -> bool:
        return self.handle is None


# In the order they are made.
_GROUPS = ("tp", "cp", "dp", "pp", "etp", "ep", "edp", "dp cp", "dp cp tp", "cp tp", "edp etp", "ep etp")
ALONE = Group("alone", (0,), 0, None)


def alone(name: str, rank: int = 0) -> Group:
    return Group(name, (rank,), 0, None)


@dataclass
class Mesh:
    """Groups of one rank. `keep_single` makes real groups of one rank too, to run every collective on one device."""

    layout: Layout
    rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    keep_single: bool = False
    timeout: timedelta | None = None
    _made: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    _beside: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for axes in _GROUPS:
            self.group(*axes.split())

    def place(self, axis: str) -> int:
        """This rank's coordinate along an axis."""
        return self.layout.coordinate(axis, self.rank)

    def group(self, *axes: str) -> Group:
        """The ranks that share every coordinate with this one but those of `axes`, which are of one grid."""
        return self.of_ranks(" x ".join(axes), ranks_along(self.layout, axes, self.rank))

    def of_ranks(self, name: str, ranks: Sequence[int]) -> Group:
        """Every one of `ranks` must ask for it, at the same point of its program."""
        ranks = tuple(sorted(ranks))
        if len(ranks) == 1 and not self.keep_single:
            return Group(name, ranks, 0, None)
        if ranks not in self._made:
            self._made[ranks] = self._make(ranks)
        return Group(name, ranks, ranks.index(self.rank), self._made[ranks])

    def _make(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        if len(ranks) == self.layout.gpus:
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        return self._new(ranks)

    def _new(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        made = dist.new_group(list(ranks), timeout=self.timeout, use_local_synchronization=True)
        assert isinstance(made, dist.ProcessGroup)
        return made

    def beside(self, group: Group) -> Group:
        """The same ranks with a communicator of its own: what goes through it does not queue behind the other's."""
        if group.alone:
            return group
        if group.ranks not in self._beside:
            self._beside[group.ranks] = self._new(group.ranks)
        return replace(group, handle=self._beside[group.ranks])

    @property
    def world(self) -> Group:
        return self.of_ranks("world", range(self.layout.gpus))

    def for_checkpoints(self) -> Group:
        """All ranks, on the CPU, for nothing else: checkpoints are written while steps communicate."""
        if self.layout.gpus == 1:
            return alone("checkpoint")
        handle = dist.new_group(backend="gloo")
        assert isinstance(handle, dist.ProcessGroup)
        return Group("checkpoint", tuple(range(self.layout.gpus)), self.rank, handle)

    def device_mesh(self, *groups: Group) -> DeviceMesh:
        """One or two groups (copies, shards) as torch's FSDP wants them."""
        names = tuple(group.name.replace(" x ", "_") for group in groups)
        handles = [group.handle for group in groups if group.handle is not None]
        assert len(handles) == len(groups)
        if len(handles) == 1:
            return DeviceMesh.from_group(handles[0], self.device.type, mesh_dim_names=names)
        copies, shards = groups
        ranks = torch.tensor(sorted(_grid(copies, shards))).view(copies.size, shards.size)
        return DeviceMesh.from_group(handles, self.device.type, mesh=ranks, mesh_dim_names=names)


def _grid(copies: Group, shards: Group) -> list[int]:
    """Ranks of a two-dimensional mesh: every copy of every shard; shards are neighbours."""
    own = shards.ranks[shards.rank]
    return [shard + copy - own for copy in copies.ranks for shard in shards.ranks]


@cache
def ranks_along(layout: Layout, axes: tuple[str, ...], rank: int) -> tuple[int, ...]:
    """By arithmetic: the ranks that differ from `rank` only in `axes`."""
    grid = EXPERT_AXES if any(axis not in DENSE_AXES for axis in axes) else DENSE_AXES
    assert all(axis in grid for axis in axes), axes
    base = rank - sum(layout.coordinate(axis, rank) * layout.stride(axis) for axis in axes)
    steps = [[i * layout.stride(axis) for i in range(layout.degree(axis))] for axis in axes]
    return tuple(sorted(base + sum(offsets) for offsets in product(*steps)))
