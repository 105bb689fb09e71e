"""Makes all process groups of a rank, on the dense and the expert grid. No other module makes process groups.

Every rank makes the groups it belongs to and no others, in one order of axes, so that no two ranks wait for each other
in different groups. Groups of the same ranks share one communicator, because a communicator costs memory. The default
group is bound to no device (see `dist/join.py`): otherwise all ranks of the world would take part in making each group.

For example, on eight ranks with tp=2 and dp=4 rank 3 has the groups tp = (2, 3) and dp = (1, 3, 5, 7).
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
    """Some ranks in ascending order, the index of this rank among them, and their communicator."""

    name: str  # the axes, for ledgers and messages: "tp", "dp x cp"
    ranks: tuple[int, ...]
    rank: int  # index of this rank in `ranks`
    handle: dist.ProcessGroup | None  # None in a trivial group

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_trivial(self) -> bool:
        """Return whether this is one rank without a communicator, on which collectives do nothing."""
        return self.handle is None


# All ranks make their groups in this order.
GROUPS = ("tp", "cp", "dp", "pp", "etp", "ep", "edp", "dp cp", "dp cp tp", "cp tp", "edp etp", "ep etp")
TRIVIAL_GROUP = Group("alone", (0,), 0, None)


def trivial_group(name: str) -> Group:
    """A group of one rank without a communicator."""
    return Group(name, (0,), 0, None)


@dataclass
class Mesh:
    """The process groups of one rank, by axis."""

    layout: Layout
    rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    # Give groups of one rank a communicator too, so that one device runs every collective. For tests and measurements.
    with_single_rank_groups: bool = False
    timeout: timedelta | None = None
    _handles: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)  # by ranks
    _second_handles: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)  # by ranks

    def __post_init__(self) -> None:
        for axes in GROUPS:
            self.group(*axes.split())

    def coordinate(self, axis: str) -> int:
        """The coordinate of this rank along an axis."""
        return self.layout.coordinate(axis, self.rank)

    def group(self, *axes: str) -> Group:
        """The group of ranks that differ from this one only along `axes`, which belong to one grid."""
        return self.of_ranks(" x ".join(axes), ranks_along(self.layout, axes, self.rank))

    def of_ranks(self, name: str, ranks: Sequence[int]) -> Group:
        """The group of these ranks. Each of them must call this at the same point of its program."""
        ranks = tuple(sorted(ranks))
        if len(ranks) == 1 and not self.with_single_rank_groups:
            return Group(name, ranks, 0, None)
        if ranks not in self._handles:
            self._handles[ranks] = self._make_or_reuse_world(ranks, name)
        return Group(name, ranks, ranks.index(self.rank), self._handles[ranks])

    def _make_or_reuse_world(self, ranks: tuple[int, ...], name: str) -> dist.ProcessGroup:
        if len(ranks) == self.layout.gpus:
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        return self._new_handle(ranks, name)

    def _new_handle(self, ranks: tuple[int, ...], name: str) -> dist.ProcessGroup:
        """`name` stands in traces, where `threefold profile` reads the axis from it."""
        handle = dist.new_group(list(ranks), timeout=self.timeout, use_local_synchronization=True, group_desc=name)
        assert isinstance(handle, dist.ProcessGroup)
        return handle

    def second_communicator(self, group: Group) -> Group:
        """The same ranks with another communicator, whose calls do not queue behind those of `group`."""
        if group.is_trivial:
            return group
        if group.ranks not in self._second_handles:
            self._second_handles[group.ranks] = self._new_handle(group.ranks, group.name)
        return replace(group, handle=self._second_handles[group.ranks])

    @property
    def world(self) -> Group:
        return self.of_ranks("world", range(self.layout.gpus))

    def checkpoint_group(self) -> Group:
        """All ranks on the CPU, for checkpoints only: they are written while steps communicate."""
        if self.layout.gpus == 1:
            return trivial_group("checkpoint")
        handle = dist.new_group(backend="gloo")
        assert isinstance(handle, dist.ProcessGroup)
        return Group("checkpoint", tuple(range(self.layout.gpus)), self.rank, handle)

    def device_mesh(self, *groups: Group) -> DeviceMesh:
        """One group (shards) or two (replicas, shards) as the device mesh that torch's FSDP takes."""
        names = tuple(group.name.replace(" x ", "_") for group in groups)
        handles = [group.handle for group in groups if group.handle is not None]
        assert len(handles) == len(groups)
        if len(handles) == 1:
            return DeviceMesh.from_group(handles[0], self.device.type, mesh_dim_names=names)
        replicas, shards = groups
        ranks = torch.tensor(sorted(_mesh_ranks(replicas, shards))).view(replicas.size, shards.size)
        return DeviceMesh.from_group(handles, self.device.type, mesh=ranks, mesh_dim_names=names)


def _mesh_ranks(replicas: Group, shards: Group) -> list[int]:
    """All ranks of a mesh of replicas x shards. Shards are neighbors in it."""
    own = shards.ranks[shards.rank]
    return [shard + replica - own for replica in replicas.ranks for shard in shards.ranks]


@cache
def ranks_along(layout: Layout, axes: tuple[str, ...], rank: int) -> tuple[int, ...]:
    """The ranks that differ from `rank` only along `axes`, by arithmetic."""
    grid = EXPERT_AXES if any(axis not in DENSE_AXES for axis in axes) else DENSE_AXES
    assert all(axis in grid for axis in axes), axes
    base = rank - sum(layout.coordinate(axis, rank) * layout.stride(axis) for axis in axes)
    steps = [[i * layout.stride(axis) for i in range(layout.degree(axis))] for axis in axes]
    return tuple(sorted(base + sum(offsets) for offsets in product(*steps)))
