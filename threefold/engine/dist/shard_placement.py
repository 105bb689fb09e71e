"""Placement: where a rank's shard of a parameter lies in the full tensor, and which other ranks hold the same shard.

Tensor and expert parallelism (`engine/shard`) make a `Placement` for every parameter; data parallelism, checkpoints and
the oracle read it. A shard is a set of ranges in each dim: usually one range, several where a fused matrix holds parts
side by side. For example, rank 1 of two ranks holds the rows ((2, 4), (6, 8)) of a `gate_up` of shape (8, 4), that is
rows 2-3 and 6-7. Replicas of a shard see different tokens or heads, so that their gradients are parts of a sum.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ShardRegion:
    """A rectangle of the full tensor that is also a rectangle of the shard."""

    offsets: tuple[int, ...]  # in the full tensor
    sizes: tuple[int, ...]
    local_offsets: tuple[int, ...]  # in the shard

    def in_shard(self, shard: Tensor) -> Tensor:
        """The view of the shard that holds this rectangle."""
        return shard[tuple(slice(at, at + size) for at, size in zip(self.local_offsets, self.sizes, strict=True))]

    def in_full(self, full: Tensor) -> Tensor:
        """The view of the full tensor that holds this rectangle."""
        return full[tuple(slice(at, at + size) for at, size in zip(self.offsets, self.sizes, strict=True))]


@dataclass(frozen=True, slots=True)
class Placement:
    """The shard that a rank holds of one parameter."""

    shape: tuple[int, ...]  # of the full tensor
    ranges: tuple[tuple[Range, ...], ...]  # of the full tensor, for each dim, in the order they have in the shard
    replica_axes: tuple[str, ...]  # the axes along which ranks hold the same shard
    also_on_pp_ranks: tuple[int, ...] = ()  # other pipeline ranks that hold the same shard (tied embeddings)
    tp_replicas: int = 1  # neighbors along tp that hold the same shard (replicated key/value heads)
    in_several_chunks: bool = False  # whether any pipeline rank uses the shard in more than one of its chunks

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(sum(stop - start for start, stop in parts) for parts in self.ranges)

    def extract_shard(self, full: Tensor) -> Tensor:
        """The shard of a full tensor: a copy, or the tensor itself where the shard is all of it."""
        for dim, parts in enumerate(self.ranges):
            if parts != ((0, self.shape[dim]),):
                full = torch.cat([full.narrow(dim, start, stop - start) for start, stop in parts], dim)
        return full

    def regions(self) -> list[ShardRegion]:
        """The shard as rectangles of the full tensor."""
        per_dim = [list(_with_local(parts)) for parts in self.ranges]
        return [
            ShardRegion(tuple(o for o, _, _ in combo), tuple(n for _, n, _ in combo), tuple(at for _, _, at in combo))
            for combo in product(*per_dim)
        ]

    def flat_regions(self, start: int, stop: int) -> list[ShardRegion]:
        """The elements `start` to `stop` of the flattened shard as rectangles of the full tensor."""
        regions = []
        for low, high in flat_rectangles(self.local_shape, start, stop):
            for region in self.regions():
                local = region.local_offsets
                begin = [max(a, b) for a, b in zip(low, local, strict=True)]
                end = [min(a, b + n) for a, b, n in zip(high, local, region.sizes, strict=True)]
                if all(a < b for a, b in zip(begin, end, strict=True)):
                    offsets = tuple(o + a - b for o, a, b in zip(region.offsets, begin, local, strict=True))
                    sizes = tuple(b - a for a, b in zip(begin, end, strict=True))
                    regions.append(ShardRegion(offsets, sizes, tuple(begin)))
        return regions


def _with_local(parts: Sequence[Range]) -> Iterator[tuple[int, int, int]]:
    """Offset in the full tensor, size and offset in the shard of each range of one dim."""
    at = 0
    for start, stop in parts:
        yield start, stop - start, at
        at += stop - start


def replicated(shape: Sequence[int], replica_axes: tuple[str, ...]) -> Placement:
    """The placement of a parameter that every rank holds in full."""
    return Placement(tuple(shape), tuple(((0, size),) for size in shape), replica_axes)


def even_range(size: int, coordinate: int, degree: int) -> Range:
    """The range of rank `coordinate` of `degree`. Where the size does not divide, the last ranges are shorter."""
    step = -(-size // degree)
    return min(size, coordinate * step), min(size, (coordinate + 1) * step)


def flat_rectangles(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[list[int], list[int]]]:
    """Corners (low, high) of rectangles that together are elements `start` to `stop` of a row-major tensor."""
    if start >= stop:
        return
    if not shape:
        yield [], []
        return
    row = 1
    for size in shape[1:]:
        row *= size
    head, tail = -(-start // row), stop // row  # first full row, end of the full rows
    if head > tail:  # inside one row
        at = start // row
        for low, high in flat_rectangles(shape[1:], start - at * row, stop - at * row):
            yield [at, *low], [at + 1, *high]
        return
    if start < head * row:
        for low, high in flat_rectangles(shape[1:], start - (head - 1) * row, row):
            yield [head - 1, *low], [head, *high]
    if head < tail:
        yield [head, *([0] * (len(shape) - 1))], [tail, *shape[1:]]
    if tail * row < stop:
        for low, high in flat_rectangles(shape[1:], 0, stop - tail * row):
            yield [tail, *low], [tail + 1, *high]


def shard_parameter(module: nn.Module, name: str, placement: Placement) -> None:
    """Replace a parameter that has no memory yet (device `meta`) by one of the shape of its shard."""
    old = module.get_parameter(name)
    assert tuple(old.shape) == placement.shape, (name, old.shape, placement)
    module.register_parameter(name, nn.Parameter(old.new_empty(placement.local_shape), old.requires_grad))
