"""One optimizer step without values: the engine's parts in the order of `engine/step.py`, less what the host reads."""

import torch

from threefold.dryrun.where import Where
from threefold.engine.build import Parts
from threefold.engine.data.loader import Batch
from threefold.engine.step import add_over_ranks, clip, update
from threefold.plan.plan import Plan


def batches_of(plan: Plan, count: int, device: torch.device) -> list[Batch]:
    shape = plan.job.micro_batch, plan.job.seq_len
    zeros = [torch.zeros(2, *shape, dtype=torch.long, device=device) for _ in range(count)]
    return [Batch(tokens_BS=both[0], labels_BS=both[1]) for both in zeros]


def step(parts: Parts, plan: Plan, where: Where, num_microbatches: int | None = None) -> None:
    """`num_microbatches` lie on the device, of which the plan's are run."""
    with where.during("batch"):
        held = batches_of(plan, num_microbatches or plan.num_microbatches, parts.device)
        batches = held[: plan.num_microbatches]
        parts.data.begin(len(batches))
    with where.during("forward"):
        sums = parts.runner.run(batches, [1 / len(batches)] * len(batches))
    with where.during("reduce"):
        parts.data.finish()
        seen = add_over_ranks(parts, sums, parts.data.squares())
        factor = clip(parts, seen.pop("squares").sqrt(), plan.job)
    with where.during("optimizer"):
        update(parts, seen, plan.job.lr, plan.job, factor if parts.optimizer.in_one_pass else None)
