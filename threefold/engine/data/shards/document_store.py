"""What packing needs of stored documents, and `DocumentSpans`, the part of a store that a split chooses.

`TokenShard` and `MegatronDataset` are stores. Tokens of a store are numbered through all its documents.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class DocumentStore(Protocol):
    """Documents as tokens, one after another."""

    @property
    def path(self) -> Path: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def offsets(self) -> NDArray[Any]:
        """The first token of each document, and the number of tokens at the end."""

    @property
    def masked(self) -> bool:
        """Whether there is a loss mask."""

    @property
    def fingerprint(self) -> str: ...

    def read(self, first: int, after: int) -> Ints: ...

    def read_mask(self, first: int, after: int) -> NDArray[np.uint8]:
        """1 for each token of a range that is learned. Only a masked store is asked."""

    def content(self) -> dict[str, Any]:
        """What identifies the content, wherever the file lies, as JSON."""


class DocumentSpans:
    """Spans of tokens of a store, in order, read as if they were all of it. A span begins a document where told so."""

    def __init__(
        self, store: DocumentStore, begin_U: Ints, size_U: Ints, opens_U: NDArray[np.bool_], facts: dict[str, Any]
    ) -> None:
        """U spans: where each begins in the store, its tokens, and whether it opens a document. `facts` tell of it."""
        self.store, self._facts = store, facts
        self.path, self.masked = store.path, store.masked
        ends_U = np.cumsum(size_U, dtype=np.int64)
        self.num_tokens = int(ends_U[-1]) if len(ends_U) else 0
        starts_U = ends_U - size_U
        self.offsets: Ints = np.append(starts_U[opens_U], self.num_tokens)
        # Spans that follow each other in the store are read at once.
        joins_U = np.append(True, begin_U[1:] != begin_U[:-1] + size_U[:-1]) if len(begin_U) else np.array([], bool)
        self._run_begins, self._run_starts = begin_U[joins_U], starts_U[joins_U]

    @property
    def fingerprint(self) -> str:
        facts = " ".join(f"{name}={value}" for name, value in self._facts.items())
        return f"{self.store.fingerprint}({facts})"

    def read(self, first: int, after: int) -> Ints:
        return self._read(self.store.read, first, after)

    def read_mask(self, first: int, after: int) -> NDArray[np.uint8]:
        return self._read(self.store.read_mask, first, after)

    def content(self) -> dict[str, Any]:
        return {**self.store.content(), "split": self._facts}

    def _read(self, read: Callable[[int, int], NDArray[Any]], first: int, after: int) -> NDArray[Any]:
        after = min(after, self.num_tokens)
        parts = []
        number = int(np.searchsorted(self._run_starts, first, side="right")) - 1
        while first < after:
            last = number + 1 == len(self._run_starts)
            until = after if last else min(after, int(self._run_starts[number + 1]))
            at = int(self._run_begins[number]) + first - int(self._run_starts[number])
            parts.append(read(at, at + until - first))
            first, number = until, number + 1
        return np.concatenate(parts) if parts else read(0, 0)
