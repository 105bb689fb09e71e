"""Memory: a lower bound that refuses gross misfits. Weights, gradients and optimizer states, no activations."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product

from threefold.fields import MAX_RANKS
from threefold.findings import Finding
from threefold.plan.plan import Plan
from threefold.rules.base import divisors, rule
from threefold.spec.model import ModelSpec
from threefold.spec.params import count_params
from threefold.units import format_bytes

_STATE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


@lru_cache(maxsize=256)
def _params(model: ModelSpec, mtp: int) -> tuple[int, int]:
    """Parameters outside and inside the routed experts; MTP counts as outside, which only lowers the bound."""
    params = count_params(model, mtp)
    return params.main - params.experts, params.experts


def state_bytes(plan: Plan) -> float:
    """Bytes a rank needs at least, averaged over pipeline stages."""
    layout, knobs = plan.layout, plan.knobs
    dense, experts = _params(plan.model, plan.mtp)
    dense_shards, expert_shards = max(1, layout.dp * layout.cp), max(1, layout.edp)
    dense_here, experts_here = dense / layout.tp / layout.pp, experts / layout.ep / layout.etp / layout.pp
    weight = 4 if knobs.precision == "fp32" else 1 if knobs.fp8_params else 2
    held = weight + _STATE_BYTES[knobs.grad_dtype]
    states = (4 + 2 * _STATE_BYTES[knobs.optimizer_dtype]) * (1 - knobs.optimizer_offload)
    if knobs.data_parallel == "zero1":
        return dense_here * (held + states / dense_shards) + experts_here * (held + states / expert_shards)
    copies = layout.replicate
    return (held + states) * (
        dense_here / max(1, dense_shards // copies) + experts_here / max(1, expert_shards // copies)
    )


def _cure(plan: Plan, limit: float) -> dict[str, object] | None:
    """The smallest change that gets under the limit: more EP, then a deeper pipeline, then more GPUs, then offload."""
    layout, experts = plan.layout, plan.model.num_experts
    eps = [d for d in divisors(experts) if layout.ep <= d <= 512] or [layout.ep]
    deepest = plan.model.num_layers + plan.mtp + 2
    pps = [layout.pp * 2**i for i in range(10) if layout.pp * 2**i <= deepest] or [layout.pp]
    counts = [layout.gpus * 2**i for i in range(9) if layout.gpus * 2**i <= MAX_RANKS]
    for offload, gpus, pp, ep in product((plan.knobs.optimizer_offload, 1.0), counts, pps, eps):
        tried = replace(
            plan,
            layout=replace(layout, ep=ep, pp=pp, gpus=gpus),
            knobs=replace(plan.knobs, optimizer_offload=offload),
        )
        if tried.layout.fits_ranks and state_bytes(tried) <= limit:
            deeper = {"layout.vpp": 1, "layout.stages": None, "layout.schedule": None} if pp != layout.pp else {}
            moved = {"layout.ep": ep, "layout.pp": pp, "cluster.gpus": gpus, "knobs.optimizer_offload": offload}
            now = (layout.ep, layout.pp, layout.gpus, plan.knobs.optimizer_offload)
            return {p: v for (p, v), old in zip(moved.items(), now, strict=True) if v != old} | deeper
    return None


@rule(rows="PW-MEMSIG MEM-EST LC-MINGPU")
def states_fit_memory(plan: Plan) -> Iterator[Finding]:
    """Weights, gradients and optimizer states alone fit the memory of a GPU.

    Why: activations come on top, so a plan over this bound cannot run on any day.
    Confirm: the bytes in the message against the chip's memory (`threefold chips`).
    Fix: spread the experts (EP), then the layers (PP), then add GPUs; offload last.
    """
    need, have = state_bytes(plan), plan.chip.memory_bytes
    if need <= have or not plan.layout.fits_ranks:
        return
    cure = _cure(plan, 0.9 * have)
    yield Finding(
        at="layout",
        problem=f"weights, gradients and optimizer states need {format_bytes(need)} of {format_bytes(have)} a GPU",
        fix=cure,
        advice="" if cure else "use a smaller model or a chip with more memory",
    )
