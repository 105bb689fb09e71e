"""Records CUDA graphs in a rehearsal: the work runs once on tensors without memory, and a replay does nothing.

`rehearse_rank` puts it in the place of the engine's `CudaRecorder`. Tensors that are made while a graph is recorded lie
in a pool of the tracker, as those of a GPU lie in the memory pool of the graphs.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

from threefold.dryrun.tracking.memory_tracker import MemoryTracker
from threefold.engine.context import override
from threefold.engine.graphs.recorder import Graph

Result = TypeVar("Result")


class _RehearsedGraph:
    """Results of recorded work have no values, so that a replay has nothing to write."""

    def replay(self) -> None:
        pass


class RehearsedRecorder:
    """The graphs of one memory pool; a `Recorder` of the engine."""

    def __init__(self, tracker: MemoryTracker) -> None:
        self._tracker, self._pool = tracker, tracker.make_pool()

    @property
    def num_bytes(self) -> int:
        return self._pool.num_bytes

    def prepare(self) -> None:
        """Nothing is cached."""

    def record(self, work: Callable[[], Result]) -> tuple[Result, Graph]:
        with self._tracker.allocating_in(self._pool):
            return work(), _RehearsedGraph()


def record_graphs_in(tracker: MemoryTracker) -> AbstractContextManager[None]:
    """Let the engine record its graphs in pools of the tracker inside the `with` block."""
    return override("make_recorder", lambda: RehearsedRecorder(tracker))
