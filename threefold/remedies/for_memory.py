"""Changes that make room in memory, and what would help where none of them does on the GPUs at hand.

Each function yields the ways of one remedy of the catalogue, the mildest first; a harsher remedy comes alone and then
together with the milder ones before it. Whether a way fits or breaks a rule is for `advise` to see.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import chain, product
from math import prod
from typing import Any

from threefold.cost.fit import surely_fits
from threefold.cost.format_support import can_split_masters, low_precisions
from threefold.cost.memory.by_stack import memory
from threefold.fields import MAX_RANKS
from threefold.findings import Changes, FindingsError, as_overrides
from threefold.plan.parse import change
from threefold.plan.plan import Plan
from threefold.remedies.recompute_sets import growing_sets
from threefold.spec.tensor_parallel import tp_fits
from threefold.units import format_tokens

_STATES = ("weights", "gradients", "optimizer", "quantized_weights")
_ONE_CHUNK: Changes = {"layout.vpp": 1, "layout.stages": None, "layout.schedule": None}
MOST_SPREAD = 32  # combinations of degrees that are looked at beside single steps
_MOST_GPUS_FACTOR = 64  # the statement of what would fit looks no further


def recompute(plan: Plan) -> Iterator[Changes]:
    """Growing sets of modules, the cheapest bytes first."""
    yield from ({"knobs.recompute": list(names)} for names in _selective(plan))


def smaller_microbatch(plan: Plan) -> Iterator[Changes]:
    if plan.job.micro_batch > 1:
        yield from ({"job.micro_batch": 1, **more} for more in ({}, *recompute(plan)))


def spread(plan: Plan) -> Iterator[Changes]:
    """Other degrees on the same GPUs, each alone and then with all that is milder."""
    lean = _lean(plan)
    for step in degrees(plan):
        yield step
        if lean:
            yield {**step, **lean}


def fewer_bits(plan: Plan) -> Iterator[Changes]:
    """Remainders of master weights, then moments and gradients in bf16."""
    yield from _combined(plan, list(_bits(plan)), _lean(plan))


def low_precision(plan: Plan) -> Iterator[Changes]:
    """A format below sixteen bits, then weights in it."""
    yield from _combined(plan, list(_formats(plan)), _lean(plan))


def full_recompute(plan: Plan) -> Iterator[Changes]:
    if not plan.full_recompute:
        yield from _combined(plan, [_full(plan)], {})


def offload(plan: Plan) -> Iterator[Changes]:
    """Optimizer states on the host, where they may go there."""
    hosts = _hosts(plan)
    yield from _combined(plan, hosts, _lean(plan))
    yield from _combined(plan, hosts[-1:], _full(plan)) if not plan.full_recompute else ()


def can_ever_fit(plan: Plan) -> bool:
    """Whether all that there is fits, beside some step of degrees: where it does not, nothing milder does."""
    everything: Changes = _full(plan)
    for more in (*_bits(plan), *_formats(plan), *_hosts(plan)):
        everything |= more
    return any(fits_with(plan, {**step, **everything}) for step in ({}, *degrees(plan)))


def fits_with(plan: Plan, changes: Changes) -> bool:
    changed = whole(plan, changes)
    return changed is not None and surely_fits(changed)


def _combined(plan: Plan, ways: list[Changes], milder: Changes) -> Iterator[Changes]:
    """Each way alone, with what is milder, and with other degrees."""
    yield from ways
    for step in ({}, *degrees(plan)):
        yield from ({**step, **milder, **way} for way in ways if step or milder)


def _lean(plan: Plan) -> Changes:
    """All that is milder than another layout: the largest selective set, and a microbatch of one sequence."""
    sets = _selective(plan)
    smaller: Changes = {"job.micro_batch": 1} if plan.job.micro_batch > 1 else {}
    return {**({"knobs.recompute": list(sets[-1])} if sets else {}), **smaller}


@lru_cache(maxsize=16)
def _selective(plan: Plan) -> list[list[str]]:
    return [] if plan.full_recompute else list(growing_sets(plan))


@lru_cache(maxsize=16)
def degrees(plan: Plan) -> list[Changes]:
    return list(_degrees(plan))


def what_would_fit(plan: Plan) -> str:
    """What would help where nothing on the GPUs at hand does: more of them, or shorter sequences, with numbers."""
    said = [
        f"{count} GPUs would hold it ({as_overrides({'cluster.gpus': count, **changes})})"
        for count, changes in _on_more_gpus(plan)
    ]
    said += [f"sequences of {format_tokens(length)} would fit these GPUs" for length in _shorter(plan)]
    if not said:
        return "no remedy of the catalogue holds it, on these GPUs or more: `threefold plan` looks through all layouts"
    return ", or ".join(said)


def ways_that_fit(plan: Plan) -> Iterator[Changes]:
    """Changes on the GPUs at hand under which the plan is predicted to fit, the mildest first, whatever rules say."""
    if can_ever_fit(plan):
        every = (recompute, smaller_microbatch, spread, fewer_bits, low_precision, full_recompute, offload)
        ways = chain.from_iterable(each(plan) for each in every)
        yield from (way for way in ways if fits_with(plan, way))


def whole(plan: Plan, changes: Mapping[str, Any]) -> Plan | None:
    """The plan with the changes, where its grids and batch still come out whole."""
    try:
        cured = change(plan, changes)
    except FindingsError:
        return None
    layout, job = cured.layout, cured.job
    whole = layout.fits_ranks and layout.chunks <= cured.model.num_layers + cured.mtp + 2
    return cured if whole and job.global_batch % (layout.dp * job.micro_batch) == 0 else None


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


def _bits(plan: Plan) -> Iterator[Changes]:
    states: Changes = {}
    if can_split_masters(plan):
        states = {"knobs.store_param_remainders": True}
        yield states
    for path, now in (
        ("knobs.optimizer_dtype", plan.knobs.optimizer_dtype),
        ("knobs.grad_dtype", plan.knobs.grad_dtype),
    ):
        if now == "fp32":
            states = {**states, path: "bf16"}
            yield states


def _formats(plan: Plan) -> Iterator[Changes]:
    for low in low_precisions(plan)[: plan.knobs.precision == "bf16"]:
        yield {"knobs.precision": low}
        if plan.target != "threefold":
            yield {"knobs.precision": low, "knobs.fp8_params": True}


def _hosts(plan: Plan) -> list[Changes]:
    """Growing parts of the optimizer on the host: up to half is the efficient range (OF-HALF)."""
    can_offload = plan.target != "threefold" or plan.job.optimizer == "adamw"
    if not can_offload or plan.chip.architecture == "cpu":
        return []
    return [{"knobs.optimizer_offload": part} for part in (0.25, 0.5, 1.0) if part > plan.knobs.optimizer_offload]


def _full(plan: Plan) -> Changes:
    """Full recompute, and what excludes it taken back."""
    knobs = plan.knobs
    changes: Changes = {"knobs.recompute": ["full"]} | ({"job.micro_batch": 1} if plan.job.micro_batch > 1 else {})
    if knobs.ep_overlap:
        changes |= {"knobs.ep_overlap": False, "knobs.delay_wgrad": False}
    if set(knobs.graphs) - {"full_iteration"}:
        changes |= {"knobs.graphs": []}
    if knobs.activation_offload:
        changes |= {"knobs.activation_offload": []}
    return changes


def _on_more_gpus(plan: Plan) -> Iterator[tuple[int, Changes]]:
    """The smallest multiple of the GPUs on which the ladder reaches, and the rung."""
    gpus, factor = plan.layout.gpus, 2
    while factor <= _MOST_GPUS_FACTOR and gpus * factor <= MAX_RANKS:
        batch = plan.job.global_batch
        grown = batch if batch % (plan.layout.dp * factor * plan.job.micro_batch) == 0 else batch * factor
        wider: Changes = {"cluster.gpus": gpus * factor, "job.global_batch": grown}
        more = whole(plan, wider)
        if more is not None:
            changed = {"job.global_batch": grown} if grown != batch else {}
            found = {} if surely_fits(more) else next(ways_that_fit(more), None)
            if found is not None:
                stated = {path: v for path, v in found.items() if v is not None or path in plan.stated}
                yield gpus * factor, {**changed, **stated}
                return
        factor *= 2


def _shorter(plan: Plan) -> Iterator[int]:
    """The longest sequence, halved and halved again, that fits with what the ladder has to give."""
    length = plan.job.seq_len // 2
    while length >= 512:
        shorter = whole(plan, {"job.seq_len": length})
        if shorter is not None and (surely_fits(shorter) or next(ways_that_fit(shorter), None) is not None):
            yield length
            return
        length //= 2
