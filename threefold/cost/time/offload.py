"""Offload in time: copies to the host and back, and the part of them that compute does not hide.

Optimizer states come and go in both directions of the link at once (`exposed_state_seconds`), beside the next forward.
Saved activations leave while the forward runs and come back while the backward runs, on streams of their own. As
measured on an H200, copies in both directions hide behind forward and backward together; with this rule the estimate is
within 2 % of every timed step (`benchmarks/results/recompute-h200.json` and `recompute-fused-h200.json`).
`time/step.py` calls `offload_seconds` per stage, and `time/optimizer.py` `exposed_state_seconds`.
"""

from collections.abc import Sequence
from dataclasses import replace

from threefold.cost.format_support import STATE_BYTES, master_weight_bytes
from threefold.cost.memory.by_stack import layer_activation_bytes
from threefold.cost.rank_params import trained_params
from threefold.cost.rates import Rates
from threefold.cost.stage_contents import PlacedLayer
from threefold.plan.plan import Plan
from threefold.spec.model import Layer

# The part of a hidden copy that still shows, because the copy takes memory bandwidth and launches: measured 0 to 2 % of
# a step.
EXPOSED_FRACTION = 0.02
# What each direction of the link carries while both are busy, of what `Rates.host_copy` says of one alone: 50 GB/s on
# an H200 (docs/log/recompute-and-offload.md).
BOTH_WAYS = 0.87


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


def state_link_seconds(plan: Plan, rates: Rates, num_elements: float) -> float:
    """Seconds in which the optimizer states of so many elements come from the host and go back."""
    is_own_master = plan.knobs.data_parallel != "zero1" and plan.layout.gpus > 1
    master = 0 if is_own_master else master_weight_bytes(plan)
    num_bytes = num_elements * (2 * STATE_BYTES[plan.knobs.optimizer_dtype] + master)
    return num_bytes / (plan.chip.host_bandwidth * rates.host_copy * BOTH_WAYS)


def exposed_state_seconds(plan: Plan, rates: Rates, num_elements: float, forward: float) -> float:
    """Seconds that a step waits for optimizer states on the host: the next forward runs beside their updates, but each
    layer waits for its own."""
    link = state_link_seconds(plan, rates, num_elements)
    return max(link - forward, link * _before_forward(plan))


def _before_forward(plan: Plan) -> float:
    """The fraction of the updates that must be complete before a forward can begin."""
    layout, knobs, num_layers = plan.layout, plan.knobs, plan.model.num_layers
    stands_against = knobs.compile or knobs.graphs
    overlaps = knobs.param_gather_overlap and knobs.data_parallel == "zero1" and not stands_against
    if layout.gpus == 1 and not stands_against and (overlaps or plan.num_microbatches == 1):
        return 1 / (num_layers + 1)
    if not overlaps or layout.edp > 1:  # all weights are gathered behind their updates
        return 1.0
    if layout.dp * layout.cp == 1:
        return min(1.0, layout.pp / (num_layers + 1))
    dense, experts = trained_params(plan)
    dense /= layout.dp * layout.cp
    return dense / (dense + experts) if experts else 1.0
