"""Activation offload in time: copies to the host and back, and what of them compute does not hide.

What a forward keeps leaves while it runs, and comes back while the backward does, on streams of their own. By what was
measured both ways hide behind both passes together. From the bytes that went away this gives every step timed on an
H200 within 2 % (`benchmarks/results/recompute-h200.json` and `recompute-fused-h200.json`).
"""

from collections.abc import Sequence
from dataclasses import replace

from threefold.cost.memory import layer_bytes
from threefold.cost.rates import Rates
from threefold.plan.plan import Plan
from threefold.spec.model import Layer

SHOWS = 0.02  # of a copy that is hidden: measured 0 to 2 % of a step, for it takes memory bandwidth and launches


def away_bytes(plan: Plan, layers: Sequence[Layer], skew: float = 1.0) -> float:
    """What these layers of a rank keep on the host for one microbatch; the estimate of memory leaves it out."""
    knobs = plan.knobs
    if not (layers and (knobs.activation_offload or knobs.activation_offload_layers)):
        return 0.0
    here = replace(plan, knobs=replace(knobs, activation_offload=()))
    kept = {layer: sum(layer_bytes(plan, layer, skew).values()) for layer in set(layers)}
    named = {layer: sum(layer_bytes(here, layer, skew).values()) - kept[layer] for layer in set(layers)}
    whole = min(1.0, knobs.activation_offload_layers / len(layers))
    return sum(named[layer] + whole * kept[layer] for layer in layers)


def exposed_seconds(num_bytes: float, bandwidth: float, compute: float) -> float:
    """What a microbatch waits for bytes on their way out and back, beside which its forward and backward compute."""
    copies = 2 * num_bytes / bandwidth
    return max(SHOWS * copies, copies - compute)


def offload_seconds(plan: Plan, layers: Sequence[Layer], load: float, rates: Rates, skew: float = 1.0) -> float:
    """Of a microbatch on a rank that computes `load` seconds for it."""
    return exposed_seconds(away_bytes(plan, layers, skew), plan.chip.host_bandwidth * rates.host_copy, load)
