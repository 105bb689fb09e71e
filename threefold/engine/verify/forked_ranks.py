"""Ranks as forked processes on this machine, on gloo, with a time limit. A hang fails, and a failed rank ends all.

The oracle and tests use this; training starts real processes (`launch/agent.py`).
"""

import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

LIMIT_SECONDS = 600.0  # for ranks of a test: a hang fails, a busy machine does not


class RankError(AssertionError):
    """A rank failed or did not end in time."""


def run_ranks(world: int, work: Callable[..., Any], *args: Any, limit: float = LIMIT_SECONDS) -> list[Any]:
    """Call work(rank, *args) on each rank, with a default process group; returns the picklable results by rank."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_run_rank, args=(rank, world, work, args, folder, limit)) for rank in range(world)
        ]
        for process in ranks:
            process.start()
        end = time.monotonic() + limit
        try:
            while any(process.is_alive() for process in ranks):
                if any(process.exitcode for process in ranks):
                    break
                if time.monotonic() > end:
                    hanging = [n for n, process in enumerate(ranks) if process.is_alive()]
                    raise RankError(f"ranks {hanging} of {world} still run after {limit:.0f} s")
                time.sleep(0.01)
            if any(process.exitcode for process in ranks):
                failed = _first_to_fail(ranks)
                raise RankError(f"rank {failed} failed:\n{_traceback(folder, failed)}")
        finally:
            for process in ranks:
                if process.is_alive() and process.pid:
                    os.kill(process.pid, signal.SIGKILL)
                process.join()
        return [pickle.loads((Path(folder) / f"{rank}.pickle").read_bytes()) for rank in range(world)]


def _first_to_fail(ranks: Sequence[BaseProcess]) -> int:
    """A rank that a signal killed, before ranks that lost it as a peer: those may be seen to end first."""
    time.sleep(0.1)
    return min((n for n, process in enumerate(ranks) if process.exitcode), key=lambda n: (ranks[n].exitcode or 0) > 0)


def _traceback(folder: str, rank: int) -> str:
    path = Path(folder) / f"{rank}.txt"
    return path.read_text() if path.exists() else "(it printed nothing)"


def _run_rank(
    rank: int, world: int, work: Callable[..., Any], args: tuple[Any, ...], folder: str, limit: float
) -> None:
    code = 1
    try:
        torch.set_num_threads(1)
        store = FileStore(f"{folder}/store", world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=limit))
        result = work(rank, *args)
        (Path(folder) / f"{rank}.pickle").write_bytes(pickle.dumps(result))
        dist.barrier()  # no rank leaves while another still needs it
        code = 0
    except BaseException:
        (Path(folder) / f"{rank}.txt").write_text(traceback.format_exc())
    finally:
        os._exit(code)  # a failed rank leaves at once, so that its peers fail fast
