"""Seconds that the host needs to launch a layer's kernels, forward and backward.

Launches run ahead of the GPU, so `host_wait` counts only the part that exceeds the GPU's own time. On a CPU nothing
runs ahead: there the calls of a layer take this time beside the work in them.
"""

from dataclasses import replace

from threefold.cost.delta_rule import cp_comm_of
from threefold.cost.format_support import runs_fused_experts
from threefold.cost.rates import Rates
from threefold.cost.time.recompute import recomputed_modules
from threefold.plan.plan import Plan
from threefold.spec.model import Layer

# Launches that a recomputed module adds, as a fraction of the layer's; read off a launch-bound published A/B (Moonlight
# on 8 H100).
_RECOMPUTE_LAUNCHES = {
    "layernorm": 0.30,
    "core_attn": 0.18,
    "moe_act": 0.09,
    "mla_up_proj": 0.26,
    "mlp": 0.14,
    "shared_experts": 0.14,
    "moe": 0.60,
    "full": 1.0,
}


# Exponents of the soft maximum of GPU and host: parts of a layer differ more from its mean than those of a microbatch.
LAYER_SHARPNESS, MICROBATCH_SHARPNESS = 4.0, 8.0


def host_wait(plan: Plan, gpu: float, launches: float, sharpness: float) -> float:
    """Seconds that the GPU waits for launches which run ahead of it: what exceeds its own time, softly where the two
    are close."""
    if plan.chip.architecture == "cpu" or not launches:
        return launches
    longer = max(gpu, launches)
    return float(longer * ((gpu / longer) ** sharpness + (launches / longer) ** sharpness) ** (1 / sharpness) - gpu)


def replay_seconds(plan: Plan, layer: Layer, rates: Rates) -> float:
    """Seconds that the GPU waits while the graphs of a layer start, one for each recorded part, forward and backward.

    For Megatron the fit of `host_graphed` to published runs has them in it. A graph of the whole iteration starts once.
    """
    scopes = set(plan.knobs.graphs)
    if plan.target != "threefold" or plan.chip.architecture == "cpu":
        return 0.0
    mixer = layer.mixer != "none" and ("mamba" if layer.mixer == "mamba" else "attn") in scopes
    ffn = bool({"moe", "moe_router"} & scopes) if layer.ffn == "moe" else layer.ffn == "dense" and "mlp" in scopes
    return 2 * (mixer + ffn) * rates.replay_seconds


def ramp_seconds(plan: Plan, layer: Layer, rates: Rates) -> float:
    """Seconds of a layer in which its kernels fill and drain the GPU, whoever launches them, without those of a
    recompute, which are few."""
    if not rates.ramp:
        return 0.0
    launches = _eager_seconds(replace(plan, knobs=replace(plan.knobs, recompute=())), layer, rates)
    return rates.ramp * launches / (rates.host_grace if plan.chip.is_rack_scale else 1.0)


def _eager_seconds(plan: Plan, layer: Layer, rates: Rates) -> float:
    return host_seconds(replace(plan, knobs=replace(plan.knobs, graphs=())), layer, rates)


def closed_gap_seconds(plan: Plan, layer: Layer, rates: Rates) -> float:
    """Seconds between the kernels of a layer that our engine saves by one graph of the whole iteration, though the host
    was not late: a kernel that is launched alone starts some microseconds after the one before it has ended."""
    if plan.target != "threefold" or plan.chip.architecture == "cpu" or "full_iteration" not in plan.knobs.graphs:
        return 0.0
    return rates.host_gap * _eager_seconds(plan, layer, rates)


def host_seconds(plan: Plan, layer: Layer, rates: Rates) -> float:
    """Seconds of all launches of a layer; a scope captured in a CUDA graph leaves a few."""
    knobs = plan.knobs
    if "full_iteration" in knobs.graphs:
        return 0.0
    mixer = rates.host_mixer_seconds if layer.mixer != "none" else 0.0
    ffn = (
        rates.host_moe_seconds if layer.ffn == "moe" else 0.4 * rates.host_moe_seconds if layer.ffn == "dense" else 0.0
    )
    if layer.ffn == "moe" and plan.model.moe and not runs_fused_experts(plan):
        ffn += rates.host_expert_seconds * plan.model.moe.num_experts / plan.layout.ep
    ffn *= rates.host_unfused if layer.ffn == "moe" and not runs_fused_experts(plan) else 1.0
    ring = plan.layout.cp if "p2p" in cp_comm_of(plan, layer.mixer) else 1
    mixer *= 1 + rates.host_ring * (ring - 1)
    scope = "mamba" if layer.mixer == "mamba" else "attn"
    if scope in knobs.graphs:
        mixer *= rates.host_graphed
    if layer.ffn == "moe":
        captured = 0.25 * ("moe_router" in knobs.graphs) + 0.25 * ("moe_preprocess" in knobs.graphs)
        captured = 1.0 if "moe" in knobs.graphs else captured
        ffn *= 1 - captured * (1 - rates.host_graphed)
    if plan.low_precision:  # quantization launches are mostly around the experts
        mixer *= 1 + (rates.host_fp8 - 1) / 3
        ffn *= rates.host_fp8 if layer.ffn == "moe" else 1 + (rates.host_fp8 - 1) / 3
    total = mixer + ffn
    if plan.chip.is_rack_scale:
        total *= rates.host_grace
    return total * (1 + sum(_RECOMPUTE_LAUNCHES.get(name, 0.0) for name in recomputed_modules(plan)))
