"""Columns that grow piece by piece, and tables of names that are kept once; waits between streams, joined to the
calls of the host that made them. The readers fill them."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from threefold.profile.trace import Floats, HostSpans, Ints, StreamWaits


def resolved(
    launches: HostSpans,
    moment: Floats,
    _end: Floats,
    device: Ints,
    stream: Ints,
    correlation: Ints,
    producer_stream: Ints,
    record_correlation: Ints,
) -> StreamWaits:
    """The waits with the moments of their calls. A wait whose call is missing keeps its own time; an event whose record
    is missing has none."""
    waited, recorded = moment_of(correlation, launches), moment_of(record_correlation, launches)
    return StreamWaits(device, stream, np.where(np.isnan(waited), moment, waited), producer_stream, recorded)


def moment_of(correlation: Ints, launches: HostSpans) -> Floats:
    """When the host began each call, by its correlation; NaN where the trace does not have it."""
    if not len(launches):
        return np.full(len(correlation), np.nan)
    order = np.argsort(launches.link, kind="stable")
    place = np.minimum(np.searchsorted(launches.link[order], correlation), len(order) - 1)
    found = order[place]
    return np.where((correlation >= 0) & (launches.link[found] == correlation), launches.start[found], np.nan)


class NameTable:
    """Values by index, in the order in which they were first seen."""

    def __init__(self) -> None:
        self._index: dict[Any, int] = {}

    def __len__(self) -> int:
        return len(self._index)

    def indices(self, values: list[Any]) -> Any:
        """The index of each value, new or known."""
        index = self._index
        for value in dict.fromkeys(values):
            index.setdefault(value, len(index))
        return np.fromiter(map(index.__getitem__, values), np.int64, len(values))

    def values(self) -> list[Any]:
        return list(self._index)


class Columns:
    """Rows of some columns, of which the first two are times."""

    def __init__(self, width: int) -> None:
        self._pieces: list[list[Any]] = [[] for _ in range(width)]
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, *columns: Any) -> None:
        for pieces, column in zip(self._pieces, columns, strict=True):
            pieces.append(column)
        self._length += len(columns[0])

    def first(self) -> float:
        """The smallest value of the first column."""
        return min(float(piece.min()) for piece in self._pieces[0])

    def joined(self, origin: float, scale: float) -> Iterable[Any]:
        """Each column as one array; times count from `origin` and are multiplied by `scale`."""
        for number, pieces in enumerate(self._pieces):
            kind = np.float64 if number < 2 else np.int64
            column = np.concatenate([np.empty(0, kind), *pieces])
            pieces.clear()
            yield (column - origin) * scale if number < 2 else column
