"""Activation offload in time: copies to the host and back, and the part of them that compute does not hide.

Saved activations leave while the forward runs and come back while the backward runs, on streams of their own. As
measured on an H200, copies in both directions hide behind forward and backward together; with this rule the estimate is
within 2 % of every timed step (`benchmarks/results/recompute-h200.json` and `recompute-fused-h200.json`).
`time/step.py` calls `offload_seconds` per stage.
"""

from collections.abc import Sequence
from dataclasses import replace

from threefold.cost.memory.by_stack import layer_activation_bytes
from threefold.cost.rates import Rates
from threefold.cost.stage_contents import PlacedLayer
from threefold.plan.plan import Plan
from threefold.spec.model import Layer

# The part of a hidden copy that still shows, because the copy takes memory bandwidth and launches: measured 0 to 2 % of
# a step.
EXPOSED_FRACTION = 0.02


def offloaded_bytes(plan: Plan, layers: Sequence[Layer], skew: float = 1.0) -> float:
    """Bytes that these layers of a rank keep on the host for one microbatch, which the estimate of memory leaves
    out."""
    knobs = plan.knobs
    if not (layers and (knobs.activation_offload or knobs.activation_offload_layers)):
        return 0.0
    # Whole layers count below, as a fraction of all.
    layers = [replace(layer, is_offloaded=False) if isinstance(layer, PlacedLayer) else layer for layer in layers]
    without = replace(plan, knobs=replace(knobs, activation_offload=()))
    on_device = {layer: sum(layer_activation_bytes(plan, layer, skew).values()) for layer in set(layers)}
    by_name = {
        layer: sum(layer_activation_bytes(without, layer, skew).values()) - on_device[layer] for layer in set(layers)
    }
    whole_layers = min(1.0, knobs.activation_offload_layers / len(layers))
    return sum(by_name[layer] + whole_layers * on_device[layer] for layer in layers)


def exposed_seconds(num_bytes: float, bandwidth: float, compute: float) -> float:
    """Seconds that a microbatch waits for `num_bytes` copied out and back beside `compute` seconds of its passes."""
    copies = 2 * num_bytes / bandwidth
    return max(EXPOSED_FRACTION * copies, copies - compute)


def offload_seconds(plan: Plan, layers: Sequence[Layer], compute: float, rates: Rates, skew: float = 1.0) -> float:
    """Seconds that offload adds to a microbatch on a rank which computes `compute` seconds for it."""
    bandwidth = plan.chip.host_bandwidth * rates.host_copy
    return exposed_seconds(offloaded_bytes(plan, layers, skew), bandwidth, compute)
