"""A part of the model that is replayed where the contract of its graph holds, and runs eagerly elsewhere."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from threefold.engine.graphs.lane import Key, Lane
from threefold.engine.graphs.record import CudaRecorder, Recorder
from threefold.engine.graphs.recorded import Function, Recorded
from threefold.engine.graphs.tally import Tally

WARMUP = 2  # microbatches that run eagerly first: kernels are chosen, compiled and tried out in them
MOST_LANES = 16


class Graphs:
    """The lanes of a chunk of the model, and which of them the microbatch under way has."""

    def __init__(self, make_recorder: Callable[[], Recorder], tally: Tally | None = None, warmup: int = WARMUP) -> None:
        self.make_recorder, self.tally = make_recorder, tally or Tally()
        self.lane: Lane | None = None
        self.tables: set[Key] = set()  # of places, that the model has asked for
        self._lanes: list[Lane] = []
        self._warmup = warmup
        self._broken = False
        self._counted = 0  # bytes that the tally knows of

    @contextmanager
    def microbatch(self) -> Iterator[None]:
        """Around a forward; its backward comes before the lane is used again."""
        self.lane = self._free_lane() if torch.is_grad_enabled() else None
        try:
            yield
        finally:
            self.lane = None

    def reset(self) -> None:
        """A step begins: nothing is in flight, and whatever was begun before was given up."""
        for lane in self._lanes:
            lane.in_flight = 0
        held = sum(lane.recorder.num_bytes + lane.input_bytes for lane in self._lanes)
        self.tally.num_bytes += held - self._counted
        self._counted = held

    def give_up(self, scope: str, error: Exception) -> None:
        """A device that failed to record once is not asked again."""
        self._broken, self.lane = True, None
        self.tally.fall_back(scope, "could not be recorded", str(error).partition("\n")[0])

    def _free_lane(self) -> Lane | None:
        if self._warmup:
            self._warmup -= 1
            return None
        if self._broken:
            self.tally.fall_back("microbatch", "recording failed before")
            return None
        free = next((lane for lane in self._lanes if not lane.in_flight), None)
        if free is None and len(self._lanes) == MOST_LANES:
            self.tally.fall_back("microbatch", f"more than {MOST_LANES} in flight")
            return None
        if free is None:
            free = Lane(self.make_recorder())
            free.recorder.prepare()
            self._lanes.append(free)
        free.enter()
        return free


def cuda_graphs(device: torch.device, tally: Tally | None = None) -> Graphs:
    return Graphs(lambda: CudaRecorder(device), tally)


class Piece:
    def __init__(self, scope: str, graphs: Graphs, modules: Sequence[nn.Module]) -> None:
        self.scope, self.graphs, self.modules = scope, graphs, tuple(modules)

    def replay(self, function: Function, *given: Tensor) -> tuple[Tensor, ...] | None:
        """What `function` makes of them; None where it must run eagerly. It is always the same, but for the lane."""
        lane, tally = self.graphs.lane, self.graphs.tally
        if lane is None:
            return None
        known, turn = lane.known[self], lane.turns[self]
        lane.turns[self] += 1
        if turn == len(known) and not lane.sealed:
            try:
                known.append(Recorded(lane, function, self.modules, given))
            except RuntimeError as error:
                self.graphs.give_up(self.scope, error)
                return None
            tally.recorded += 1
        one = known[turn] if turn < len(known) else None
        if one is None or (lane.sealed and not one.complete):
            tally.fall_back(self.scope, "not recorded with the others")
            return None
        if differs := one.differs(given):
            tally.fall_back(self.scope, *differs)
            return None
        tally.replays += 1
        return one(*given)
