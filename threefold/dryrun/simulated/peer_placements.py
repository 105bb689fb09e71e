"""Placements that the other ranks of a group would report to Muon, computed because no other rank exists.

To assemble full matrices, `engine/data_parallel/full_matrices.py` asks every rank which ranges of a matrix it holds and
whether it owns any of them. `computed_placements` replaces that exchange. It assumes that each rank holds an equal part
of a matrix, or of several matrices of one width that are stacked (gate and up).
"""

from collections.abc import Container, Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from threefold.engine.data_parallel import full_matrices
from threefold.engine.data_parallel.full_matrices import Ranges, ShardInfo
from threefold.engine.dist.collectives import all_gather
from threefold.engine.dist.mesh import Group
from threefold.engine.dist.shard_placement import Placement, Range, even_range


def computed_placements(
    group: Group, placements: dict[str, Placement], owned: Container[str], device: torch.device
) -> list[list[ShardInfo]]:
    """The answers of all ranks of the group, by rank and then by matrix.

    Another rank owns a part of a matrix if this rank does, or if ranks hold replicas of it and share it among them.
    """
    # The engine gathers these answers, and the call is counted although its result is computed.
    mine = torch.empty(len(placements), full_matrices.INFO_WORDS, dtype=torch.long, device=device)
    all_gather(mine.new_empty(group.size * len(mine), full_matrices.INFO_WORDS), mine, group).wait()
    owns = {name: name in owned or placement.tp_replicas > 1 for name, placement in placements.items()}
    return [
        [(peer_ranges(placement, group, rank), owns[name]) for name, placement in placements.items()]
        for rank in range(group.size)
    ]


def peer_ranges(placement: Placement, group: Group, rank: int) -> Ranges:
    """The ranges of the shard that rank `rank` of the group holds, given the placement of this rank's shard."""
    dims = zip(placement.shape, placement.ranges, strict=True)
    part, num_parts = rank // placement.tp_replicas, group.size // placement.tp_replicas
    ranges = [
        local if local == ((0, size),) else _equal_ranges(size, len(local), part, num_parts) for size, local in dims
    ]
    if "edp" in placement.replica_axes:  # ranks of etp hold slices of the same experts
        ranges[0] = placement.ranges[0]
    return tuple(ranges)


def _equal_ranges(size: int, num_stacked: int, part: int, num_parts: int) -> tuple[Range, ...]:
    """Part `part` of each of `num_stacked` matrices that are stacked along a dim of `size`."""
    width = size // num_stacked
    start, stop = even_range(width, part, num_parts)
    return tuple((n * width + start, n * width + stop) for n in range(num_stacked))


@contextmanager
def compute_peer_placements() -> Iterator[None]:
    """Replace the exchange of placements between ranks for the time of the block."""
    with mock.patch.object(full_matrices, full_matrices.exchange_shard_info.__name__, computed_placements):
        yield
