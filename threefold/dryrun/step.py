"""One optimizer step without values: the engine's parts in the order of `engine/step.py`, less what the host reads."""

import torch

from threefold.dryrun.where import Where
from threefold.engine.build import Parts
from threefold.engine.data.loader import Batch
from threefold.engine.moe.balance import update_bias
from threefold.engine.step import add_over_ranks
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
        norm = seen.pop("squares").sqrt()
        if plan.job.clip_norm > 0:
            parts.data.scale(torch.clamp(plan.job.clip_norm / (norm + 1e-6), max=1.0))
    with where.during("optimizer"):
        parts.optimizer.step(plan.job.lr)
        parts.data.gather()
        if "load_LE" in seen:
            for model in parts.chunks.values():
                update_bias(model.routers(), seen["load_LE"][model.rows], plan.job.bias_rate)
