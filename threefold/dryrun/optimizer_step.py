"""One optimizer step of a rehearsal: the phases of `engine/step.py` in their order, with no values read on the host.

The engine's step reads the loss and the gradient norm on the host. Tensors of a rehearsal have no values to read, so
`run_step` calls the same functions and leaves the reading out. `measured.real_rank` runs it on real tensors too.
"""

import torch

from threefold.dryrun.tracking.allocation_origin import OriginTracker
from threefold.engine.batch import Batch
from threefold.engine.build import Parts
from threefold.engine.step import add_over_ranks, clip, update
from threefold.plan.plan import Plan


def zero_batches(plan: Plan, count: int, device: torch.device) -> list[Batch]:
    """`count` microbatches in which all tokens and labels are 0."""
    shape = plan.job.micro_batch, plan.job.seq_len
    zeros = [torch.zeros(2, *shape, dtype=torch.long, device=device) for _ in range(count)]
    return [Batch(tokens_BS=both[0], labels_BS=both[1]) for both in zeros]


def run_step(parts: Parts, plan: Plan, origins: OriginTracker, num_microbatches: int | None = None) -> None:
    """Run the plan's microbatches and one update.

    `num_microbatches` are those of a whole step. All of them are allocated, because a real step loads all of them to
    the device at its start, and only as many are run as the reduced plan has.
    """
    with origins.in_phase("batch"):
        all_batches = zero_batches(plan, num_microbatches or plan.num_microbatches, parts.device)
        batches = all_batches[: plan.num_microbatches]
        parts.data.begin_step(len(batches))
    with origins.in_phase("forward"):
        sums = parts.runner.run(batches, [1 / len(batches)] * len(batches))
    with origins.in_phase("reduce"):
        parts.data.finish_grad_sync()
        seen = add_over_ranks(parts, sums, parts.data.grad_sum_of_squares())
        factor = clip(parts, seen.pop("squares").sqrt(), plan.job)
    with origins.in_phase("optimizer"):
        multiplies = parts.optimizer.uses_fused_kernel or parts.loss_scaler is not None
        update(parts, seen, plan.job.lr, plan.job, factor if multiplies else None)
