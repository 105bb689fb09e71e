"""Learning-rate schedules: warm-up, then cosine, warm-up-stable-decay, or constant. `train.py` asks for each step."""

import math

from threefold.plan.plan import Job


def learning_rate(job: Job, step: int) -> float:
    """The rate of optimizer step `step`, counted from 0."""
    if step < job.warmup_steps:
        return job.lr * (step + 1) / job.warmup_steps
    return job.lr * _after_warmup(job, step)


def _after_warmup(job: Job, step: int) -> float:
    """The factor of `job.lr` after warm-up; `job.min_lr` is the smallest one."""
    floor = job.min_lr
    if job.lr_schedule == "constant":
        return 1.0
    last = max(1, job.steps - 1)
    if job.lr_schedule == "cosine":
        span = max(1, last - job.warmup_steps)
        done = min(1.0, (step - job.warmup_steps) / span)
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))
    first = last - round(job.decay_fraction * job.steps)
    if step <= first:
        return 1.0
    return floor + (1 - floor) * max(0.0, (last - step) / max(1, last - first))
