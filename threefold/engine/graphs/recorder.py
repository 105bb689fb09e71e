"""Records work on a device as a graph without running it, to be replayed at the same addresses.

`CudaRecorder` captures CUDA graphs; a dry run and the tests put a recorder of their own in its place. Collectives
inside are captured too: their communicators have run eagerly before (`graphed_part.WARMUP`), and each is waited for
inside, so that NCCL's stream has joined the capture at its end.
"""

import gc
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Protocol, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from threefold.engine.context import override
from threefold.engine.dist.join import call_before_leaving

Result = TypeVar("Result")


class Graph(Protocol):
    """Recorded work."""

    def replay(self) -> None: ...


class Recorder(Protocol):
    """The graphs of one recorder share a memory pool and must be replayed in the order in which they were recorded."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool."""
        ...

    def prepare(self) -> None:
        """Call this before the first `record`."""
        ...

    def record(self, work: Callable[[], Result]) -> tuple[Result, Graph]:
        """The result of `work`, which has no values before the first replay, and the graph."""
        ...


def memory_address(x: Tensor) -> int:
    """Where the memory of a tensor begins. Tensors of a dry run have no memory; their storages tell them apart."""
    return x.data_ptr() or x.untyped_storage()._cdata + x.storage_offset() * x.element_size()


def record_work(recorder: Recorder, work: Callable[[], Result]) -> tuple[Result, Graph]:
    """`recorder.record`, with code deep inside told that a graph is recorded (`context.recording_graph`)."""

    def flagged() -> Result:
        with override("recording_graph", True):
            return work()

    return recorder.record(flagged)


class CudaRecorder:
    """Captures CUDA graphs on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.num_bytes = device, 0
        self.pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        _RECORDERS.add(self)

    def free_graphs(self) -> None:
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()

    def prepare(self) -> None:
        """Empty the allocator's cache, because cached memory cannot be released during a capture."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def record(self, work: Callable[[], Result]) -> tuple[Result, Graph]:
        graph, stream = torch.cuda.CUDAGraph(), _capture_stream(self.device)
        reserved = torch.cuda.memory_reserved(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        gc_was_enabled = gc.isenabled()
        gc.disable()  # an object that is collected may wait for the device, which a capture does not allow
        try:
            with torch.cuda.stream(stream):
                # Errors are thread-local because other threads copy batches and watch for hangs meanwhile.
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                try:
                    result = work()
                except BaseException:
                    with suppress(RuntimeError):
                        graph.capture_end()
                    raise
                graph.capture_end()
        finally:
            if gc_was_enabled:
                gc.enable()
        self.num_bytes += torch.cuda.memory_reserved(self.device) - reserved
        self._graphs.append(graph)
        return result, graph


_RECORDERS: WeakSet[CudaRecorder] = WeakSet()


@call_before_leaving
def _free_all_graphs() -> None:
    """NCCL does not destroy a communicator while a graph holds one of its collectives: it would wait for ever."""
    for recorder in list(_RECORDERS):
        recorder.free_graphs()


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
