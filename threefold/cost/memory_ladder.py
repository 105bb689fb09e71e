"""The ladder of memory cures: changes of a plan that trade time for memory, in the documents' order.

Selective recompute comes first, module by module, by the bytes it gives back for a second of redoing; then a smaller
microbatch; then CP where activations fill the memory, EP, PP; then a format of fewer bits; then full recompute, and
offload last. `memory_cures(plan)` yields the changes under which a plan is predicted to fit, the mildest first:
`{"knobs.recompute": ["layernorm", "moe_act"]}`. `rules/memory.py` offers them, and `search/ladder.py` climbs the same
sets of modules for the degrees that a search looks at.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import chain, product
from math import prod
from typing import Any

from threefold.cost.estimate import fit_band, gain, memory_band
from threefold.cost.format_support import STATE_BYTES, can_split_masters, low_precisions, master_weight_bytes
from threefold.cost.memory.by_stack import fullest_bytes, memory
from threefold.cost.rates import rates_of
from threefold.cost.stack_traits import STACK_TRAITS
from threefold.cost.time.step import step_time
from threefold.cost.trained_weights import is_frozen_by_name
from threefold.fields import MAX_RANKS
from threefold.findings import Changes, FindingsError, as_overrides
from threefold.plan.parse import change
from threefold.plan.plan import INSIDE_MOE, Plan
from threefold.spec.model import MlaSpec, ModelSpec
from threefold.spec.params import count_params
from threefold.spec.tensor_parallel import tp_fits
from threefold.units import format_bytes, format_tokens

_STATES = ("weights", "gradients", "optimizer", "quantised_weights")
_ONE_CHUNK = {"layout.vpp": 1, "layout.stages": None, "layout.schedule": None}
MOST_SPREAD = 32  # combinations of degrees that the ladder looks at beside single steps
_MOST_GPUS_FACTOR = 64  # the statement of what would fit looks no further


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


def surely_fits(plan: Plan) -> bool:
    """Whether the plan is predicted to fit at the top of its memory's band."""
    have = plan.chip.memory_bytes
    return state_bytes(plan) <= have and fullest_bytes(plan, memory_band(plan), have) <= have


def fits(plan: Plan) -> bool:
    """Whether the plan is predicted to fit as the planner counts it: at the middle of the band for other stacks."""
    have = plan.chip.memory_bytes
    return fullest_bytes(plan, fit_band(plan), have) <= have


def memory_cures(plan: Plan) -> Iterator[Changes]:
    """Changes on the GPUs at hand under which the plan is predicted to fit, in the order of the ladder.

    Whether a cure breaks a rule is for whoever offers it to see.
    """
    if not any(_cures(plan, changes) for changes in _leanest(plan)):
        return
    yield from (changes for changes in _rungs(plan) if _cures(plan, changes))


def fitting_sets(plan: Plan) -> Iterator[list[str]]:
    """Selective sets with which the plan is predicted to fit, without anything on the host."""
    bare: dict[str, Any] = {"optimizer_offload": 0.0, "activation_offload": (), "activation_offload_layers": 0}
    knobs = replace(plan.knobs, **bare, recompute=(), recompute_method=None, recompute_layers=None)
    kept = tuple(name for name in plan.knobs.recompute if name != "full")
    for names in _selective(replace(plan, knobs=replace(knobs, recompute=kept))):
        if surely_fits(replace(plan, knobs=replace(knobs, recompute=tuple(names)))):
            yield names


NOTHING_CHANGES = "frees 0 B, costs no time"


def price(plan: Plan, changes: Mapping[str, Any]) -> str:
    """What a cure gives and takes, in words."""
    cured = _changed(plan, changes)
    if cured is None:
        return ""
    freed = memory(plan).worst.device_bytes - memory(cured).worst.device_bytes
    lost = -gain(plan, cured)
    if abs(lost) <= 0.0005:
        time = "costs no time"
    elif lost > 0:
        time = f"costs {lost:.1%} of the throughput"
    else:
        time = f"gains {-lost:.1%} of throughput" if lost > -1 else "more than doubles the throughput"
    return f"{'frees' if freed >= 0 else 'takes'} {format_bytes(abs(freed))}, {time}"


def what_would_fit(plan: Plan) -> str:
    """What would help where nothing on the GPUs at hand does: more of them, or shorter sequences, with numbers."""
    said = [
        f"{count} GPUs would hold it ({as_overrides({'cluster.gpus': count, **changes})})"
        for count, changes in _on_more_gpus(plan)
    ]
    said += [f"sequences of {format_tokens(length)} would fit these GPUs" for length in _shorter(plan)]
    if not said:
        return "no cure that is known here holds it, on these GPUs or more: `threefold plan` looks through all layouts"
    return ", or ".join(said)


def _changed(plan: Plan, changes: Mapping[str, Any]) -> Plan | None:
    """The plan with the changes, where its grids and batch still come out whole."""
    try:
        cured = change(plan, changes)
    except FindingsError:
        return None
    layout, job = cured.layout, cured.job
    whole = layout.fits_ranks and layout.chunks <= cured.model.num_layers + cured.mtp + 2
    return cured if whole and job.global_batch % (layout.dp * job.micro_batch) == 0 else None


def _cures(plan: Plan, changes: Changes) -> bool:
    cured = _changed(plan, changes)
    return cured is not None and surely_fits(cured)


def _leanest(plan: Plan) -> Iterator[Changes]:
    """All that the ladder has beside each step of degrees: where none of it fits, nothing does."""
    everything: Changes = {"job.micro_batch": 1, **_full_recompute(plan)}
    for more in (*_fewer_bits(plan), *_offloads(plan)):
        everything |= more
    yield from ({**step, **everything} for step in ({}, *_degrees(plan)))


def _rungs(plan: Plan) -> Iterator[Changes]:
    """The ladder: one cure after the other, then cures together, from the mildest on."""
    sets = [] if plan.full_recompute else [{"knobs.recompute": names} for names in _selective(plan)]
    most = sets[-1] if sets else {}
    smaller = {"job.micro_batch": 1} if plan.job.micro_batch > 1 else {}
    degrees = list(_degrees(plan))
    yield from sets
    if smaller:
        yield from (smaller | beside for beside in ({}, *sets))
    for step in degrees:
        yield step
        if most or smaller:
            yield {**step, **most, **smaller}
    lean = {**most, **smaller}
    for step in ({}, *degrees):
        yield from ({**step, **lean, **narrow} for narrow in _fewer_bits(plan))
    full = {**smaller, **_full_recompute(plan)} if not plan.full_recompute else smaller
    yield from ({**step, **full} for step in ({}, *degrees))
    for host in _offloads(plan):
        yield from ({**step, **lean, **host} for step in ({}, *degrees))
        yield from ({**step, **full, **host} for step in ({}, *degrees))


def _selective(plan: Plan) -> Iterator[list[str]]:
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


def _degrees(plan: Plan) -> Iterator[Changes]:
    """More CP, EP and PP on the same GPUs, one at a time and then two together: CP first where activations fill the
    memory, last where states do."""
    steps = {"cp": list(_more_cp(plan)), "ep": list(_more_ep(plan)), "pp": list(_more_pp(plan))}
    terms = memory(plan).worst.terms
    states = sum(terms.get(name, 0.0) for name in _STATES)
    first = ("cp", "ep", "pp") if sum(terms.values()) > 2 * states else ("ep", "pp", "cp")
    yield from chain.from_iterable(steps[axis] for axis in first)
    for one, other in (first[:2], first[::2], first[1:]):
        yield from ({**a, **b} for a in steps[one][:2] for b in steps[other][:2])
    yield from _spread(plan)


def _spread(plan: Plan) -> Iterator[Changes]:
    """EP and PP far apart from where they are, and TP where a model has no experts, from the least ranks on."""
    layout, model = plan.layout, plan.model
    stage = layout.gpus // layout.etp
    widths = [layout.tp * 2**i for i in range(1 if model.is_moe else 4)]
    tps = [tp for tp in widths if tp <= plan.cluster.domain_ranks and tp_fits(model, tp) is None] or [layout.tp]
    eps = [ep for ep in range(layout.ep, stage + 1, layout.ep) if model.num_experts and model.num_experts % ep == 0]
    deeper = range(6) if plan.knobs.data_parallel == "zero1" and not plan.is_vlm else range(1)
    pps = [layout.pp * 2**i for i in deeper if layout.pp * 2**i <= model.num_layers + plan.mtp + 2]
    found = [
        (tp, ep, pp)
        for tp, ep, pp in product(tps, eps or [layout.ep], pps)
        if replace(layout, tp=tp, ep=ep, pp=pp, vpp=1, stages=None, schedule=None).fits_ranks
    ]
    for tp, ep, pp in sorted(found, key=lambda degrees: (prod(degrees), degrees[2]))[:MOST_SPREAD]:
        chunks = _ONE_CHUNK if pp != layout.pp else {}
        wanted = {"layout.tp": tp, "layout.ep": ep, "layout.pp": pp}
        now = {"layout.tp": layout.tp, "layout.ep": layout.ep, "layout.pp": layout.pp}
        yield {path: degree for path, degree in wanted.items() if degree != now[path]} | chunks


def _more_cp(plan: Plan) -> Iterator[Changes]:
    layout, seq = plan.layout, plan.job.seq_len
    if plan.model.attention is None:
        return
    for factor in (2, 4, 8, 16, 32):
        cp = layout.cp * factor
        if seq % (2 * cp * layout.tp) == 0 and seq // cp >= 2048:
            yield {"layout.cp": cp}


def _more_ep(plan: Plan) -> Iterator[Changes]:
    layout, experts = plan.layout, plan.model.num_experts
    for factor in (2, 4, 8, 16):
        if experts and experts % (layout.ep * factor) == 0:
            yield {"layout.ep": layout.ep * factor}
    if layout.etp > 1 and experts and experts % (layout.ep * layout.etp) == 0:
        yield {"layout.ep": layout.ep * layout.etp, "layout.etp": 1}


def _more_pp(plan: Plan) -> Iterator[Changes]:
    """A deeper pipeline, with as many chunks as before where they can be kept."""
    layout = plan.layout
    if plan.knobs.data_parallel != "zero1" or plan.is_vlm:
        return
    for factor in (2, 4, 8):
        pp, vpp = layout.pp * factor, layout.vpp // factor
        if vpp >= 1 and layout.vpp % factor == 0 and (vpp > 1 or layout.schedule is None):
            yield {"layout.pp": pp, "layout.vpp": vpp}
        yield {"layout.pp": pp, **_ONE_CHUNK}


def _fewer_bits(plan: Plan) -> Iterator[Changes]:
    """Remainders of master weights, moments and gradients in bf16, then a low precision with weights in
    it."""
    knobs = plan.knobs
    states: Changes = {}
    if can_split_masters(plan):
        states = {"knobs.store_param_remainders": True}
        yield states
    if knobs.optimizer_dtype == "fp32":
        states = {**states, "knobs.optimizer_dtype": "bf16"}
        yield states
    if knobs.grad_dtype == "fp32":
        states = {**states, "knobs.grad_dtype": "bf16"}
        yield states
    for low in low_precisions(plan)[: knobs.precision == "bf16"]:
        yield {"knobs.precision": low}
        if plan.target != "threefold":
            yield {**states, "knobs.precision": low, "knobs.fp8_params": True}


def _full_recompute(plan: Plan) -> Changes:
    """Full recompute, and what excludes it taken back."""
    knobs = plan.knobs
    changes: Changes = {"knobs.recompute": ["full"]}
    if knobs.ep_overlap:
        changes |= {"knobs.ep_overlap": False, "knobs.delay_wgrad": False}
    if set(knobs.graphs) - {"full_iteration"}:
        changes |= {"knobs.graphs": []}
    if knobs.activation_offload:
        changes |= {"knobs.activation_offload": []}
    return changes


def _offloads(plan: Plan) -> Iterator[Changes]:
    """Optimizer states on the host, where they may go there."""
    can_offload = plan.target != "threefold" or plan.job.optimizer == "adamw"
    if plan.knobs.optimizer_offload < 1 and can_offload and plan.chip.architecture != "cpu":
        yield {"knobs.optimizer_offload": 1.0}


def _on_more_gpus(plan: Plan) -> Iterator[tuple[int, Changes]]:
    """The smallest multiple of the GPUs on which the ladder reaches, and the rung."""
    gpus, factor = plan.layout.gpus, 2
    while factor <= _MOST_GPUS_FACTOR and gpus * factor <= MAX_RANKS:
        batch = plan.job.global_batch
        grown = batch if batch % (plan.layout.dp * factor * plan.job.micro_batch) == 0 else batch * factor
        wider: Changes = {"cluster.gpus": gpus * factor, "job.global_batch": grown}
        more = _changed(plan, wider)
        if more is not None:
            changed = {"job.global_batch": grown} if grown != batch else {}
            found = {} if surely_fits(more) else next(memory_cures(more), None)
            if found is not None:
                stated = {path: v for path, v in found.items() if v is not None or path in plan.stated}
                yield gpus * factor, {**changed, **stated}
                return
        factor *= 2


def _shorter(plan: Plan) -> Iterator[int]:
    """The longest sequence, halved and halved again, that fits with what the ladder has to give."""
    length = plan.job.seq_len // 2
    while length >= 512:
        shorter = _changed(plan, {"job.seq_len": length})
        if shorter is not None and (surely_fits(shorter) or next(memory_cures(shorter), None) is not None):
            yield length
            return
        length //= 2
