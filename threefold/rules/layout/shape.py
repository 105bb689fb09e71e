"""Degrees against the model and the ranks: what must divide, and what must exist."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import lcm, log2
from typing import Any

from threefold.fields import MAX_RANKS
from threefold.findings import Changes, Finding
from threefold.layout.degrees import Layout
from threefold.plan.cores import AUTO, CORES_ADVICE, parse_core_sets
from threefold.plan.plan import Plan
from threefold.rules.base import divisors, near_degrees, rule
from threefold.spec.tensor_parallel import tp_fits
from threefold.units import format_many


@rule(rows="LC-MINGPU LC-NOREPL PF-SAMEPP CF-FIX PF-FLOOR")
def grids_divide_ranks(plan: Plan) -> Iterator[Finding]:
    """Both grids cut the same ranks: the GPU count is a multiple of PP x lcm(TP x CP, EP x ETP).

    Why: attention and experts share the pipeline ranks, and inside a stage TP x CP and EP x ETP must each
        divide the ranks. CP adds an axis; it does not replace EP or PP. Upstream's pages on long context and MoE write
        the product of all degrees, its skill on parallelism (2026-04) the larger of both grids; where degrees do not
        divide each other, only the least common multiple is right.
    Confirm: `threefold show` prints both grids; dp and edp must come out whole and at least 1.
    Fix: leave a few GPUs idle, or lower a degree until the grids divide the GPUs; the message names the next larger
        count that would do.
    """
    layout = plan.layout
    if layout.fits_ranks:
        return
    floor = layout.min_gpus
    ranks = -(-layout.gpus // floor) * floor
    more = f"or use {ranks} GPUs" if ranks <= MAX_RANKS else "or lower a degree: no cluster has as many GPUs"
    yield Finding(
        at="cluster.gpus",
        problem=(
            f"{format_many(layout.gpus, 'GPU')}: no multiple of {floor} = PP {layout.pp} x lcm(TP {layout.tp} x "
            f"CP {layout.cp}, EP {layout.ep} x ETP {layout.etp}); CP adds to EP and PP, it does not replace them"
        ),
        fixes=_grids_that_divide(plan),
        advice=more,
    )


_FEW_IDLE = 7 / 8  # of the GPUs that are at least used where some are left idle


def _grids_that_divide(plan: Plan) -> Iterator[Changes]:
    """A few idle GPUs, then other degrees from the smallest change on, then as many idle GPUs as it takes."""
    layout = plan.layout
    fewer = layout.gpus // layout.min_gpus * layout.min_gpus
    if fewer >= _FEW_IDLE * layout.gpus:
        yield {"cluster.gpus": fewer}
    axes = ("tp", "cp", "pp", "ep", "etp")
    found = []
    for degrees in product(*(_near_or_lower(layout.degree(axis)) for axis in axes)):
        tp, cp, pp, ep, etp = degrees
        if layout.gpus % (pp * lcm(tp * cp, ep * etp)) == 0:
            changed = {axis: new for axis, new in zip(axes, degrees, strict=True) if new != layout.degree(axis)}
            moved = sum(abs(log2(layout.degree(axis) / new)) for axis, new in changed.items())
            found.append((moved, len(changed), changed))
    for _, _, changed in sorted(found, key=lambda one: one[:2])[:8]:
        chunks: Changes = {"layout.stages": None} if "pp" in changed else {}
        chunks |= {"layout.vpp": 1, "layout.schedule": None} if changed.get("pp") == 1 else {}
        yield {f"layout.{axis}": degree for axis, degree in changed.items()} | chunks
    if 0 < fewer < _FEW_IDLE * layout.gpus:
        yield {"cluster.gpus": fewer}


def _near_or_lower(degree: int) -> list[int]:
    """Divisors of a degree, and powers of two up to the next above it."""
    return sorted({*divisors(degree), *(2**i for i in range(degree.bit_length())), 2 ** (degree - 1).bit_length()})


def _degrees_near(plan: Plan, axis: str, allowed: list[int]) -> dict[str, Any]:
    """Ways to allowed degrees around the plan's; where its grids do not divide the ranks, to those with which they do,
    and only else to the nearest."""
    layout, wanted = plan.layout, plan.layout.degree(axis)
    near: list[Changes] = [{f"layout.{axis}": degree} for degree in near_degrees(allowed, wanted)]
    whole = [] if layout.fits_ranks else [degree for degree in allowed if _at(layout, axis, degree).fits_ranks]
    if not whole:
        return {"fixes": near}
    nearest = sorted(near_degrees(whole, wanted), key=lambda degree: abs(log2(degree / wanted)))
    return {"fixes": [{f"layout.{axis}": degree} for degree in nearest], "resort": near[0]}


def _at(layout: Layout, axis: str, degree: int) -> Layout:
    changed: dict[str, Any] = {axis: degree}
    return replace(layout, **changed)


@rule(rows="PF-ATT")
def tp_divides_model(plan: Plan) -> Iterator[Finding]:
    """Tensor parallel cuts heads and widths into equal parts; key/value heads may instead be copied.

    Why: each rank holds the same number of heads and columns. With more ranks than key/value heads, ranks
        share copies of one, which needs a whole number of ranks a head. Upstream's recommender of
        recipes (2026-08) wants a divisor of the key/value heads; the code also takes a multiple, and is followed.
    Confirm: divide the model's head counts (`threefold models`) by layout.tp.
    Fix: use a degree that divides them.
    """
    tp = plan.layout.tp
    if tp > 1 and (part := tp_fits(plan.model, tp)):
        allowed = [d for d in (*divisors(min(tp * 2, 512)), 16, 8, 4, 2, 1) if tp_fits(plan.model, d) is None]
        yield Finding(
            at="layout.tp",
            problem=f"{tp} ranks cannot share {part} evenly",
            **_degrees_near(plan, "tp", allowed),
            advice=f"degrees that can: {', '.join(map(str, sorted(set(allowed))))}",
        )


@rule(rows="PF-MOE CF-FIX")
def ep_divides_experts(plan: Plan) -> Iterator[Finding]:
    """Every expert rank holds the same number of routed experts.

    Why: dispatch addresses experts by rank; uneven shares would need padding everywhere.
    Confirm: divide the expert count (`threefold models`) by layout.ep.
    Fix: set layout.ep to a divisor of the expert count.
    """
    ep, experts = plan.layout.ep, plan.model.num_experts
    if experts and experts % ep:
        yield Finding(
            at="layout.ep",
            problem=f"{ep} ranks cannot share {experts} experts evenly",
            **_degrees_near(plan, "ep", divisors(experts)),
            advice=f"divisors of {experts}: {', '.join(map(str, divisors(experts)))}",
        )


@rule(rows="PF-ETP")
def etp_divides_expert(plan: Plan) -> Iterator[Finding]:
    """Expert tensor parallel cuts each expert's width into equal parts.

    Why: every rank of the group multiplies the same number of columns.
    Confirm: divide the expert width (`threefold models`) by layout.etp.
    Fix: set layout.etp to a divisor of the expert width.
    """
    moe, etp = plan.model.moe, plan.layout.etp
    if moe and moe.expert_dim % etp:
        yield Finding(
            at="layout.etp",
            problem=f"{etp} ranks cannot share an expert of width {moe.expert_dim} evenly",
            **_degrees_near(plan, "etp", divisors(moe.expert_dim)),
        )


@rule(rows="PF-MOE")
def expert_axes_need_experts(plan: Plan) -> Iterator[Finding]:
    """EP and ETP above 1 need a model with experts.

    Why: a dense model has nothing to place on the expert grid.
    Confirm: `threefold models` shows the experts of each model.
    Fix: set layout.ep and layout.etp to 1.
    """
    layout = plan.layout
    if not plan.model.is_moe and (layout.ep > 1 or layout.etp > 1):
        yield Finding(
            at="layout.ep",
            problem=f"EP {layout.ep} x ETP {layout.etp} on {plan.model.name}, which has no experts",
            fix={"layout.ep": 1, "layout.etp": 1},
        )


@rule(rows="EO-V2")
def experts_fit_routing(plan: Plan) -> Iterator[Finding]:
    """There are at least as many experts as a token visits, and routing groups are whole.

    Why: a model cut to fewer experts can fall below its top-k or split a routing group.
    Confirm: compare model.num_experts with the model's top-k and groups.
    Fix: keep at least top-k experts, in whole groups.
    """
    moe = plan.model.moe
    if not moe:
        return
    usable = moe.num_experts // moe.num_groups * moe.top_groups
    if moe.num_experts % moe.num_groups or usable < moe.top_k:
        step = moe.num_groups
        need = -(-moe.top_k * moe.num_groups // moe.top_groups)
        yield Finding(
            at="model.num_experts",
            problem=(
                f"{moe.num_experts} experts in {moe.num_groups} groups, of which a token may use {moe.top_groups}, "
                f"cannot serve top-{moe.top_k}"
            ),
            fix={"model.num_experts": max(-(-need // step), -(-moe.num_experts // step), 1) * step},
        )


@rule(rows="PP-LAYOUT")
def dense_layers_exist(plan: Plan) -> Iterator[Finding]:
    """The model has layers, no more dense first layers than layers, and a width for those that are dense.

    Why: a model cut to fewer layers can be left with dense ones only, or with none. Many a model has experts in every
        layer and no width for a dense one.
    Confirm: compare model.num_layers with model.num_dense_layers; look for a width in the model's config.json
        (intermediate_size).
    Fix: keep at least one layer behind the dense ones; no dense layers where the model has no width for them.
    """
    model = plan.model
    if model.num_layers < 1:
        yield Finding(at="model.num_layers", problem="a model without layers", fix={"model.num_layers": 1})
    elif model.moe and not model.dense_dim and any(layer.ffn == "dense" for layer in model.layers):
        yield Finding(
            at="model.num_dense_layers",
            problem=f"{model.num_dense_layers} dense layers in {model.name}, which has no width for them",
            fix={"model.num_dense_layers": 0},
        )
    elif model.moe and model.num_dense_layers >= model.num_layers:
        yield Finding(
            at="model.num_layers",
            problem=f"{model.num_layers} layers, the first {model.num_dense_layers} of them dense: no experts left",
            fix={"model.num_layers": model.num_dense_layers + 1},
        )


@rule(rows="EO-FSDP OP-ZERO1")
def replicate_divides_dp(plan: Plan) -> Iterator[Finding]:
    """HSDP keeps whole copies: `replicate` divides DP and EDP, and only HSDP has copies.

    Why: each copy shards its weights over dp / replicate ranks of both grids.
    Confirm: `threefold show` prints dp and edp.
    Fix: a divisor of both, or 1.
    """
    layout, mode = plan.layout, plan.knobs.data_parallel
    if layout.replicate > 1 and mode != "hsdp":
        problem = f"replicate {layout.replicate} with data_parallel {mode}: only hsdp keeps copies"
        yield Finding(at="layout.replicate", problem=problem, fix={"layout.replicate": 1})
    elif layout.dp % layout.replicate or layout.edp % layout.replicate:
        problem = f"{layout.replicate} copies do not divide DP {layout.dp} and EDP {layout.edp}"
        whole = [d for d in divisors(layout.replicate) if layout.dp % d == layout.edp % d == 0 and d > 1]
        fixes: list[Changes] = [{"layout.replicate": copies} for copies in reversed(whole)]
        fixes.append({"layout.replicate": 1, "knobs.data_parallel": "fsdp"})
        yield Finding(at="layout.replicate", problem=problem, fixes=fixes)


@rule(rows="LC-CP-BAL")
def seq_divides_cp(plan: Plan) -> Iterator[Finding]:
    """A sequence splits into 2 x CP equal pieces, and each rank's share into TP.

    Why: causal work is balanced by giving each rank one early and one late piece; sequence parallel then
        cuts the rank's share again.
    Confirm: divide job.seq_len by 2 x CP x TP.
    Fix: a smaller CP, or a sequence length that divides.
    """
    layout, seq = plan.layout, plan.job.seq_len
    step = (2 * layout.cp if layout.cp > 1 else 1) * layout.tp
    if seq % step:
        yield Finding(
            at="job.seq_len",
            problem=f"{seq} tokens are no multiple of {step} = {'2 x CP x TP' if layout.cp > 1 else 'TP'}",
            fixes=_whole_pieces(plan, step),
        )


def _whole_pieces(plan: Plan, step: int) -> Iterator[Changes]:
    """The length that was nearly meant, up to a part in 64 longer or shorter; then a smaller CP; then any length."""
    layout, seq = plan.layout, plan.job.seq_len
    longer, shorter = -(-seq // step) * step, seq // step * step
    near = [length for length in (longer, shorter) if length and 64 * abs(length - seq) <= seq]
    yield from ({"job.seq_len": length} for length in near)
    for cp in reversed(divisors(layout.cp)[:-1]):
        if seq % ((2 * cp if cp > 1 else 1) * layout.tp) == 0:
            yield {"layout.cp": cp}
    yield from ({"job.seq_len": length} for length in (longer, shorter) if length and length not in near)


@rule(severity="warning", rows="LC-CP-MTP")
def mtp_in_model(plan: Plan) -> Iterator[Finding]:
    """MTP depths beyond the published model are new layers.

    Why: a checkpoint has no weights for them; memory and time grow by a layer each.
    Confirm: `threefold models` shows the model's own MTP depths.
    Fix: train the depths the model has.
    """
    if plan.mtp > plan.model.mtp_layers:
        problem = f"{format_many(plan.mtp, 'MTP depth')}; {plan.model.name} has {plan.model.mtp_layers or 'none'}"
        yield Finding(at="job.mtp", problem=problem, fix={"job.mtp": plan.model.mtp_layers})


@rule(rows="HO-AFF")
def cores_exist(plan: Plan) -> Iterator[Finding]:
    """The cores of `run.cores` are there, in one set for all ranks of a machine or in one for each.

    Why: a process pinned to no core does not run.
    Confirm: count the cores of the machine, and its ranks where a set is written for each; `train` asks the machine.
    Fix: write cores as 0-7,16, as one set for each rank of a machine (0-7;8-15), or auto.
    """
    cores = plan.run.cores
    if cores is None or cores == AUTO:
        return
    try:
        parse_core_sets(cores, min(plan.cluster.gpus, plan.cluster.node))
    except ValueError as error:
        yield Finding(at="run.cores", problem=str(error), fix={"run.cores": AUTO}, advice=CORES_ADVICE)
