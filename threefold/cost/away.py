"""Activation offload in time: copies to the host and back, and what of them compute does not hide.

What a forward keeps leaves while it runs, and comes back while the backward does, on streams of their own. From the
bytes that went away this gives every step measured on an H200 within 3 % (`benchmarks/results/recompute-h200.json`).
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


def exposed_seconds(num_bytes: float, bandwidth: float, forward: float, backward: float) -> float:
    """Of a microbatch that computes for so long: what is waited for on the way out, and on the way back."""
    copy = num_bytes / bandwidth
    return sum(max(SHOWS * copy, copy - hides) for hides in (forward, backward))


def offload_seconds(plan: Plan, layers: Sequence[Layer], load: float, rates: Rates, skew: float = 1.0) -> float:
    """Of a microbatch on a rank whose layers take `load` seconds, a third of it forward."""
    bandwidth = plan.chip.host_bandwidth * rates.host_copy
    return exposed_seconds(away_bytes(plan, layers, skew), bandwidth, load / 3, 2 * load / 3)
