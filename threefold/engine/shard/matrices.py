"""Whole matrices from the parts of many ranks, for an optimizer that needs them (Muon).

First the copies bring together what each owns of the piece, then the ranks that cut the matrix bring their pieces. What
is cut further than that, as a stack of experts by expert parallelism, stays cut: each expert is a matrix of its own.
"""

from collections.abc import Callable, Container, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from threefold.engine.mesh import Group
from threefold.engine.optim.items import Item, is_matrix
from threefold.engine.optim.muon import by_muon
from threefold.engine.shard.collectives import all_gather
from threefold.engine.shard.owned import Owned
from threefold.engine.shard.placement import Placement, Range

Ranges = tuple[tuple[Range, ...], ...]
Told = tuple[Ranges, bool]  # where a rank's piece of a matrix lies, and whether it owns any of it
_WORDS = 64  # of one placement in the exchange


class Pieces(Protocol):
    """A way of data parallelism, as far as needed here."""

    updated: list[Owned]

    def held(self) -> Iterator[tuple[str, Placement, Tensor, int | None]]: ...

    def pieces(self, names: Sequence[str], part_of: Callable[[Owned], Tensor]) -> Iterator[tuple[str, Tensor]]: ...


class Cut:
    """One matrix over the ranks of a group; `assembled` is what their pieces make together."""

    def __init__(self, group: Group, shape: Sequence[int], ranges: Sequence[Ranges], needed: bool) -> None:
        self.group, self.needed = group, needed
        own = ranges[group.rank]
        cut = [any(other[dim] != own[dim] for other in ranges) for dim in range(len(shape))]
        local = Placement(tuple(shape), own, ()).local_shape
        assembled = tuple(n if is_cut else m for n, m, is_cut in zip(shape, local, cut, strict=True))
        self.whole_here = not any(cut)
        self.placements = [
            Placement(
                assembled,
                tuple(r if is_cut else ((0, m),) for r, m, is_cut in zip(each, local, cut, strict=True)),
                (),
            )
            for each in ranges
        ]

    def assemble(self, piece: Tensor) -> Tensor | None:
        """None where no rank of the group needs it."""
        if self.whole_here or not self.needed:
            return piece if self.needed else None
        sizes = [torch.Size(place.local_shape).numel() for place in self.placements]
        mine = piece.new_zeros(max(sizes))
        mine[: piece.numel()] = piece.flatten()
        flat = mine.new_empty(self.group.size * len(mine))
        all_gather(flat, mine, self.group).wait()
        whole = piece.new_empty(self.placements[0].shape)
        for place, row, size in zip(self.placements, flat.view(self.group.size, -1), sizes, strict=True):
            other = row[:size].view(place.local_shape)
            for box in place.boxes():
                box.within(whole).copy_(box.of(other))
        return whole

    def take(self, whole: Tensor) -> Tensor:
        return whole if self.whole_here else self.placements[self.group.rank].take(whole)


class Matrices:
    """Every rank of a pipeline stage makes one at the same point, and steps at the same time."""

    def __init__(self, data: Pieces, cut_group: Callable[[Placement], Group]) -> None:
        self.data = data
        self.owned = {owned.name: owned for owned in data.updated if owned.after > owned.first}
        chosen = [(n, place, x.device) for n, place, x, _ in data.held() if by_muon(n, is_matrix(n, place.shape))]
        shared: dict[tuple[int, ...], tuple[Group, dict[str, Placement]]] = {}
        for name, place, _ in chosen:
            group = cut_group(place)
            shared.setdefault(group.ranks, (group, {}))[1][name] = place
        self.cuts: dict[str, Cut] = {}
        for group, places in shared.values():
            self.cuts |= _cuts(group, places, exchange(group, places, self.owned.keys(), chosen[0][2]))

    def each(self, items: list[Item], update_of: Callable[[Item], Tensor]) -> Iterator[tuple[Item, Tensor]]:
        for name, piece in self.data.pieces(list(self.cuts), update_of):
            whole = self.cuts[name].assemble(piece)
            if whole is not None and name in self.owned:
                yield self.owned[name], whole

    def part(self, item: Item, whole: Tensor) -> Tensor:
        owned = self.owned[item.name]
        return self.cuts[item.name].take(whole).flatten()[owned.first : owned.after]


def _cuts(group: Group, places: dict[str, Placement], told: Sequence[Sequence[Told]]) -> dict[str, Cut]:
    """`told` by every rank of the group of every matrix."""
    return {
        name: Cut(group, place.shape, [ranges for ranges, _ in each], any(owns for _, owns in each))
        for (name, place), each in zip(places.items(), zip(*told, strict=True), strict=True)
    }


def exchange(
    group: Group, places: dict[str, Placement], owned: Container[str], device: torch.device
) -> list[list[Told]]:
    """Tell the others of the group where this rank's pieces lie and whether it owns any of each."""
    rows = [_encode(place.ranges, name in owned) for name, place in places.items()]
    mine = torch.tensor(rows, device=device)
    every = mine.new_empty(group.size * len(rows), _WORDS)
    all_gather(every, mine, group).wait()
    return [list(map(_decode, rank)) for rank in every.view(group.size, len(rows), _WORDS).tolist()]


def _encode(ranges: Ranges, owns: bool) -> list[int]:
    words = [int(owns), len(ranges)]
    for parts in ranges:
        words += [len(parts), *(end for part in parts for end in part)]
    assert len(words) <= _WORDS, ranges
    return words + [0] * (_WORDS - len(words))


def _decode(words: list[int]) -> Told:
    rest = iter(words)
    owns, dims = bool(next(rest)), next(rest)
    return tuple(tuple((next(rest), next(rest)) for _ in range(next(rest))) for _ in range(dims)), owns
