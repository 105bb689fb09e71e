"""One optimizer step of a rehearsal: the phases of `engine/step.py` in their order, with no values read on the host.

The engine's step reads the loss and the gradient norm on the host. Tensors of a rehearsal have no values to read, so
`run_step` calls the same functions and leaves the reading out. `measured.real_rank` runs it on real tensors too.
"""

import torch

from threefold.cost.vision import planned_pictures
from threefold.dryrun.tracking.allocation_origin import OriginTracker
from threefold.engine.batch import Batch, Images
from threefold.engine.build import Parts
from threefold.engine.step import add_over_ranks, begin_step, clip, finish_gradients, update
from threefold.engine.vision import CHANNELS
from threefold.plan.plan import Plan


def zero_batches(plan: Plan, count: int, device: torch.device) -> list[Batch]:
    """`count` microbatches in which all tokens and labels are 0, with pictures where the model sees."""
    shape = plan.job.micro_batch, plan.job.seq_len
    rows = 5 if plan.is_vlm else 2
    zeros = [torch.zeros(rows, *shape, dtype=torch.long, device=device) for _ in range(count)]
    used = torch.full(shape[:1], shape[1], device=device) if plan.pads_sequences else None
    if not plan.is_vlm:
        return [Batch(tokens_BS=both[0], labels_BS=both[1], num_useful_B=used) for both in zeros]
    images = [_blank_pictures(plan, device) for _ in range(count)]
    pairs = zip(zeros, images, strict=True)
    return [Batch(x[0], x[1], positions_3BS=x[2:], images=of, num_useful_B=used) for x, of in pairs]


def _blank_pictures(plan: Plan, device: torch.device) -> Images | None:
    """As many pictures as the plan expects in a microbatch, at the start of its tokens."""
    pictures = planned_pictures(plan)
    if pictures is None or plan.model.vision is None:
        return None
    values = CHANNELS * plan.model.vision.temporal_patch * plan.model.vision.patch**2
    return Images(
        torch.zeros(1, 1).expand(pictures.count * pictures.patches, values),
        torch.tensor([pictures.grid] * pictures.count),
        torch.zeros(pictures.count * pictures.tokens, dtype=torch.long, device=device),
    )


def run_step(parts: Parts, plan: Plan, origins: OriginTracker, num_microbatches: int | None = None) -> None:
    """Run the plan's microbatches and one update.

    `num_microbatches` are those of a whole step. All of them are allocated, because a real step loads all of them to
    the device at its start, and only as many are run as the reduced plan has.
    """
    with origins.in_phase("batch"):
        all_batches = zero_batches(plan, num_microbatches or plan.num_microbatches, parts.device)
        batches = all_batches[: plan.num_microbatches]
        if parts.copies:
            parts.copies.fills_all_slots = True
        begin_step(parts, len(batches))
    with origins.in_phase("forward"):
        sums = parts.runner.run(batches, [1 / len(batches)] * len(batches))
    with origins.in_phase("reduce"):
        finish_gradients(parts)
        seen = add_over_ranks(parts, sums, parts.data.grad_sum_of_squares())
        factor = clip(parts, seen.pop("squares").sqrt(), plan.job)
    with origins.in_phase("optimizer"):
        multiplies = parts.optimizer.uses_fused_kernel or parts.loss_scaler is not None
        update(parts, seen, plan.job.lr, plan.job, factor if multiplies else None)
