"""Sets of modules that selective recompute may redo: what a model has, in which order, and with which a plan fits.

Modules are ordered by the bytes that they give back for a second of redoing. `remedies` offers the sets, and
`search/ladder.py` climbs the same ones for the degrees that a search looks at.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain, combinations
from typing import Any

from threefold.cost.fit import surely_fits
from threefold.cost.memory.by_stack import memory
from threefold.cost.rates import rates_of
from threefold.cost.stack_traits import STACK_TRAITS
from threefold.cost.time.step import step_time
from threefold.plan.plan import INSIDE_MOE, Plan
from threefold.spec.model import MlaSpec


def recomputable_modules(plan: Plan) -> list[str]:
    """Modules of a model that selective recompute can redo. Attention itself repeats too much for too little, unless
    most of it is the delta rule or Mamba's scan, whose chunks are large, and sequences are short."""
    model, moe = plan.model, plan.model.moe
    redoes_delta_rule = STACK_TRAITS[plan.target].recomputes_delta_rule
    has = {
        "layernorm": True,
        "mla_up_proj": isinstance(model.attention, MlaSpec),
        "gdn_norm_out": model.delta is not None,
        "moe_act": moe is not None,
        "shared_experts": bool(moe and moe.shared_width),
        "mlp": any(layer.ffn == "dense" for layer in model.layers),
        "core_attn": bool(model.delta or model.mamba) and redoes_delta_rule and not plan.is_long,
    }
    return [name for name, there in has.items() if there]


def selective_sets(order: list[str], is_moe: bool) -> list[tuple[str, ...]]:
    """Cumulative sets along an order of modules; whole MoE layers come after everything cheaper."""
    sets: list[tuple[str, ...]] = [tuple(order[:count]) for count in range(len(order) + 1)]
    if is_moe:
        sets.append((*(name for name in order if name not in INSIDE_MOE), "moe"))
    return sets


def by_worth(
    names: list[str], kept: Callable[[tuple[str, ...]], float], seconds: Callable[[tuple[str, ...]], float]
) -> list[str]:
    """The modules that give bytes back, most bytes for a second of redoing first. `kept` and `seconds` price a set."""
    whole, once = kept(()), seconds(())
    worth = {name: (whole - kept((name,))) / max(1e-9, seconds((name,)) - once) for name in names}
    return sorted((name for name in names if worth[name] > 0), key=lambda name: -worth[name])


def saved_bytes(plan: Plan) -> float:
    """The peak of a plan without what is only there while a recompute runs."""
    worst = memory(plan).worst
    return worst.peak_bytes - worst.terms.get("recompute", 0.0)


def goes_with_mode(plan: Plan, names: Iterable[str]) -> bool:
    """Whether modules may be recomputed beside the plan's overlaps and format: overlap redoes no exchange, delayed
    scales redo no output, and a method or a number of layers belongs to full recompute."""
    again = set(names)
    if (plan.knobs.recompute_method or plan.knobs.recompute_layers) and "full" not in again:
        return False
    if plan.knobs.ep_overlap and again & {"moe", "full"}:
        return False
    if plan.target == "megatron-bridge" and plan.knobs.precision == "fp8-tensor" and again & {"moe_act", "layernorm"}:
        return False
    return not ("shared_experts" in again and plan.knobs.shared_expert_overlap)


def growing_sets(plan: Plan) -> Iterator[list[str]]:
    """Growing sets of modules to recompute beside those that the plan names, the cheapest bytes first."""
    rates = rates_of(plan)

    def with_names(names: tuple[str, ...]) -> Plan:
        return replace(plan, knobs=replace(plan.knobs, recompute=(*plan.knobs.recompute, *names)))

    named = list(plan.knobs.recompute)
    names = [
        name
        for name in recomputable_modules(plan)
        if name not in named and goes_with_mode(plan, [name]) and not (name in INSIDE_MOE and "moe" in named)
    ]
    names = [name for name in names if name != "mla_up_proj" or not plan.exchanges_latents]
    order = by_worth(
        names,
        lambda added: saved_bytes(with_names(added)),
        lambda added: step_time(with_names(added), rates).step_seconds,
    )
    redoes_moe = plan.model.is_moe and "moe" not in named and "moe_router" not in plan.knobs.graphs
    for added in selective_sets(order, redoes_moe and goes_with_mode(plan, ["moe"]))[1:]:
        whole = [*named, *added]
        yield [name for name in whole if name not in INSIDE_MOE] if "moe" in added else whole


def fitting_sets(plan: Plan) -> Iterator[list[str]]:
    """Selective sets with which the plan is predicted to fit, without anything on the host: none, where that fits."""
    bare: dict[str, Any] = {"optimizer_offload": 0.0, "activation_offload": (), "activation_offload_layers": 0}
    kept = tuple(name for name in plan.knobs.recompute if name != "full")
    knobs = replace(plan.knobs, **bare, recompute=kept, recompute_method=None, recompute_layers=None)
    selective = replace(plan, knobs=knobs)
    for names in chain([] if kept else [[]], growing_sets(selective)):
        if surely_fits(replace(plan, knobs=replace(knobs, recompute=tuple(names)))):
            yield names


def every_set(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Every set of the model's modules that can be recomputed one by one; then all layers whole."""
    names = recomputable_modules(plan)
    names += ["core_attn"] if plan.model.attention and "core_attn" not in names else []
    names += ["moe"] if plan.model.is_moe else []
    for count in range(len(names) + 1):
        for each in combinations(names, count):
            if "moe" not in each or INSIDE_MOE.isdisjoint(each):
                yield each
    yield ("full",)
