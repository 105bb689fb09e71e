"""Which keys a query reads, cut into rectangles that kernels compute without a mask, or with a simple one.

A token reads itself and what came before it in its document, at most `window` tokens in all. Between a span of queries
and an earlier span of keys only the one document that spans both matters: a prefix of the queries reads a suffix of the
keys. In such a rectangle every query reads at least one key, so that no kernel meets an empty row.

Spans are ranges of places in the whole sequence. Shapes: B batch, S sequence.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from threefold.engine.places import Bounds, bounds_of


@dataclass(frozen=True, slots=True)
class Tile:
    """Some rows of the batch, the queries and the keys they read.

    `causal`: the queries are the keys' own. `shift`: query i reads no key before i + shift. `bounds`: documents of the
    flattened rows, only where the tile is causal.
    """

    rows: slice
    q: slice
    k: slice
    causal: bool = False
    shift: int | None = None
    bounds: Bounds | None = None


class Documents:
    """Where the documents of each row begin, known to the host."""

    def __init__(self, documents_BS: Tensor, bounds: Bounds) -> None:
        batch, self.length = documents_BS.shape
        self.starts: list[list[int]] = [[] for _ in range(batch)]
        for start in bounds.starts[:-1].tolist():
            self.starts[start // self.length].append(start % self.length)
        self._device = documents_BS.device
        self._within: dict[range, Bounds | None] = {}

    def around(self, row: int, place: int) -> range:
        """The document of a token."""
        starts = self.starts[row]
        after = bisect_right(starts, place)
        return range(starts[after - 1], starts[after] if after < len(starts) else self.length)

    def within(self, span: range) -> Bounds | None:
        """The documents of a span of every row, one row behind the other; None where each row has but one."""
        if span not in self._within:
            self._within[span] = self._bounds(span)
        return self._within[span]

    def _bounds(self, span: range) -> Bounds | None:
        edges = []
        for row, starts in enumerate(self.starts):
            inner = [start - span.start for start in starts if start in span and start != span.start]
            edges += [row * len(span) + at for at in (0, *inner)]
        if len(edges) == len(self.starts):
            return None
        edges.append(len(self.starts) * len(span))
        longest = max(after - at for at, after in pairwise(edges))
        return Bounds(torch.tensor(edges, dtype=torch.int32, device=self._device), longest)


def _banded_apart(tile: Tile) -> list[Tile]:
    """A band that begins below the first query, cut there: the CUDA kernel ends its window at as many keys to the right
    as there are keys, which hides some from the first of more queries than keys."""
    if tile.shift is None or tile.shift > 0 or tile.q.stop - tile.q.start <= tile.k.stop - tile.k.start:
        return [tile]
    middle = tile.q.start - tile.shift + 1
    return [
        replace(tile, q=slice(tile.q.start, middle), shift=None),
        replace(tile, q=slice(middle, tile.q.stop), shift=1),
    ]


# Every layer asks with the same tensor, and reading it waits for the device.
_known = WeakIdKeyDictionary()


def documents_of(documents_BS: Tensor, bounds: Bounds | None = None) -> Documents:
    version = 0 if documents_BS.is_inference() else documents_BS._version  # a buffer may be filled anew
    known = _known.get(documents_BS)
    if known is None or known[0] != version:
        known = version, Documents(documents_BS, bounds or bounds_of(documents_BS))
        _known[documents_BS] = known
    found: Documents = known[1]
    return found


@dataclass(frozen=True)
class Sight:
    window: int | None = None
    documents: Documents | None = None

    def tiles(self, queries: range, keys: range, q_at: int = 0, k_at: int = 0) -> list[Tile]:
        """What `queries` read of `keys`: the same span, one before it, or one after it; `q_at` and `k_at` are where
        the spans begin in the tensors."""
        if queries == keys:
            return [self._diagonal(queries, q_at, k_at)]
        if keys.start >= queries.stop:
            return []
        assert keys.stop <= queries.start, (queries, keys)
        if self.documents is None:
            found = [self._rectangle(queries, keys, range(queries.stop), q_at, k_at)]
        else:
            around = [self.documents.around(row, queries.start) for row in range(len(self.documents.starts))]
            found = [self._rectangle(queries, keys, document, q_at, k_at) for document in around]
        if all(tile == found[0] for tile in found):
            found = found[:1]
        else:
            found = [tile and replace(tile, rows=slice(row, row + 1)) for row, tile in enumerate(found)]
        return [part for tile in found if tile is not None for part in _banded_apart(tile)]

    def _diagonal(self, span: range, q_at: int, k_at: int) -> Tile:
        shift = None if self.window is None or self.window >= len(span) else 1 - self.window
        bounds = None if self.documents is None else self.documents.within(span)
        q, k = slice(q_at, q_at + len(span)), slice(k_at, k_at + len(span))
        return Tile(slice(None), q, k, True, shift, bounds)

    def _rectangle(self, queries: range, keys: range, document: range, q_at: int, k_at: int) -> Tile | None:
        first, after = max(keys.start, document.start), min(queries.stop, document.stop)
        if self.window is not None:
            first, after = max(first, queries.start - self.window + 1), min(after, keys.stop + self.window - 1)
        if first >= keys.stop or after <= queries.start:
            return None
        q = slice(q_at, q_at + after - queries.start)
        k = slice(k_at + first - keys.start, k_at + len(keys))
        banded = self.window is not None and after - self.window > first
        shift = queries.start - self.window + 1 - first if banded and self.window is not None else None
        return Tile(slice(None), q, k, shift=shift)

    def between(self, here: Sequence[range], there: Sequence[range]) -> list[Tile]:
        """For spans that lie one behind the other in the query's and in the key's tensor."""
        found: list[Tile] = []
        q_at = 0
        for queries in here:
            k_at = 0
            for keys in there:
                found += self.tiles(queries, keys, q_at, k_at)
                k_at += len(keys)
            q_at += len(queries)
        return found

    def over_all(self, here: Sequence[range]) -> list[Tile]:
        """For keys of the whole sequence in natural order: at most what came before and the span itself."""
        found: list[Tile] = []
        q_at = 0
        for queries in here:
            found += self.tiles(queries, range(queries.start), q_at, 0)
            found += self.tiles(queries, queries, q_at, queries.start)
            q_at += len(queries)
        return found
