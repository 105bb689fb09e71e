"""Measures whole training steps of a plan on this machine, as `threefold train` runs them.

`threefold calibrate` fits the rates of the estimate to such steps.
"""

import gc
import os
import statistics
import time
from dataclasses import dataclass

import torch

from threefold.engine.build import Parts, build, device_of
from threefold.engine.dist.collectives import all_reduce
from threefold.engine.dist.mesh import Mesh
from threefold.engine.run.cpu_threads import choose_threads
from threefold.engine.step import train_step
from threefold.engine.train import to_device
from threefold.plan.plan import Plan
from threefold.plan.ranks import rank_environment


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The steps of one plan on this rank."""

    seconds: tuple[float, ...]  # of each timed step, by the host's clock; warm-up is left out
    losses: tuple[float, ...]
    peak_bytes: int | None  # of the allocator; None on a CPU

    @property
    def typical_seconds(self) -> float:
        return statistics.median(self.seconds)


def measure_steps(plan: Plan, steps: int, warmup: int, mesh: Mesh | None = None, budget: float = 1e9) -> StepTimes:
    """Build the plan and time its steps, after `warmup` steps that compile kernels and fill the allocator.

    After `budget` seconds no further step begins, but at least two are timed.
    """
    device = mesh.device if mesh else device_of(plan)
    environment = rank_environment(os.environ)
    torch.set_num_threads(choose_threads(plan, environment.local_size if environment else 1, None, _is_gpu(device))[0])
    if _is_gpu(device):
        torch.cuda.init()
        torch.cuda.reset_peak_memory_stats(device)
    try:
        return _measure(plan, build(plan, mesh), steps, warmup, budget)
    finally:
        gc.collect()
        if _is_gpu(device):
            torch.cuda.empty_cache()


def _measure(plan: Plan, parts: Parts, steps: int, warmup: int, budget: float) -> StepTimes:
    began, device = time.perf_counter(), parts.device
    seconds, losses = list[float](), list[float]()
    gc.collect()
    gc.disable()  # as the training loop does
    try:
        for step in range(warmup + steps):
            if step > warmup + 1 and _is_over(parts, time.perf_counter() - began > budget):
                break
            start = synchronized_time(device)
            losses.append(_one_step(plan, parts, step))
            seconds.append(synchronized_time(device) - start)
    finally:
        gc.enable()
        parts.close()
    peak = torch.cuda.max_memory_allocated(device) if _is_gpu(device) else None
    return StepTimes(tuple(seconds[warmup:]), tuple(losses), peak)


def _is_over(parts: Parts, here: bool) -> bool:
    """Whether any rank has used up its time: all stop after the same step."""
    said = torch.tensor(int(here), device=parts.device)
    all_reduce(said, parts.mesh.world, "max").wait()
    return bool(said)


def _one_step(plan: Plan, parts: Parts, step: int) -> float:
    assert parts.loader is not None
    batches = [to_device(parts.loader.batch(step, m), parts.device) for m in range(plan.num_microbatches)]
    return train_step(parts, batches, plan.job.lr, plan.job).loss


def synchronized_time(device: torch.device) -> float:
    """The host's clock once the device has done all that was asked of it."""
    if _is_gpu(device):
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"
