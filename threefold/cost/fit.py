"""Whether a plan fits by estimate, and a bound that comes before it. `remedies`, rules and the search ask here."""

from functools import lru_cache

from threefold.cost.estimate import fit_band, memory_band
from threefold.cost.format_support import STATE_BYTES, master_weight_bytes
from threefold.cost.memory.by_stack import fullest_bytes
from threefold.cost.trained_weights import is_frozen_by_name
from threefold.plan.plan import Plan
from threefold.spec.model import ModelSpec
from threefold.spec.params import count_params


@lru_cache(maxsize=256)
def surely_fits(plan: Plan) -> bool:
    """Whether the plan is predicted to fit at the top of its memory's band."""
    have = plan.chip.memory_bytes
    return state_bytes(plan) <= have and fullest_bytes(plan, memory_band(plan), have) <= have


def fits(plan: Plan) -> bool:
    """Whether the plan is predicted to fit as the planner counts it: at the middle of the band for other stacks."""
    have = plan.chip.memory_bytes
    return fullest_bytes(plan, fit_band(plan), have) <= have


def state_bytes(plan: Plan) -> float:
    """Bytes a rank needs at least, averaged over pipeline stages."""
    layout, knobs = plan.layout, plan.knobs
    dense, experts = _params(plan.model, plan.mtp)
    dense_shards, expert_shards = max(1, layout.dp * layout.cp), max(1, layout.edp)
    dense_here, experts_here = dense / layout.tp / layout.pp, experts / layout.ep / layout.etp / layout.pp
    weight = 4 if knobs.precision == "fp32" else 1 if knobs.fp8_params else 2
    held = weight + STATE_BYTES[knobs.grad_dtype]
    states = (master_weight_bytes(plan) + 2 * STATE_BYTES[knobs.optimizer_dtype]) * (1 - knobs.optimizer_offload)
    if is_frozen_by_name(plan):  # a bound from below: what trains of the rest is left out
        held, states = weight, 0.0
    if knobs.data_parallel == "zero1":
        return dense_here * (held + states / dense_shards) + experts_here * (held + states / expert_shards)
    copies = layout.replicate
    return (held + states) * (
        dense_here / max(1, dense_shards // copies) + experts_here / max(1, expert_shards // copies)
    )


@lru_cache(maxsize=256)
def _params(model: ModelSpec, mtp: int) -> tuple[int, int]:
    """Parameters outside and inside the routed experts; MTP counts as outside, which only lowers the bound."""
    params = count_params(model, mtp)
    return params.main - params.experts, params.experts
