"""The attention mask as tiles: rectangles of queries and keys that kernels compute without a mask or with a simple one.

A token attends to itself and to the tokens before it in its document, at most `window` tokens in all. At most one
document has tokens both in a span of queries and in an earlier span of keys; its queries are a prefix of the first span
and its keys a suffix of the second. In such a rectangle every query has at least one key, so that no kernel meets an
empty row. `shard/ring_attention.py` asks for the tiles, and `attend_tiles.py` computes them.

A span is a range of positions in the whole sequence. Shapes: B batch, S sequence.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from threefold.engine.layers.positions import DocumentBounds, document_bounds, version_of


@dataclass(frozen=True, slots=True)
class Tile:
    """A rectangle of the mask: some queries of some rows of the batch, and the keys they attend to."""

    rows: slice  # of the batch
    q: slice  # of the query tensor's sequence
    k: slice  # of the key tensor's sequence
    causal: bool = False  # queries and keys are the same tokens
    shift: int | None = None  # query i attends to no key before i + shift; None: no limit
    bounds: DocumentBounds | None = None  # documents of the flattened rows, in causal tiles only


class Documents:
    """The starts of the documents of each row, on the host."""

    def __init__(self, documents_BS: Tensor, bounds: DocumentBounds) -> None:
        batch, self.length = documents_BS.shape
        self.row_starts: list[list[int]] = [[] for _ in range(batch)]
        for start in bounds.edges_on_host()[:-1]:
            self.row_starts[start // self.length].append(start % self.length)
        self._device = documents_BS.device
        self._bounds_of_span: dict[range, DocumentBounds | None] = {}

    def document_at(self, row: int, position: int) -> range:
        """The span of the document that holds a position."""
        starts = self.row_starts[row]
        following = bisect_right(starts, position)
        return range(starts[following - 1], starts[following] if following < len(starts) else self.length)

    def bounds_within(self, span: range) -> DocumentBounds | None:
        """The bounds of the documents inside a span, of all rows one behind the other; None where each has only one."""
        if span not in self._bounds_of_span:
            self._bounds_of_span[span] = self._compute_bounds(span)
        return self._bounds_of_span[span]

    def _compute_bounds(self, span: range) -> DocumentBounds | None:
        edges = []
        for row, starts in enumerate(self.row_starts):
            inner = [start - span.start for start in starts if start in span and start != span.start]
            edges += [row * len(span) + at for at in (0, *inner)]
        if len(edges) == len(self.row_starts):
            return None
        edges.append(len(self.row_starts) * len(span))
        return DocumentBounds.from_edges(edges, self._device)


def _split_band(tile: Tile) -> list[Tile]:
    """A windowed tile with more queries than keys, split where the window begins to hide keys.

    The CUDA kernel limits its window to the right to the number of keys, and would hide keys from the first queries.
    """
    if tile.shift is None or tile.shift > 0 or tile.q.stop - tile.q.start <= tile.k.stop - tile.k.start:
        return [tile]
    middle = tile.q.start - tile.shift + 1
    return [
        replace(tile, q=slice(tile.q.start, middle), shift=None),
        replace(tile, q=slice(middle, tile.q.stop), shift=1),
    ]


# Every layer asks with the same tensor, and reading it may wait for the device, so the result is cached.
_documents_cache = WeakIdKeyDictionary()


def host_documents(documents_BS: Tensor, bounds: DocumentBounds | None = None) -> Documents:
    """The documents of a batch on the host. The first call with a tensor waits for the device, unless the host knows
    the bounds already (`positions.move_documents`)."""
    version = version_of(documents_BS)  # a buffer may be overwritten
    known = _documents_cache.get(documents_BS)
    if known is None or known[0] != version:
        known = version, Documents(documents_BS, bounds or document_bounds(documents_BS))
        _documents_cache[documents_BS] = known
    documents: Documents = known[1]
    return documents


@dataclass(frozen=True)
class AttentionMask:
    """Causal attention, optionally with a sliding window and inside documents."""

    window: int | None = None  # tokens that a query attends to, itself included; None: no limit
    documents: Documents | None = None

    def tiles(self, queries: range, keys: range, q_at: int = 0, k_at: int = 0) -> list[Tile]:
        """The tiles of a span of queries with a span of keys, which is the same span, an earlier or a later one.

        `q_at` and `k_at` are the offsets of the spans in the tensors.
        """
        if queries == keys:
            return [self._diagonal(queries, q_at, k_at)]
        if keys.start >= queries.stop:
            return []
        assert keys.stop <= queries.start, (queries, keys)
        if self.documents is None:
            tiles = [self._rectangle(queries, keys, range(queries.stop), q_at, k_at)]
        else:
            num_rows = len(self.documents.row_starts)
            documents = [self.documents.document_at(row, queries.start) for row in range(num_rows)]
            tiles = [self._rectangle(queries, keys, document, q_at, k_at) for document in documents]
        if all(tile == tiles[0] for tile in tiles):
            tiles = tiles[:1]
        else:
            tiles = [tile and replace(tile, rows=slice(row, row + 1)) for row, tile in enumerate(tiles)]
        return [part for tile in tiles if tile is not None for part in _split_band(tile)]

    def _diagonal(self, span: range, q_at: int, k_at: int) -> Tile:
        shift = None if self.window is None or self.window >= len(span) else 1 - self.window
        bounds = None if self.documents is None else self.documents.bounds_within(span)
        q, k = slice(q_at, q_at + len(span)), slice(k_at, k_at + len(span))
        return Tile(slice(None), q, k, True, shift, bounds)

    def _rectangle(self, queries: range, keys: range, document: range, q_at: int, k_at: int) -> Tile | None:
        first_key, last_query = max(keys.start, document.start), min(queries.stop, document.stop)
        if self.window is not None:
            first_key = max(first_key, queries.start - self.window + 1)
            last_query = min(last_query, keys.stop + self.window - 1)
        if first_key >= keys.stop or last_query <= queries.start:
            return None
        q = slice(q_at, q_at + last_query - queries.start)
        k = slice(k_at + first_key - keys.start, k_at + len(keys))
        banded = self.window is not None and last_query - self.window > first_key
        shift = queries.start - self.window + 1 - first_key if banded and self.window is not None else None
        return Tile(slice(None), q, k, shift=shift)

    def tiles_between(self, query_spans: Sequence[range], key_spans: Sequence[range]) -> list[Tile]:
        """The tiles of several spans, which lie one behind the other in the query and in the key tensor."""
        tiles: list[Tile] = []
        q_at = 0
        for queries in query_spans:
            k_at = 0
            for keys in key_spans:
                tiles += self.tiles(queries, keys, q_at, k_at)
                k_at += len(keys)
            q_at += len(queries)
        return tiles

    def tiles_over_sequence(self, query_spans: Sequence[range]) -> list[Tile]:
        """The tiles of spans of queries with the keys of the whole sequence: the earlier tokens and the span itself."""
        tiles: list[Tile] = []
        q_at = 0
        for queries in query_spans:
            tiles += self.tiles(queries, range(queries.start), q_at, 0)
            tiles += self.tiles(queries, queries, q_at, queries.start)
            q_at += len(queries)
        return tiles
