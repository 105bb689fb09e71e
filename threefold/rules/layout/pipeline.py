"""Pipelines: chunks, the layout string and the schedule against the model and each other."""

from collections.abc import Iterator

from threefold.findings import Changes, Finding
from threefold.layout.stages import balance, format_stages
from threefold.plan.plan import Plan
from threefold.rules.base import divisors, rule
from threefold.spec.stacks import MEGATRON_SCHEDULES


@rule(rows="PP-VPP")
def chunks_hold_layers(plan: Plan) -> Iterator[Finding]:
    """Every chunk of the pipeline holds something.

    Why: PP x VPP chunks need as many items; an empty chunk is a stage that only forwards tensors.
    Confirm: `threefold show` draws the pipeline.
    Fix: fewer chunks per rank, then fewer stages.
    """
    layout, items = plan.layout, plan.model.num_layers + plan.mtp + 2
    if layout.chunks > items:
        vpp = max(1, items // layout.pp)
        fix = {"layout.vpp": vpp} if layout.pp <= items else {"layout.pp": _pow2(items), "layout.vpp": 1}
        less = {"layout.stages": None, "layout.schedule": None}
        shallower = [d for d in reversed(divisors(layout.pp)) if d <= items and d < layout.pp]
        fewer = [{"layout.vpp": n, **less} for n in (2, 1) if layout.pp <= items and n < vpp]
        yield Finding(
            at="layout.vpp" if layout.pp <= items else "layout.pp",
            problem=f"PP {layout.pp} x VPP {layout.vpp} chunks for {plan.model.num_layers} layers and their ends",
            fix={**fix, **less},
            fixes=[*fewer, *({"layout.pp": pp, "layout.vpp": 1, **less} for pp in shallower)],
        )


@rule(severity="warning", rows="PP-LAYOUT")
def chunk_is_empty(plan: Plan) -> Iterator[Finding]:
    """No chunk of a written layout is empty without intent.

    Why: an empty chunk only forwards its input: a pipeline step that computes nothing.
    Confirm: two bars meet in layout.stages, or a bar ends it.
    Fix: a balanced string, unless the gap is meant.
    """
    if plan.layout.stages is not None and any(not str(chunk) for chunk in plan.chunks):
        fix = {"layout.stages": None}
        yield Finding(at="layout.stages", problem="a chunk holds nothing: two bars meet, or a bar ends it", fix=fix)


@rule(
    rows="PP-LAYOUT",
    refused_in=("core/transformer/pipeline_parallel_layer_layout.py", "The first layer must be embedding"),
)
def ends_are_at_the_ends(plan: Plan) -> Iterator[Finding]:
    """The first chunk of a written layout holds the embedding, and the last one the loss.

    Why: tokens enter the pipeline at its first chunk and the loss leaves it at its last; an empty chunk before the
        embedding or behind the loss has nothing to receive and nobody to send to.
    Confirm: layout.stages begins with E and ends with L.
    Fix: delete the empty chunks, or the string for a balanced one.
    """
    if plan.layout.stages is None or stage_faults(plan) or (plan.chunks[0].embedding and plan.chunks[-1].loss):
        return
    where = "before the embedding" if not plan.chunks[0].embedding else "behind the loss"
    fixes: list[Changes] = [{"layout.stages": _generated(plan)}, {"layout.stages": None}]
    yield Finding(at="layout.stages", problem=f"a chunk stands {where}", fixes=fixes)


def _pow2(number: int) -> int:
    return int(2 ** (max(1, number).bit_length() - 1))


def _generated(plan: Plan) -> str:
    return format_stages(balance(plan.model.num_layers, plan.layout.chunks, plan.mtp))


def stage_faults(plan: Plan) -> list[str]:
    """What a written layout string gets wrong about the model and the chunks."""
    layout = plan.layout
    if layout.stages is None:
        return []
    layers = sum(len(chunk.layers) for chunk in plan.chunks)
    mtp = sum(chunk.mtp for chunk in plan.chunks)
    faults = []
    if len(plan.chunks) != layout.chunks:
        faults.append(f"{len(plan.chunks)} chunks for PP {layout.pp} x VPP {layout.vpp} = {layout.chunks}")
    if layers != plan.model.num_layers:
        faults.append(f"{layers} layers of {plan.model.num_layers}")
    if mtp != plan.mtp:
        faults.append(f"{mtp} MTP depths of {plan.mtp}")
    return faults


@rule(rows="PP-LAYOUT")
def stages_match_model(plan: Plan) -> Iterator[Finding]:
    """The pipeline layout string has PP x VPP chunks, all layers, and the MTP depths that train.

    Why: a layer that no chunk holds is not trained; upstream this fails after the job has started.
    Confirm: `threefold show` prints the chunks; count t and m.
    Fix: correct the string, or delete it for a balanced one.
    """
    if plan.layout.chunks > plan.model.num_layers + plan.mtp + 2:
        return
    if faults := stage_faults(plan):
        yield Finding(
            at="layout.stages",
            problem=f"the string has {', '.join(faults)}",
            fix={"layout.stages": _generated(plan)},
        )


@rule(rows="PP-VPP")
def vpp_needs_pp(plan: Plan) -> Iterator[Finding]:
    """Several chunks a rank need a pipeline.

    Why: with one stage there is nothing to interleave; upstream refuses it.
    Confirm: layout.pp is 1.
    Fix: set layout.vpp to 1, or use a pipeline.
    """
    if plan.layout.vpp > 1 and plan.layout.pp == 1:
        fix = {"layout.vpp": 1, "layout.stages": None, "layout.schedule": None}
        yield Finding(at="layout.vpp", problem=f"VPP {plan.layout.vpp} with PP 1", fix=fix)


@rule(rows="PP-ZB PP-VPP")
def schedule_fits_chunks(plan: Plan) -> Iterator[Finding]:
    """The schedule and the chunks per rank belong together: 1f1b one, interleaved several, dualpipev two.

    Why: each schedule places chunks on ranks in its own way.
    Confirm: `threefold show` prints schedule and chunks.
    Fix: leave layout.schedule out, or set layout.vpp to what it needs.
    """
    schedule, layout = plan.layout.schedule, plan.layout
    if schedule is None:
        return
    if layout.pp == 1:
        yield Finding(at="layout.schedule", problem=f"{schedule} with PP 1", fix={"layout.schedule": None})
    elif (schedule == "1f1b" and layout.vpp > 1) or (schedule == "interleaved" and layout.vpp == 1):
        yield Finding(at="layout.schedule", problem=f"{schedule} with VPP {layout.vpp}", fix={"layout.schedule": None})
    elif schedule == "dualpipev" and layout.vpp != 2:
        room = 2 * layout.pp <= plan.model.num_layers + plan.mtp + 2
        fix = {"layout.vpp": 2, "layout.stages": None} if room else {"layout.schedule": None}
        yield Finding(at="layout.vpp", problem=f"dualpipev folds the pipeline once: VPP {layout.vpp} is not 2", fix=fix)


@rule(rows="PP-ZB", target="megatron-bridge", follows=MEGATRON_SCHEDULES)
def schedule_on_target(plan: Plan) -> Iterator[Finding]:
    """Megatron runs 1f1b and interleaved pipelines.

    Why: zero-bubble and DualPipeV are schedules of the threefold engine.
    Confirm: layout.schedule.
    Fix: leave layout.schedule out for this target.
    """
    if plan.layout.schedule in ("zero-bubble", "dualpipev"):
        fix = {"layout.schedule": None}
        yield Finding(at="layout.schedule", problem=f"Megatron has no {plan.layout.schedule} schedule", fix=fix)
