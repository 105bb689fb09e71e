"""What ranks that do not exist would tell of their pieces of a matrix, by arithmetic: they send nothing to be read.

Equal parts of one matrix, or of several of one width that lie one behind the other (gate and up). The others own
something of a matrix where this rank does, and of what neighbours hold alike.
"""

from collections.abc import Container, Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from threefold.engine.mesh import Group
from threefold.engine.shard import matrices
from threefold.engine.shard.matrices import Ranges, Told
from threefold.engine.shard.placement import Placement, Range, even_part


def told(group: Group, places: dict[str, Placement], owned: Container[str], device: torch.device) -> list[list[Told]]:
    owns = {name: name in owned or place.shared_by > 1 for name, place in places.items()}
    return [[(ranges_at(place, group, n), owns[name]) for name, place in places.items()] for n in range(group.size)]


def ranges_at(place: Placement, group: Group, rank: int) -> Ranges:
    """Of the piece that another rank of the group holds."""
    dims = zip(place.shape, place.ranges, strict=True)
    parts, of = rank // place.shared_by, group.size // place.shared_by
    return tuple(own if own == ((0, size),) else _equal(size, len(own), parts, of) for size, own in dims)


def _equal(size: int, count: int, place: int, degree: int) -> tuple[Range, ...]:
    width = size // count
    start, stop = even_part(width, place, degree)
    return tuple((n * width + start, n * width + stop) for n in range(count))


@contextmanager
def placements_by_arithmetic() -> Iterator[None]:
    with mock.patch.object(matrices, "exchange", told):
        yield
