"""One microbatch in flight: the graphs it is replayed with, in one pool of memory.

Graphs of a lane are recorded in the order of a forward and its backward, all during one microbatch, and replayed in
that order: what one frees, a later one uses, as it would be without graphs. Two microbatches never share a lane.

Shapes: B batch, S sequence.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from threefold.engine.graphs.record import Recorder
from threefold.engine.places import Places

if TYPE_CHECKING:
    from threefold.engine.graphs.recorded import Recorded

Key = tuple[Any, ...]  # of a table of `Places`


class Lane:
    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.in_flight = 0  # pieces whose backward has not come
        self.sealed = False  # a graph recorded later would use memory that an earlier one still needs
        self.turns: Counter[object] = Counter()
        self.known: defaultdict[object, list[Recorded]] = defaultdict(list)
        self.input_bytes = 0
        self._own: set[int] = set()
        self._places: Places | None = None
        self._filled_from: Places | None = None

    def enter(self) -> None:
        """A microbatch begins."""
        for recorded in self.known.values():
            self.sealed = True
            for one in recorded:
                one.make_room()
        self.turns.clear()
        self._filled_from = None
        self.in_flight = 0

    def own(self, tensors: Iterable[Tensor]) -> None:
        self._own |= {x.data_ptr() for x in tensors}

    def fixed(self, x: Tensor) -> Tensor:
        """Memory of this lane with the value of `x`: its own where a graph before has made it."""
        if x.data_ptr() in self._own:
            return x.detach()
        return self.copied(x)

    def copied(self, x: Tensor) -> Tensor:
        self.input_bytes += x.nbytes
        return x.detach().clone()

    def places(self, given: Places, keys: Iterable[Key]) -> Places | None:
        """`given`, at fixed addresses, filled once a microbatch; None where they have another shape there."""
        if self._places is None:
            tables = {key: tuple(self.fixed(x) for x in given.rope(*key)) for key in keys}
            self._places = Places(self.fixed(given.positions_BS), None, tables)  # type: ignore[arg-type]
        elif self._places.positions_BS.shape != given.positions_BS.shape:
            return None
        elif self._filled_from is not given:
            self._places.positions_BS.copy_(given.positions_BS)
            for key, table in self._places._tables.items():
                for fixed, x in zip(table, given.rope(*key), strict=True):
                    fixed.copy_(x)
        self._filled_from = given
        return self._places
