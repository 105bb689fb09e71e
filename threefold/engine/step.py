"""One optimizer step: microbatches, gradient norm, clipping, update, and the numbers it reports; and an evaluation.

`train.py`, `verify/oracle.py` and `verify/overlap_ab.py` call `train_step`; `train_hooks.py` calls `evaluate_set`.

Shapes: L layers with experts, E experts.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from threefold.engine.batch import Batch
from threefold.engine.build import Parts
from threefold.engine.data.loader import Loader
from threefold.engine.dist.collectives import all_reduce
from threefold.engine.layers.cross_entropy import IGNORE
from threefold.engine.layers.positions import move_documents
from threefold.engine.models.inputs import labels_ahead
from threefold.engine.moe.balance import rank_skew, router_metrics, update_bias
from threefold.engine.precision.weight_cache import mark_weights_changed
from threefold.engine.schedule.microbatch_runners import StepSums
from threefold.plan.plan import Job, Plan

# Every rank of a tensor-parallel group computes the same value of these; of everything else it computes its part.
_SAME_ON_TP_RANKS = ("ce", "mtp", "weighted/mtp")


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step."""

    loss: float  # mean cross entropy over all labels of the step
    grad_norm: float  # before clipping
    num_tokens: int  # labels of the step on all ranks
    applied: bool  # False where loss or gradients were not finite, and nothing was changed
    aux: dict[str, float]  # other losses and router metrics, by name
    load_LE: Tensor | None = None  # tokens of each expert, on the device
    own_load_LE: Tensor | None = None  # those that this rank routed, of its own layers
    loss_scale: float | None = None  # with which fp16 gradients were computed
    overflowed: bool = False  # fp16 gradients were not finite at this scale: a smaller one is tried
    by_layer: Callable[[], dict[str, Tensor]] | None = None  # computes the router metrics of each layer with experts

    def layer_metrics(self) -> dict[str, float]:
        """The router metrics of each layer, such as `router/load_max/layer_03`, by the number of its router. Waits for
        the device."""
        return {
            f"{name}/layer_{layer:02d}": value
            for name, values_L in (self.by_layer() if self.by_layer else {}).items()
            for layer, value in enumerate(values_L.tolist())
        }


def train_step(
    parts: Parts,
    batches: list[Batch],
    lr: float,
    job: Job,
    around_microbatches: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> StepResult:
    """Forward and backward over the microbatches, clip, update. The loss is the mean over all labels of the step.

    The microbatch loop runs within `around_microbatches()`, for what is measured of it alone.
    """
    scaler = parts.loss_scaler
    scale = scaler.scale if scaler else None
    share_M, labels = count_labels(parts, batches)
    begin_step(parts, len(batches))
    with around_microbatches():
        sums = parts.runner.run(batches, list(share_M if scale is None else share_M * scale))
    finish_gradients(parts)
    seen = unscale(add_over_ranks(parts, sums, parts.data.grad_sum_of_squares()), scale)
    norm = seen.pop("squares").sqrt()
    factor = clip(parts, norm, job)
    num_passes = count_passes(parts, batches)
    load_LE = seen["load_LE"] if parts.copies else None
    reading = AsyncRead({"labels": labels, "norm": norm, **numbers_of(parts, seen, num_passes)}, load_LE)
    # Reading the numbers is the only wait of the host for the device. An optimizer that checks the factor by itself is
    # launched before that, so that the device does not wait for the host.
    early = parts.optimizer.uses_fused_kernel
    if early:
        update(parts, seen, lr, job, torch.where(norm.isfinite() & seen["ce"].isfinite(), factor, torch.nan))
    aux = reading.values()
    loss, norm_value, num_labels = (aux.pop(name) for name in ("ce", "norm", "labels"))
    if parts.copies:
        parts.copies.observe(reading.rows())
    applied = math.isfinite(loss) and math.isfinite(norm_value)
    overflowed = scaler is not None and math.isfinite(loss) and not applied and scaler.can_shrink
    if early and not applied:
        parts.optimizer.steps -= 1
    if applied and not early:
        update(parts, seen, lr, job, factor if scaler else None)
    if scaler and (applied or overflowed):
        scaler.update(overflowed)
    routers = {name: seen[name] for name in ("load_LE", "entropy_L", "dropped_L") if name in seen}
    by_layer = partial(layer_router_metrics, routers, num_passes, parts.mesh.layout.ep) if routers else None
    loads = seen.get("load_LE"), sums.get("load_LE")
    return StepResult(loss, norm_value, int(num_labels), applied, aux, *loads, scale, overflowed, by_layer)


def begin_step(parts: Parts, passes: int) -> None:
    """Gradients to zero, and copies of hot experts placed."""
    parts.data.begin_step(passes)
    if parts.copies:
        parts.copies.begin_step(passes)


def finish_gradients(parts: Parts) -> None:
    """Complete the gradients of the elements that this rank owns."""
    if parts.copies:
        parts.copies.sum_gradients()
    parts.data.finish_grad_sync()


@torch.no_grad()
def evaluate_batches(parts: Parts, batches: list[Batch], num_per_run: int) -> float:
    """Mean loss over all labels of some microbatches on all ranks, `num_per_run` of them at a time; changes nothing."""
    for chunk in parts.chunks.values():
        chunk.eval()
    share_M, _ = count_labels(parts, batches)
    total = torch.zeros((), dtype=torch.float64, device=parts.device)
    for start in range(0, len(batches), num_per_run):
        part = slice(start, start + num_per_run)
        sums = parts.runner.run(batches[part], list(share_M[part]), train=False)
        if "ce" in sums:
            total += sums["ce"] / parts.mesh.layout.tp
    all_reduce(total, parts.mesh.world).wait()
    for chunk in parts.chunks.values():
        chunk.train()
    return float(total)


def evaluate_set(plan: Plan, parts: Parts, loader: Loader) -> float:
    """The loss over the first samples of a set. Those that only fill the last microbatches of a layout do not count."""
    # A pipeline is made for one number of microbatches.
    each = plan.num_microbatches if plan.layout.pp > 1 else 1
    in_all = sum(source.num_samples for source in loader.mixture.sources)
    num_samples = min(in_all, plan.run.eval_batches * plan.job.micro_batch)  # whatever the layout
    runs = -(-num_samples // (each * plan.layout.dp * plan.job.micro_batch))
    batches = []
    for n in range(runs * each):
        index = divmod(n, loader.num_microbatches)
        counts_B = torch.tensor([number < num_samples for number in loader.samples(*index)])
        batch = loader.batch(*index)
        labels_BS = batch.labels_BS.where(counts_B[:, None], IGNORE)
        batches.append(to_device(replace(batch, labels_BS=labels_BS), parts.device))
    return evaluate_batches(parts, batches, each)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on the device. The host does not wait where the loader has pinned it (`Batch.pin`)."""
    if device.type == "cpu":
        return batch
    names = ("tokens_BS", "labels_BS", "positions_BS", "positions_3BS", "num_useful_B")
    given = {name: getattr(batch, name) for name in names}
    moved: dict[str, Any] = {name: x.to(device, non_blocking=True) for name, x in given.items() if x is not None}
    if batch.documents_BS is not None:
        moved["documents_BS"] = move_documents(batch.documents_BS, device)
    if (images := batch.images) is not None:
        # Grids are read on the host, and patches stay there until the encoder runs: those of a step are many.
        moved["images"] = images._replace(token_index_V=images.token_index_V.to(device, non_blocking=True))
    return replace(batch, **moved)


def unscale(seen: StepSums, scale: float | None) -> StepSums:
    """The losses and the sum of squared gradients as they would be without the loss scale."""
    if scale is None:
        return seen
    powers = {"squares": 2}
    return StepSums(
        {name: value / scale ** powers.get(name, 1) if value.dim() == 0 else value for name, value in seen.items()}
    )


def update(parts: Parts, seen: StepSums, lr: float, job: Job, factor: Any) -> None:
    """Update weights and router biases. Gradients are multiplied by `factor`; NaN leaves everything unchanged."""
    parts.optimizer.step(lr, factor)
    mark_weights_changed()
    parts.data.start_param_sync()
    if "load_LE" in seen:
        rate = job.bias_rate if factor is None else job.bias_rate * factor.isfinite()
        for model in parts.chunks.values():
            # One by one: an index of several rows would be copied to the device, for which the host waits.
            update_bias(model.routers(), [seen["load_LE"][number] for number in model.router_numbers], rate)


def numbers_of(parts: Parts, seen: StepSums, num_passes: float | Tensor) -> dict[str, Tensor]:
    """The losses of the step, and metrics of the routers before their biases are updated."""
    named = {name: value for name, value in seen.items() if value.dim() == 0}
    if "load_LE" not in seen:
        return named
    entropy_L = seen["entropy_L"] / num_passes
    routers = [router for model in parts.chunks.values() for router in model.routers()]
    ep = parts.mesh.layout.ep
    return named | router_metrics(seen["load_LE"], seen["dropped_L"], entropy_L, routers, ep)


def layer_router_metrics(seen: dict[str, Tensor], num_passes: float | Tensor, ep: int = 1) -> dict[str, Tensor]:
    """The largest load over the mean one, of experts and of expert ranks, the entropy, and the dropped part of the
    tokens, for each router.

    `num_passes`: microbatches of a step over all data-parallel ranks, over which `entropy_L` is summed.
    """
    load_LE = seen["load_LE"]
    return {
        "router/load_max": load_LE.max(dim=1).values / load_LE.mean(dim=1).clamp(min=1e-9),
        **({"router/rank_load_max": rank_skew(load_LE, ep)} if ep > 1 else {}),
        "router/entropy": seen["entropy_L"] / num_passes,
        "router/dropped": seen["dropped_L"] / load_LE.sum(dim=1).clamp(min=1),
    }


class AsyncRead:
    """Numbers, and a table of them, on their way to the host. Reading them does not wait for what the device does after
    them."""

    def __init__(self, named: dict[str, Tensor], table: Tensor | None = None) -> None:
        self.names, self.table = list(named), table
        values_N = torch.stack([value.to(torch.float64) for value in named.values()])
        if table is not None:
            values_N = torch.cat([values_N, table.to(torch.float64).flatten()])
        self.there: Any = None
        if values_N.is_cuda:
            pinned_N = torch.empty(values_N.shape, dtype=values_N.dtype, pin_memory=True)
            values_N = pinned_N.copy_(values_N, non_blocking=True)
            self.there = torch.cuda.Event()
            self.there.record()
        self.values_N = values_N

    def values(self) -> dict[str, float]:
        if self.there is not None:
            self.there.synchronize()
        return dict(zip(self.names, self.values_N[: len(self.names)].tolist(), strict=True))

    def rows(self) -> list[list[float]]:
        """The rows of the table, after `values`."""
        assert self.table is not None
        rows: list[list[float]] = self.values_N[len(self.names) :].view(self.table.shape).tolist()
        return rows


def clip(parts: Parts, norm: Tensor, job: Job) -> Tensor:
    """The factor that clips gradients, and divides them by the loss scale.

    It is applied here, unless the optimizer multiplies by it as it reads them. With a loss scale the optimizer always
    does: in fp16 small gradients would be 0 without the scale.
    """
    factor = torch.clamp(job.clip_norm / (norm + 1e-6), max=1.0) if job.clip_norm > 0 else torch.ones_like(norm)
    if parts.loss_scaler:
        return factor / parts.loss_scaler.scale
    if job.clip_norm > 0 and not parts.optimizer.uses_fused_kernel:
        parts.data.scale_grads(factor)
    return factor


def count_labels(parts: Parts, batches: list[Batch]) -> tuple[Tensor, Tensor]:
    """The label share of each microbatch, and the number of labels of the step on all data-parallel ranks.

    The losses of MTP depths are divided by the labels of the whole step too, so that a step learns the same however its
    documents are packed and dealt out.
    """
    num_mtp = next(iter(parts.chunks.values())).num_mtp
    counts = [
        [(labels_ahead(batch.labels_BS, batch.documents_BS, depth) != IGNORE).sum() for depth in range(num_mtp + 1)]
        for batch in batches
    ]
    count_MK = torch.stack([torch.stack(each) for each in counts])
    if batches[0].cp_degree is None:
        total_K = count_MK.sum(dim=0)
        all_reduce(total_K, parts.mesh.group("dp")).wait()
    else:  # with dynamic context parallelism each rank has microbatches of its own
        total_K = _sum_over_rows(parts, batches, count_MK.double()).round()
    total_K = total_K.double().clamp(min=1)
    for model in parts.chunks.values():
        model.depth_label_ratios = total_K[1:] / total_K[0] if num_mtp else None
    return count_MK[:, 0] / total_K[0], total_K[0]


def _sum_over_rows(parts: Parts, batches: list[Batch], values_MK: Tensor) -> Tensor:
    """The sum of values of the microbatches of all ranks, each microbatch once: `cp_degree` ranks share it."""
    degree_M = torch.tensor([batch.cp_degree for batch in batches], dtype=torch.float64, device=values_MK.device)
    total_K = (values_MK / degree_M[:, None]).sum(dim=0)
    all_reduce(total_K, parts.mesh.group("dp", "cp")).wait()
    return total_K


def count_passes(parts: Parts, batches: list[Batch]) -> float | Tensor:
    """The microbatches of a step over all ranks, those that several ranks share once and empty ones not at all."""
    if batches[0].cp_degree is None:
        return len(batches) * parts.mesh.layout.dp
    has_tokens_M1 = torch.tensor([[not batch.is_empty] for batch in batches], dtype=torch.float64, device=parts.device)
    return _sum_over_rows(parts, batches, has_tokens_M1)[0]


def add_over_ranks(parts: Parts, sums: StepSums, squares: Tensor) -> StepSums:
    """Sum every loss and statistic over all ranks in one all-reduce."""
    mesh, model = parts.mesh, next(iter(parts.chunks.values()))
    wanted = model.options.router_losses if model.num_routers else ()
    names = ["squares", "ce", *(["mtp", "weighted/mtp"] if model.num_mtp else [])]
    names += [*wanted, *(f"weighted/{name}" for name in wanted)]
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(names, ())
    if model.num_routers:
        assert model.spec.moe is not None
        rows = model.num_routers
        shapes |= {"load_LE": (rows, model.spec.moe.num_experts), "dropped_L": (rows,), "entropy_L": (rows,)}
    flat = []
    for name, shape in shapes.items():
        value = squares if name == "squares" else sums.get(name, squares.new_zeros(shape))
        flat.append(value.to(torch.float64).flatten() / (mesh.layout.tp if name in _SAME_ON_TP_RANKS else 1))
    packed = torch.cat(flat)
    all_reduce(packed, mesh.world).wait()
    parts_of = packed.split([math.prod(shape) for shape in shapes.values()])
    return StepSums({name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts_of, strict=True)})
