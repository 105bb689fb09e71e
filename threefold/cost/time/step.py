"""Seconds of a training step by term: the slowest stage times its microbatches, the bubble, and what comes after.

`estimate`, `search/` and `dryrun/` call `step_time`. A result reads `StepTime(step_seconds=20.9,
terms={"gemm": 4.1, "experts": 5.6, ...})` with all names of `TERMS`.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from threefold.cost.expert_load import expected_largest, is_uneven, load_of
from threefold.cost.layer_work import BF16
from threefold.cost.rates import Rates, network_bandwidth, power_slowdown, release_drift
from threefold.cost.stage_contents import chunk_layers, stage_contents
from threefold.cost.time.communication import expert_copy_seconds
from threefold.cost.time.data_parallel import data_parallel_seconds
from threefold.cost.time.host_launches import MICROBATCH_SHARPNESS, host_wait
from threefold.cost.time.layer import LayerTime, cpu_slowdown, layer_time
from threefold.cost.time.offload import offload_seconds
from threefold.cost.time.optimizer import optimizer_seconds
from threefold.cost.time.outside_layers import loss_seconds, mtp_projection_seconds, vision_seconds
from threefold.plan.plan import Plan
from threefold.spec.model import Layer

TERMS = (
    "gemm",
    "experts",
    "attention",
    "elementwise",
    "quantize",
    "recompute",
    "tp",
    "cp",
    "ep",
    "host",
    "loss",
    "vision",
    "bubble",
    "dp",
    "optimizer",
    "offload",
    "other",
)


LAYER_TERMS = tuple(name for name in LayerTime.__slots__ if name in TERMS)


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step with its terms, in seconds."""

    step_seconds: float  # the sum of `terms`
    terms: dict[str, float]
    stage: int = 0  # the pipeline rank with most to do for a microbatch, whose time the terms of layers are


@dataclass(frozen=True, slots=True)
class StageWork:
    """What one pipeline rank computes for a microbatch."""

    layers: tuple[Layer, ...]  # with those of MTP depths
    mtp_depths: int
    losses: int  # the next token's, and one for each MTP depth


def step_time(plan: Plan, rates: Rates, skew: float | None = None) -> StepTime:
    """Seconds of a step. `skew` is the busiest expert rank's load over the balanced one; without it the mean over the
    steps of the plan's load."""
    count = max(1, plan.num_microbatches)
    stages = _stage_work(plan)
    times = {layer: layer_time(plan, layer, rates, skew) for layer in {each for one in stages for each in one.layers}}
    slower = cpu_slowdown(plan, rates) * power_slowdown(plan, rates)
    mtp, loss = slower * mtp_projection_seconds(plan, rates), slower * loss_seconds(plan, rates)
    vision = vision_seconds(plan, rates)
    loads = [
        sum(times[layer].total for layer in one.layers) + one.mtp_depths * mtp + one.losses * loss for one in stages
    ]
    loads[0] += vision
    waits = [
        host_wait(plan, load, sum(times[layer].launches for layer in one.layers), MICROBATCH_SHARPNESS)
        for one, load in zip(stages, loads, strict=True)
    ]
    loads = [load + wait for load, wait in zip(loads, waits, strict=True)]
    rows = load_of(plan).skew if skew is None else skew
    offload = [offload_seconds(plan, one.layers, load, rates, rows) for one, load in zip(stages, loads, strict=True)]
    loads = [load + more for load, more in zip(loads, offload, strict=True)]
    slowest = max(range(len(loads)), key=loads.__getitem__)
    terms = dict.fromkeys(TERMS, 0.0)
    stage = stages[slowest]
    for layer in stage.layers:
        one_layer = times[layer]
        for name in LAYER_TERMS:
            terms[name] += getattr(one_layer, name) * count
    terms["host"] += waits[slowest] * count
    terms["gemm"] += stage.mtp_depths * mtp * count
    terms["loss"] = stage.losses * loss * count
    terms["vision"] = vision * count if slowest == 0 else 0.0
    terms["bubble"] = _bubble_seconds(plan, loads, loads[slowest], rates)
    terms["dp"] = data_parallel_seconds(plan, loads[slowest], rates)
    # The forward of the layers, without the loss, which comes behind all updates. A backward takes twice as long.
    forward = sum(times[layer].total - times[layer].recompute for layer in stage.layers) / 3
    if skew is None and is_uneven(plan):
        terms["ep"] += expert_copy_seconds(plan, rates) * sum(layer.ffn == "moe" for layer in stage.layers)
        for term, waiting in _chance_seconds(plan, stage, rates).items():
            terms[term] += waiting
    terms["optimizer"], terms["offload"] = optimizer_seconds(plan, rates, forward)
    terms["offload"] += offload[slowest] * count
    terms["other"] = rates.step_seconds
    drift = release_drift(plan, rates)
    terms = {name: value * drift for name, value in terms.items()}
    return StepTime(sum(terms.values()), terms, slowest)


def _chance_seconds(plan: Plan, stage: StageWork, rates: Rates) -> dict[str, float]:
    """Waiting for the stage, and for the expert data-parallel group, whose largest ranks have most rows by chance."""
    deviation = chance_deviation(plan, stage.layers, rates) * max(1, plan.num_microbatches) ** 0.5
    pipeline = expected_largest(plan.layout.pp)
    return {
        "bubble": pipeline * deviation,
        "dp": (expected_largest(plan.layout.pp * plan.layout.edp) - pipeline) * deviation,
    }


def chance_deviation(plan: Plan, layers: Sequence[Layer], rates: Rates) -> float:
    """Seconds by which a microbatch of these layers deviates, because the rows of their largest ranks do."""
    load, by_kind = load_of(plan), Counter(layer for layer in layers if layer.ffn == "moe")
    above = min(plan.layout.ep, load.skew + 0.1)
    slopes = {
        kind: (layer_time(plan, kind, rates, above).total - layer_time(plan, kind, rates, load.skew).total) / 0.1
        for kind in by_kind
    }
    return load.deviation * math.sqrt(sum(number * slopes[kind] ** 2 for kind, number in by_kind.items()))


def _stage_work(plan: Plan) -> list[StageWork]:
    """What each pipeline rank computes, in order of ranks."""
    return [
        StageWork(
            layers=tuple(layer for chunk in contents.chunks for layer in chunk_layers(plan, chunk)),
            mtp_depths=contents.mtp,
            losses=sum(chunk.loss + chunk.mtp for chunk in contents.chunks),
        )
        for contents in stage_contents(plan)
    ]


def _bubble_seconds(plan: Plan, loads: list[float], busiest: float, rates: Rates) -> float:
    """Fill and drain of the pipeline, and the hops between stages. `loads` are the seconds of a microbatch by stage."""
    layout, count = plan.layout, max(1, plan.num_microbatches)
    if layout.pp <= 1:
        return 0.0
    chunk = (sum(loads) - busiest) / layout.vpp
    if layout.schedule in ("zero-bubble", "dualpipev"):
        chunk /= 3
    return chunk + hop_seconds(plan, rates) * (2 * (layout.pp - 1) + (0.0 if layout.vpp > 1 else 2.0 * count))


def hop_seconds(plan: Plan, rates: Rates) -> float:
    """Hidden states of a microbatch sent to the next stage."""
    job, layout = plan.job, plan.layout
    payload = BF16 * plan.model.stream_dim * job.micro_batch * job.seq_len / layout.cp / layout.tp
    link = plan.link("pp")
    rate = plan.chip.domain_bandwidth if link.link == "domain" else network_bandwidth(plan, rates)
    return payload / (rate * rates.collective) + 20e-6
