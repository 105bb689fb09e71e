"""The CUDA graphs of one microbatch in flight, and their memory pool.

All graphs of a slot are recorded during one microbatch, in the order of its forward and backward, and are replayed in
that order: memory that one graph frees is used by a later one, as it would be without graphs. Two microbatches in
flight never share a slot. `ChunkGraphs` (`graphed_part.py`) makes the slots.

Shapes: B batch, S sequence.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from threefold.engine.graphs.recorder import Recorder, memory_address
from threefold.engine.layers.positions import Positions

if TYPE_CHECKING:
    from threefold.engine.graphs.graphed_function import GraphedFunction

RopeKey = tuple[Any, ...]  # the key of a rotary table of `Positions`


class GraphSlot:
    """The graphs and static tensors that one microbatch in flight uses."""

    def __init__(self, recorder: Recorder, wgrad_recorder: Recorder) -> None:
        self.recorder = recorder
        # Weight gradients that a schedule delays have a pool of their own: their order among the other graphs is not
        # the same in every microbatch, only their order among themselves is.
        self.wgrad_recorder = wgrad_recorder
        self.num_in_flight = 0  # graphed functions whose forward has run and whose last gradient has not
        # No graph is recorded after the first microbatch: it would use memory that an earlier graph still needs.
        self.is_sealed = False
        self.num_calls: Counter[object] = Counter()  # calls of each part in this microbatch
        self.functions: defaultdict[object, list[GraphedFunction]] = defaultdict(list)
        self.static_copies: list[Tensor] = []  # of inputs and output gradients that no graph of this slot writes
        self._owned_addresses: set[int] = set()
        self._static_positions: Positions | None = None
        self._has_tables = False  # whether rotary tables are static, and not computed inside the graphs
        self._filled_from: Positions | None = None

    def begin_microbatch(self) -> None:
        """Take the slot for a new microbatch."""
        for functions_of_part in self.functions.values():
            self.is_sealed = True
            for function in functions_of_part:
                function.copy_grads_out()
        self.num_calls.clear()
        self._filled_from = None
        self.num_in_flight = 0

    def add_owned(self, tensors: Iterable[Tensor]) -> None:
        """Note tensors that a graph of this slot writes; a later graph may read them in place."""
        self._owned_addresses |= {memory_address(x) for x in tensors}

    @property
    def num_bytes(self) -> int:
        """Bytes of the pools and of the static copies."""
        copied = sum(x.nbytes for x in self.static_copies)
        return self.recorder.num_bytes + self.wgrad_recorder.num_bytes + copied

    def make_static(self, x: Tensor) -> Tensor:
        """A tensor with the value of `x` at an address that stays: `x` itself if a graph of this slot writes it."""
        if memory_address(x) in self._owned_addresses:
            return x.detach()
        return self.copy_static(x)

    def copy_static(self, x: Tensor) -> Tensor:
        self.static_copies.append(x.detach().clone())
        return self.static_copies[-1].detach()

    def static_positions(self, given: Positions, keys: Iterable[RopeKey]) -> Positions | None:
        """`given` at static addresses, copied once per microbatch; None where the shape is not the recorded one.

        Tables that no `keys` name are computed inside the graph, from static positions and axes of pictures.
        """
        if self._static_positions is None:
            tables = {key: tuple(self.make_static(x) for x in given.rope(*key)) for key in keys}
            whole_BS = None if given.whole_BS is None else self.make_static(given.whole_BS)
            axes_3BS = None if given.axes_3BS is None else self.make_static(given.axes_3BS)
            positions_BS = self.make_static(given.positions_BS)
            self._static_positions = Positions(positions_BS, None, whole_BS, tables, axes_3BS=axes_3BS)  # type: ignore[arg-type]
            self._has_tables, self._filled_from = bool(tables), given
        static = self._static_positions
        lacks_axes = given.axes_3BS is not None and static.axes_3BS is None and not self._has_tables
        if lacks_axes or static.positions_BS.shape != given.positions_BS.shape:
            return None
        if self._filled_from is not given:
            static.positions_BS.copy_(given.positions_BS)
            if static.axes_3BS is not None:
                static.axes_3BS.copy_(given.positions_BS if given.axes_3BS is None else given.axes_3BS)
            if static.whole_BS is not None and given.whole_BS is not None:
                static.whole_BS.copy_(given.whole_BS)
            for key, table in static._tables.items():
                for fixed, x in zip(table, given.rope(*key), strict=True):
                    fixed.copy_(x)
        self._filled_from = given
        return static
