"""Which of two exchanges MLA's context parallelism uses where a plan leaves `knobs.cp_exchange` open.

Latents are a seventieth of the expanded keys and values, but each rank expands what arrives. With heads traded inside a
fast domain that costs next to nothing; round a plain ring of many ranks it costs a fifth of attention. `api/plans.py`
resolves the plans that people write, and `search/price.py` the plans that a search tries.
"""

from dataclasses import replace

from threefold.cost.memory.by_stack import memory
from threefold.cost.rates import Rates, rates_of
from threefold.cost.time.layer import layer_time
from threefold.plan.parse import change
from threefold.plan.plan import Plan
from threefold.spec.model import MlaSpec

MOST_SLOWER = 0.03  # of a layer's time that the memory of expanded heads is worth


def has_open_exchange(plan: Plan) -> bool:
    """Whether the plan leaves the exchange open, and our engine has a choice."""
    is_latent = isinstance(plan.model.attention, MlaSpec)
    return is_latent and plan.layout.cp > 1 and plan.target == "threefold" and plan.knobs.cp_exchange is None


def cheaper_exchange(plan: Plan, rates: Rates) -> str:
    """The exchange by the time of one layer: latents, unless they take noticeably longer."""
    layer = next(layer for layer in plan.model.layers if layer.mixer == "attention")
    seconds = {name: layer_time(_with(plan, name), layer, rates).total for name in ("latents", "expanded")}
    return "latents" if seconds["latents"] <= seconds["expanded"] * (1 + MOST_SLOWER) else "expanded"


def resolve_exchange(plan: Plan) -> Plan:
    """The plan with its exchange written down. Expanded heads that do not fit lose against latents that do."""
    if not has_open_exchange(plan):
        return plan
    if plan.job.lora_rank is not None and "attention" in plan.job.lora_targets:
        return change(plan, {"knobs.cp_exchange": "expanded"})  # adapters of the up projections need the heads
    name = cheaper_exchange(plan, rates_of(plan))
    if name == "expanded" and _is_placed(plan) and not _fits(plan, name) and _fits(plan, "latents"):
        name = "latents"
    return change(plan, {"knobs.cp_exchange": name})


def _with(plan: Plan, name: str) -> Plan:
    return replace(plan, knobs=replace(plan.knobs, cp_exchange=name))


def _is_placed(plan: Plan) -> bool:
    """Whether the chunks are those of the schedule. Else there is no memory to count, and a rule says what is wrong."""
    layout = plan.layout
    fits_schedule = layout.vpp == 1 if layout.pp == 1 else layout.schedule != "dualpipev" or layout.vpp == 2
    return fits_schedule and layout.fits_ranks and len(plan.chunks) == layout.chunks


def _fits(plan: Plan, name: str) -> bool:
    return memory(_with(plan, name)).device_bytes <= plan.chip.memory_bytes
