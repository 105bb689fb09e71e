"""Work on a device recorded without being run, and replayed at the same addresses."""

import gc
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Protocol, TypeVar

import torch

Made = TypeVar("Made")


class Graph(Protocol):
    def replay(self) -> None: ...


class Recorder(Protocol):
    """What one recorder records shares a pool of memory: graphs must be replayed in the order they were recorded in."""

    num_bytes: int  # of its pool

    def prepare(self) -> None:
        """Before the first record."""
        ...

    def record(self, work: Callable[[], Made]) -> tuple[Made, Graph]:
        """What `work` makes has no values before the first replay."""
        ...


class CudaRecorder:
    def __init__(self, device: torch.device) -> None:
        self.device, self.num_bytes = device, 0
        self.pool = torch.cuda.graph_pool_handle()

    def prepare(self) -> None:
        """Nothing cached can be given back while a graph is recorded."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def record(self, work: Callable[[], Made]) -> tuple[Made, Graph]:
        graph, stream = torch.cuda.CUDAGraph(), _stream(self.device)
        reserved = torch.cuda.memory_reserved(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        collects = gc.isenabled()
        gc.disable()  # what it would free may wait for the device
        try:
            with torch.cuda.stream(stream):
                # Other threads copy batches and watch for hangs meanwhile.
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                try:
                    made = work()
                except BaseException:
                    with suppress(RuntimeError):
                        graph.capture_end()
                    raise
                graph.capture_end()
        finally:
            if collects:
                gc.enable()
        self.num_bytes += torch.cuda.memory_reserved(self.device) - reserved
        return made, graph


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
