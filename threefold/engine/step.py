"""One optimizer step on one screen.

Shapes: L layers with experts, E experts.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from threefold.engine.build import Parts
from threefold.engine.data.loader import Batch
from threefold.engine.loss import IGNORE
from threefold.engine.moe.balance import health, update_bias
from threefold.engine.runner import Sums
from threefold.engine.shard.collectives import all_reduce
from threefold.plan.plan import Job

# Computed alike by every rank of a tensor-parallel group; everything else is each rank's part.
_ALIKE = ("ce", "mtp", "weighted/mtp")


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did. `applied` is False where loss or gradients were not finite and nothing was changed."""

    loss: float
    grad_norm: float
    num_tokens: int
    applied: bool
    aux: dict[str, float]


def train_step(parts: Parts, batches: list[Batch], lr: float, job: Job) -> StepResult:
    """Forward and backward over the microbatches, clip, update. The loss is the mean over all labels of the step."""
    counts, labels = count_labels(parts, batches)
    parts.data.begin(len(batches))
    sums = parts.runner.run(batches, [count / labels for count in counts])
    parts.data.finish()
    seen = add_over_ranks(parts, sums, parts.data.squares())
    norm = seen.pop("squares").sqrt()
    if job.clip_norm > 0:
        parts.data.scale(torch.clamp(job.clip_norm / (norm + 1e-6), max=1.0))
    # The one place where the host waits for the device.
    named = {name: value for name, value in seen.items() if value.dim() == 0}
    *values, norm_value = torch.stack([*named.values(), norm]).tolist()
    aux = dict(zip(named, values, strict=True))
    loss = aux.pop("ce")
    applied = math.isfinite(loss) and math.isfinite(norm_value)
    if applied:
        parts.optimizer.step(lr)
        parts.data.gather()
        if "load_LE" in seen:
            for model in parts.chunks.values():
                update_bias(model.routers(), seen["load_LE"][model.rows], job.bias_rate)
    if "load_LE" in seen:
        entropy_L = seen["entropy_L"] / (len(batches) * parts.mesh.layout.dp)
        routers = [router for model in parts.chunks.values() for router in model.routers()]
        aux |= health(seen["load_LE"], seen["dropped_L"], entropy_L, routers)
    return StepResult(loss, norm_value, labels, applied, aux)


def count_labels(parts: Parts, batches: list[Batch]) -> tuple[list[int], int]:
    """Of each microbatch here, and of the step on all data-parallel ranks."""
    count_M = torch.stack([(batch.labels_BS != IGNORE).sum() for batch in batches])
    total = count_M.sum()
    all_reduce(total, parts.mesh.group("dp")).wait()
    *counts, labels = torch.cat([count_M, total[None]]).tolist()
    return counts, max(1, labels)


def add_over_ranks(parts: Parts, sums: Sums, squares: Tensor) -> Sums:
    """Every rank's part of every number, in one reduction."""
    mesh, model = parts.mesh, next(iter(parts.chunks.values()))
    wanted = model.options.wanted if model.num_routers else ()
    names = ["squares", "ce", *(["mtp", "weighted/mtp"] if model.num_mtp else [])]
    names += [*wanted, *(f"weighted/{name}" for name in wanted)]
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(names, ())
    if model.num_routers:
        assert model.spec.moe is not None
        rows = model.num_routers
        shapes |= {"load_LE": (rows, model.spec.moe.num_experts), "dropped_L": (rows,), "entropy_L": (rows,)}
    alike = mesh.layout.tp
    flat = []
    for name, shape in shapes.items():
        value = squares if name == "squares" else sums.get(name, squares.new_zeros(shape))
        flat.append(value.to(torch.float64).flatten() / (alike if name in _ALIKE else 1))
    packed = torch.cat(flat)
    all_reduce(packed, mesh.world).wait()
    parts_of = packed.split([math.prod(shape) for shape in shapes.values()])
    return Sums({name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts_of, strict=True)})
