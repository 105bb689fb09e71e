"""Worker processes that decode and resize pictures, so that Pillow does not run beside the training step's Python.

`batch_images.py` asks it for the pictures of a batch. Workers are fresh processes (spawned): a fork would copy locks of
torch's threads. A worker that dies, as one may that a damaged file crashes, is replaced, and its picture counts as bad.
Workers end with their rank, however that ends.
"""

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import numpy as np
from numpy.typing import NDArray

from threefold.engine.data.images.decode import ResizeRequest, decode_or_reason, start_worker
from threefold.findings import Finding, FindingsError
from threefold.plan.ranks import rank_environment

Decoded = NDArray[np.uint8] | str  # the pixels, or why there are none
MAX_WORKERS = 4
MAX_DEATHS = 3  # in a row: then it is not the pictures


class DecodePool:
    """Decodes pictures in `num_workers` processes, or in the calling thread where there are none."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._pool: ProcessPoolExecutor | None = None
        self._num_deaths = 0  # one after another

    def decode(self, requests: Sequence[ResizeRequest]) -> list[Decoded]:
        """The pictures, in the order of the requests."""
        if not self.num_workers:
            return [decode_or_reason(request) for request in requests]
        try:
            return list(self._running().map(decode_or_reason, requests))
        except BrokenProcessPool:
            return [self._decode_alone(request) for request in requests]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    def _running(self) -> ProcessPoolExecutor:
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.num_workers, context, initializer=start_worker)
        return self._pool

    def _decode_alone(self, request: ResizeRequest) -> Decoded:
        """One picture at a time, so that it is known which one ends its worker."""
        for _ in range(2):  # the first one may find the pool that broke before
            try:
                decoded = self._running().submit(decode_or_reason, request).result()
                self._num_deaths = 0
                return decoded
            except BrokenProcessPool:
                self.close()
        self._num_deaths += 1
        if self._num_deaths >= MAX_DEATHS:
            problem = f"the processes that decode pictures died {self._num_deaths} times in a row"
            advice = "look for the reason above; memory may be short, or decode without them"
            fix = {"run.image_workers": 0}
            found = Finding(rule="image-workers-run", at="run.image_workers", problem=problem, fix=fix, advice=advice)
            raise FindingsError([found])
        return "the process that decoded it died"


def image_workers(asked: int | None) -> int:
    """As many decoding processes as the plan asks for, or half of the cores that a rank has, from 1 to 4."""
    if asked is not None:
        return asked
    env = rank_environment(os.environ)
    num_local_ranks = env.local_size if env else 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MAX_WORKERS, cores // num_local_ranks // 2))
