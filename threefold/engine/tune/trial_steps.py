"""Runs the steps of one trial: timed steps, losses, work, settings that took effect, and a trace where it is wanted.

`session_rank.py` calls `run_trial` on every rank. Steps are those of `threefold train`: the plan's data from its first
step on, and the learning rates of its schedule, so that losses of two trials can be compared step by step.
"""

import gc
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from threefold.engine.build import Parts, build
from threefold.engine.dist.collectives import all_reduce
from threefold.engine.dist.mesh import Mesh
from threefold.engine.effects.recorder import RunEffects
from threefold.engine.optim.lr_schedule import learning_rate
from threefold.engine.profiler import NUM_STEPS, StepProfiler
from threefold.engine.step import StepResult, to_device, train_step
from threefold.engine.throughput import StepWork, Throughput
from threefold.launch.cpu_cores import choose_threads
from threefold.plan.plan import Plan
from threefold.plan.ranks import rank_environment

LEAST_STEPS = 2  # that are timed, whatever the time


@dataclass(frozen=True, slots=True)
class TrialWindow:
    """The timed steps of a trial: `steps` after `warmup`, fewer where `seconds` are over."""

    warmup: int
    steps: int
    seconds: float = 1e9
    trace: str | None = None  # folder of a trace of further steps; None: no trace


@dataclass
class TrialLog:
    """The steps of a trial on this rank."""

    seconds: list[float]
    results: list[StepResult]
    work: StepWork | None = None  # of the first step, whose data is the same in every trial
    num_images: float = 0.0  # of all steps of a vision-language model


def run_trial(plan: Plan, mesh: Mesh, window: TrialWindow) -> dict[str, Any]:
    """Build the plan and run its steps. Every rank calls it; the result of the first one is complete."""
    device = mesh.device
    environment = rank_environment(os.environ)
    on_gpu = device.type == "cuda"
    torch.set_num_threads(choose_threads(plan, environment.local_size if environment else 1, None, on_gpu)[0])
    if on_gpu:
        torch.cuda.init()
        torch.cuda.reset_peak_memory_stats(device)
    group = mesh.checkpoint_group()
    parts = build(plan, mesh)
    try:
        effects = RunEffects(plan, parts, mesh.rank, 0, window.warmup + window.steps)
        log = _steps(plan, parts, window, effects)
        peak = Throughput(plan, mesh).count_work([]).memory_bytes
        report = effects.report(group)
        if window.trace:
            _trace(plan, parts, Path(window.trace), len(log.results))
    finally:
        parts.close()
        del parts
        free_gpu_memory()
    assert log.work is not None
    return {
        "steps": log.seconds[window.warmup :],
        "losses": [result.loss for result in log.results],
        "skipped": sum(not result.applied for result in log.results),
        "dropped": max(result.aux.get("router/dropped", 0.0) for result in log.results),
        "peak_bytes": int(peak),
        "work": _work_json(plan, log, log.work),
        "effects": [effect.as_json() for effect in report.effects] if report else [],
    }


def _work_json(plan: Plan, log: TrialLog, work: StepWork) -> dict[str, float | bool]:
    values = {"tokens": work.num_tokens, "useful_tokens": work.num_useful_tokens, "flops": work.flops}
    return values | ({"images": work.num_images, "is_image_free": not log.num_images} if plan.is_vlm else {})


def _steps(plan: Plan, parts: Parts, window: TrialWindow, effects: RunEffects) -> TrialLog:
    log, throughput = TrialLog([], []), Throughput(plan, parts.mesh)
    began = time.perf_counter()
    gc.collect()
    gc.disable()  # as the training loop does
    try:
        for step in range(window.warmup + window.steps):
            timed = step - window.warmup
            if timed >= LEAST_STEPS and _is_over(parts, time.perf_counter() - began > window.seconds):
                break
            start = synchronized_time(parts.device)
            with effects.step(step + 1):
                batches = _batches(parts, step)
                log.results.append(train_step(parts, batches, learning_rate(plan.job, step), plan.job))
            log.seconds.append(synchronized_time(parts.device) - start)
            effects.end_step(log.seconds[-1])
            if log.work is None or plan.is_vlm:
                work = throughput.count_work(batches)
                log.work, log.num_images = log.work or work, log.num_images + work.num_images
    finally:
        gc.enable()
    return log


def _batches(parts: Parts, step: int) -> list[Any]:
    assert parts.loader is not None
    return [to_device(parts.loader.batch(step, m), parts.device) for m in range(parts.loader.num_batches(step))]


def _trace(plan: Plan, parts: Parts, folder: Path, done: int) -> None:
    """Trace some steps after the timed ones."""
    profiler = StepProfiler(folder, parts, parts.mesh.rank, done + 1)
    for step in range(done, done + NUM_STEPS):
        with profiler.step(step + 1):
            train_step(parts, _batches(parts, step), learning_rate(plan.job, step), plan.job)
        profiler.finish(step + 1)


def _is_over(parts: Parts, here: bool) -> bool:
    """Return whether any rank has used up its time: all stop after the same step."""
    over = torch.tensor(int(here), device=parts.device)
    all_reduce(over, parts.mesh.world, "max").wait()
    return bool(over)


def free_gpu_memory() -> None:
    """Give back what nothing refers to any more, for another plan or another process."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def synchronized_time(device: torch.device) -> float:
    """The host's clock once the device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
