"""Where a rank's piece of a parameter lies in the whole, and over which ranks it is copied.

A piece is cut by ranges in each dim: usually one, several where a fused matrix holds parts side by side (gate and up).
Copies see different tokens or heads, so that their gradients are parts of a sum.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of the whole (`offsets`, `sizes`) and where it lies in the piece (`local`)."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local: tuple[int, ...]

    def of(self, piece: Tensor) -> Tensor:
        """The view of the piece that holds this rectangle."""
        return piece[tuple(slice(at, at + size) for at, size in zip(self.local, self.sizes, strict=True))]

    def within(self, whole: Tensor) -> Tensor:
        return whole[tuple(slice(at, at + size) for at, size in zip(self.offsets, self.sizes, strict=True))]


@dataclass(frozen=True, slots=True)
class Placement:
    shape: tuple[int, ...]  # of the whole
    ranges: tuple[tuple[Range, ...], ...]  # of the piece, for each dim, in the order they lie in it
    copies: tuple[str, ...]  # the axes over which the piece is copied
    also_on: tuple[int, ...] = ()  # pipeline ranks that hold a copy too (tied embeddings)
    shared_by: int = 1  # neighbours along tp that hold the same piece (copied key/value heads)

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(sum(stop - start for start, stop in parts) for parts in self.ranges)

    def take(self, whole: Tensor) -> Tensor:
        """The piece, cut out of the whole."""
        for dim, parts in enumerate(self.ranges):
            if parts != ((0, self.shape[dim]),):
                whole = torch.cat([whole.narrow(dim, start, stop - start) for start, stop in parts], dim)
        return whole

    def boxes(self) -> list[Box]:
        """The piece as rectangles of the whole."""
        per_dim = [list(_with_local(parts)) for parts in self.ranges]
        return [
            Box(tuple(o for o, _, _ in combo), tuple(n for _, n, _ in combo), tuple(at for _, _, at in combo))
            for combo in product(*per_dim)
        ]

    def boxes_of(self, first: int, after: int) -> list[Box]:
        """The same for the elements first..after of the flattened piece."""
        found = []
        for low, high in flat_rectangles(self.local_shape, first, after):
            for box in self.boxes():
                start = [max(a, b) for a, b in zip(low, box.local, strict=True)]
                stop = [min(a, b + n) for a, b, n in zip(high, box.local, box.sizes, strict=True)]
                if all(a < b for a, b in zip(start, stop, strict=True)):
                    offsets = tuple(o + a - b for o, a, b in zip(box.offsets, start, box.local, strict=True))
                    sizes = tuple(b - a for a, b in zip(start, stop, strict=True))
                    found.append(Box(offsets, sizes, tuple(start)))
        return found


def _with_local(parts: Sequence[Range]) -> Iterator[tuple[int, int, int]]:
    at = 0
    for start, stop in parts:
        yield start, stop - start, at
        at += stop - start


def whole(shape: Sequence[int], copies: tuple[str, ...]) -> Placement:
    return Placement(tuple(shape), tuple(((0, size),) for size in shape), copies)


def even_part(size: int, place: int, degree: int) -> Range:
    """Part `place` of `degree`; where it does not divide, the last parts are shorter."""
    step = -(-size // degree)
    return min(size, place * step), min(size, (place + 1) * step)


def flat_rectangles(shape: Sequence[int], first: int, after: int) -> Iterator[tuple[list[int], list[int]]]:
    """Corners (low, high) of rectangles that together are elements first..after of a row-major tensor."""
    if first >= after:
        return
    if not shape:
        yield [], []
        return
    row = 1
    for size in shape[1:]:
        row *= size
    head, tail = -(-first // row), after // row  # whole rows
    if head > tail:  # inside one row
        at = first // row
        for low, high in flat_rectangles(shape[1:], first - at * row, after - at * row):
            yield [at, *low], [at + 1, *high]
        return
    if first < head * row:
        for low, high in flat_rectangles(shape[1:], first - (head - 1) * row, row):
            yield [head - 1, *low], [head, *high]
    if head < tail:
        yield [head, *([0] * (len(shape) - 1))], [tail, *shape[1:]]
    if tail * row < after:
        for low, high in flat_rectangles(shape[1:], 0, after - tail * row):
            yield [tail, *low], [tail + 1, *high]


def cut_parameter(module: nn.Module, name: str, placement: Placement) -> None:
    """Replace a parameter that has no memory yet (`meta`) by one of its piece's shape."""
    old = module.get_parameter(name)
    assert tuple(old.shape) == placement.shape, (name, old.shape, placement)
    module.register_parameter(name, nn.Parameter(old.new_empty(placement.local_shape), old.requires_grad))
