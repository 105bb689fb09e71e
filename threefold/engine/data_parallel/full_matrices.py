"""Full matrices from shards of many ranks, for an optimizer that needs them (Muon).

First data parallelism gathers what each rank owns of its tensor-parallel shard, then the ranks that shard the matrix
gather their shards. A stack of experts that expert parallelism shards stays sharded along the experts: each expert is a
matrix of its own. `engine/build.py` makes one `FullMatrices` and hands it to the optimizer.
"""

from collections.abc import Callable, Container, Iterator, Sequence

import torch
from torch import Tensor

from threefold.engine.data_parallel.protocol import ShardGatherer
from threefold.engine.dist.collectives import all_gather
from threefold.engine.dist.mesh import Group
from threefold.engine.dist.shard_placement import Placement, Range
from threefold.engine.optim.muon import uses_muon
from threefold.engine.optim.optimizer_targets import OptimizerParam, is_matrix

Ranges = tuple[tuple[Range, ...], ...]
ShardInfo = tuple[Ranges, bool]  # where a rank's shard of a matrix lies, and whether the rank owns any of it
INFO_WORDS = 64  # integers that carry one ShardInfo


class ShardedMatrix:
    """One matrix that is sharded over the ranks of a group."""

    def __init__(self, group: Group, shape: Sequence[int], ranges: Sequence[Ranges], needed: bool) -> None:
        self.group, self.needed = group, needed
        own = ranges[group.rank]
        sharded = [any(other[dim] != own[dim] for other in ranges) for dim in range(len(shape))]
        local = Placement(tuple(shape), own, ()).local_shape
        gathered_shape = tuple(n if is_sharded else m for n, m, is_sharded in zip(shape, local, sharded, strict=True))
        self.is_replicated = not any(sharded)
        # The shards of all ranks within the gathered matrix. A dim that the group does not shard stays local.
        self.placements = [
            Placement(
                gathered_shape,
                tuple(r if is_sharded else ((0, m),) for r, m, is_sharded in zip(each, local, sharded, strict=True)),
                (),
            )
            for each in ranges
        ]

    def gather(self, shard: Tensor) -> Tensor | None:
        """The gathered matrix; None where no rank of the group needs it."""
        if self.is_replicated or not self.needed:
            return shard if self.needed else None
        sizes = [torch.Size(placement.local_shape).numel() for placement in self.placements]
        mine = shard.new_zeros(max(sizes))
        mine[: shard.numel()] = shard.flatten()
        flat = mine.new_empty(self.group.size * len(mine))
        all_gather(flat, mine, self.group).wait()
        full = shard.new_empty(self.placements[0].shape)
        for placement, row, size in zip(self.placements, flat.view(self.group.size, -1), sizes, strict=True):
            other = row[:size].view(placement.local_shape)
            for region in placement.regions():
                region.in_full(full).copy_(region.in_shard(other))
        return full

    def extract_shard(self, full: Tensor) -> Tensor:
        """This rank's shard of the gathered matrix."""
        return full if self.is_replicated else self.placements[self.group.rank].extract_shard(full)


class FullMatrices:
    """The matrices of a pipeline stage. Every rank of the stage makes one at the same point, and steps together."""

    def __init__(self, data: ShardGatherer, shard_group: Callable[[Placement], Group]) -> None:
        self.data = data
        self.owned = {owned.name: owned for owned in data.updated if owned.stop > owned.start}
        chosen = [
            (name, placement, tensor.device)
            for name, placement, tensor, _ in data.local_tensors()
            if name not in data.frozen and uses_muon(name, is_matrix(name, placement.shape))
        ]
        by_group: dict[tuple[int, ...], tuple[Group, dict[str, Placement]]] = {}
        for name, placement, _ in chosen:
            group = shard_group(placement)
            by_group.setdefault(group.ranks, (group, {}))[1][name] = placement
        self.matrices: dict[str, ShardedMatrix] = {}
        for group, placements in by_group.values():
            infos = exchange_shard_info(group, placements, self.owned.keys(), chosen[0][2])
            self.matrices |= _sharded_matrices(group, placements, infos)

    def full_updates(
        self, params: list[OptimizerParam], update_of: Callable[[OptimizerParam], Tensor]
    ) -> Iterator[tuple[OptimizerParam, Tensor]]:
        """The full matrix of updates for each parameter that this rank owns a part of."""
        for name, shard in self.data.gather_shards(list(self.matrices), update_of):
            full = self.matrices[name].gather(shard)
            if full is not None and name in self.owned:
                yield self.owned[name], full

    def local_part(self, param: OptimizerParam, whole: Tensor) -> Tensor:
        """The elements of a full matrix that this rank owns, flat."""
        owned = self.owned[param.name]
        return self.matrices[param.name].extract_shard(whole).flatten()[owned.start : owned.stop]


def _sharded_matrices(
    group: Group, placements: dict[str, Placement], infos: Sequence[Sequence[ShardInfo]]
) -> dict[str, ShardedMatrix]:
    """Matrices by name, from the information of every rank (`infos[rank][matrix]`)."""
    return {
        name: ShardedMatrix(group, placement.shape, [ranges for ranges, _ in each], any(owns for _, owns in each))
        for (name, placement), each in zip(placements.items(), zip(*infos, strict=True), strict=True)
    }


def exchange_shard_info(
    group: Group, placements: dict[str, Placement], owned: Container[str], device: torch.device
) -> list[list[ShardInfo]]:
    """All-gather where each rank's shards lie and whether the rank owns any of each; one list for each rank."""
    rows = [_encode(placement.ranges, name in owned) for name, placement in placements.items()]
    mine = torch.tensor(rows, device=device)
    every = mine.new_empty(group.size * len(rows), INFO_WORDS)
    all_gather(every, mine, group).wait()
    return [list(map(_decode, rank)) for rank in every.view(group.size, len(rows), INFO_WORDS).tolist()]


def _encode(ranges: Ranges, owns: bool) -> list[int]:
    words = [int(owns), len(ranges)]
    for parts in ranges:
        words += [len(parts), *(end for part in parts for end in part)]
    assert len(words) <= INFO_WORDS, ranges
    return words + [0] * (INFO_WORDS - len(words))


def _decode(words: list[int]) -> ShardInfo:
    rest = iter(words)
    owns, dims = bool(next(rest)), next(rest)
    return tuple(tuple((next(rest), next(rest)) for _ in range(next(rest))) for _ in range(dims)), owns
