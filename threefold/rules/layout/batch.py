"""Batch, microbatches and the pipeline they fill."""

from collections.abc import Iterator
from dataclasses import replace

from threefold.cost.estimate import gain
from threefold.cost.fit import surely_fits
from threefold.findings import Changes, Finding, shown
from threefold.plan.load import BALANCED, load_problems
from threefold.plan.plan import Plan
from threefold.remedies.advise import WORTH
from threefold.rules.base import rule
from threefold.rules.layout.pipeline import stage_faults
from threefold.spec.stacks import MEGATRON_SCHEDULES
from threefold.units import format_many


def can_be_priced(plan: Plan) -> bool:
    """Whether the plan is whole enough for an estimate; other rules speak where it is not."""
    layout = plan.layout
    placed = layout.vpp == 1 if layout.pp == 1 else layout.schedule != "dualpipev" or layout.vpp == 2
    return (
        placed
        and layout.fits_ranks
        and layout.chunks <= plan.model.num_layers + plan.mtp + 2
        and not stage_faults(plan)
    )


def pays(plan: Plan, other: Plan) -> bool:
    """Whether another plan is predicted to be faster, and to fit; true where the two cannot be compared."""
    if not can_be_priced(plan) or not can_be_priced(other):
        return True
    return gain(plan, other) > WORTH and (surely_fits(other) or not surely_fits(plan))


def batch_step(plan: Plan) -> int:
    """Global batches are whole multiples of this: every rank gets whole microbatches, every stage its turn."""
    step = max(1, plan.layout.dp) * plan.job.micro_batch
    return step * plan.layout.pp if plan.layout.pp > 1 and _in_rounds(plan) else step


def _in_rounds(plan: Plan) -> bool:
    """Whether chunks take turns; zero-bubble schedules do as soon as a rank has several."""
    schedule = plan.layout.pipeline_schedule
    return schedule == "interleaved" or (schedule == "zero-bubble" and plan.layout.vpp > 1)


def _round_up(batch: int, step: int) -> int:
    return max(1, -(-batch // step)) * step


@rule(rows="LC-GBS CF-FIX")
def batch_divides_dp(plan: Plan) -> Iterator[Finding]:
    """The global batch is a whole number of microbatches on every data-parallel rank.

    Why: a step ends when all ranks have done the same number of microbatches.
    Confirm: divide job.global_batch by DP x job.micro_batch (`threefold show` prints DP).
    Fix: the next batch that divides.
    """
    layout, job = plan.layout, plan.job
    share = layout.dp * job.micro_batch
    if layout.fits_ranks and job.global_batch % share:
        yield Finding(
            at="job.global_batch",
            problem=f"{format_many(job.global_batch, 'sequence')} a step cannot be shared out by DP {layout.dp} x "
            f"microbatch {job.micro_batch}",
            fixes=_batches_that_divide(plan),
        )


def _batches_that_divide(plan: Plan) -> Iterator[Changes]:
    """A smaller microbatch, which changes no result; then the next batch that divides, then the one below."""
    job, step = plan.job, batch_step(plan)
    whole = [m for m in range(job.micro_batch - 1, 0, -1) if job.global_batch % (plan.layout.dp * m) == 0]
    yield from ({"job.micro_batch": m} for m in whole[:2])
    yield {"job.global_batch": _round_up(job.global_batch, step)}
    if job.global_batch > step:
        yield {"job.global_batch": job.global_batch // step * step}


@rule(rows="PP-VPP", follows=f"{MEGATRON_SCHEDULES}; torch 2.11 Interleaved1F1B")
def interleaved_fills_pipeline(plan: Plan) -> Iterator[Finding]:
    """An interleaved pipeline has at least PP microbatches, in equal rounds; DualPipeV needs two rounds.

    Why: chunks take turns in rounds of about PP microbatches. Megatron can choose the size of a round, torch's
        schedule cuts the microbatches into as many equal rounds as have PP of them.
    Confirm: `threefold show` prints the number of microbatches.
    Fix: a global batch that gives whole rounds.
    """
    layout, count = plan.layout, plan.num_microbatches
    if layout.pp == 1 or not layout.fits_ranks or plan.job.global_batch % (layout.dp * plan.job.micro_batch):
        return
    share = layout.dp * plan.job.micro_batch
    if _in_rounds(plan):
        uneven = count >= layout.pp and count % (count // layout.pp) and plan.target == "threefold"
        if count < layout.pp or uneven:
            problem = f"{format_many(count, 'microbatch')}: no equal rounds of at least PP {layout.pp}"
            fix = {"job.global_batch": _round_up(plan.job.global_batch, share * layout.pp)}
            plain = {"layout.vpp": 1, "layout.stages": None, "layout.schedule": None}
            smaller = [{"job.micro_batch": 1}] if plan.job.micro_batch > 1 else []
            yield Finding(at="job.global_batch", problem=problem, fixes=[*smaller, fix, plain])
    elif layout.pipeline_schedule == "dualpipev" and count < 2 * layout.pp:
        problem = f"dualpipev needs {2 * layout.pp} microbatches to fill both directions, not {count}"
        fix = {"job.global_batch": 2 * layout.pp * share}
        yield Finding(at="job.global_batch", problem=problem, fix=fix, fixes=[{"layout.schedule": None}])


@rule(severity="warning", rows="PP-VPP PW-COMMSIG")
def pipeline_bubble_small(plan: Plan) -> Iterator[Finding]:
    """The pipeline idles less than a fifth of the step.

    Why: filling and draining cost (PP - 1) / (VPP x microbatches + PP - 1) of the time.
    Confirm: compute it from `threefold show`, or look for idle stages in a trace.
    Fix: more microbatches, or more chunks a rank.
    """
    layout, count = plan.layout, plan.num_microbatches
    if layout.pp == 1 or count == 0:
        return
    idle = (layout.pp - 1) / (layout.vpp * count + layout.pp - 1)
    if idle > 0.2:
        need = -(-4 * (layout.pp - 1) // layout.vpp)
        many, leave = format_many(count, "microbatch"), "leaves" if count == 1 else "leave"
        batch = _round_up(need * layout.dp * plan.job.micro_batch, batch_step(plan))
        yield Finding(
            at="job.global_batch",
            problem=f"{many} on PP {layout.pp} x VPP {layout.vpp} {leave} the pipeline idle {idle:.0%}",
            fixes=[*_more_microbatches(plan, need), {"job.global_batch": batch}],
            advice="or raise layout.vpp",
        )


def _more_microbatches(plan: Plan, need: int) -> Iterator[Changes]:
    """Smaller microbatches, as many as it takes: the batch, and with it the result, stays."""
    job, dp = plan.job, plan.layout.dp
    for size in range(job.micro_batch - 1, 0, -1):
        if job.global_batch % (dp * size) == 0 and job.global_batch // (dp * size) >= need:
            yield {"job.micro_batch": size}
            return


@rule(rows="PP-STATIC")
def pipeline_needs_static_lengths(plan: Plan) -> Iterator[Finding]:
    """With a pipeline every microbatch has the same length.

    Why: stages exchange tensors of a size agreed beforehand; another length reads the wrong bytes or hangs.
    Confirm: job.dynamic_length with layout.pp above 1.
    Fix: pad or pack to job.seq_len.
    """
    if plan.job.dynamic_length and plan.layout.pp > 1:
        yield Finding(
            at="job.dynamic_length",
            problem=f"lengths vary between microbatches, but PP {plan.layout.pp} stages exchange fixed sizes",
            fix={"job.dynamic_length": False},
            advice="pad or pack to job.seq_len",
        )


@rule(severity="warning", rows="RT-FORCE")
def forced_balance_is_benchmark(plan: Plan) -> Iterator[Finding]:
    """Forced balance is for benchmarks; such a run is labeled benchmark-only.

    Why: the router is overruled, so the model learns nothing about routing and load looks perfect.
    Confirm: job.routing in the run's contract.
    Fix: learned routing for training.
    """
    if plan.model.is_moe and plan.job.routing == "forced-balance":
        problem = "forced balance overrules the router: this run is benchmark-only"
        yield Finding(at="job.routing", problem=problem, fix={"job.routing": "learned"})


@rule(rows="RT-LOAD")
def load_needs_a_router(plan: Plan) -> Iterator[Finding]:
    """A load of the experts is predicted where a router chooses them.

    Why: forced balance gives every expert the same, and a dense model has no experts: nothing else can be predicted.
    Confirm: job.load beside job.routing.
    Fix: job.load = "balanced", or learned routing.
    """
    job = plan.job
    if job.load == BALANCED or (plan.model.is_moe and job.routing == "learned"):
        return
    why = f"job.routing is {job.routing}" if plan.model.is_moe else f"{plan.model.name} has no experts"
    fixes = ({"job.routing": "learned"},) if plan.model.is_moe else ()
    problem = f"{shown(job.load)}, but {why}"
    yield Finding(at="job.load", problem=problem, fix={"job.load": BALANCED}, fixes=fixes)


@rule(rows="RT-LOAD")
def load_is_readable(plan: Plan) -> Iterator[Finding]:
    """A file that job.load names holds loads of as many experts as the model has.

    Why: the shares of the experts are what the file is for.
    Confirm: `threefold load FILE`.
    Fix: the folder of a run of this model, or a named workload.
    """
    for found in load_problems(plan.job.load, plan.model.num_experts) if plan.model.is_moe else ():
        yield replace(found, fix={"job.load": BALANCED}, kind="suggestion")


@rule(severity="warning", rows="RT-FORCE CF-MOCK")
def synthetic_data_is_benchmark(plan: Plan) -> Iterator[Finding]:
    """Synthetic data is for benchmarks; such a run is labeled benchmark-only.

    Why: there is nothing to learn in it, and it hides the cost of loading, packing and uneven lengths.
    Confirm: job.data in the run's contract.
    Fix: real data, or the embedded corpus; drawn scenes for a vision-language model.
    """
    if plan.is_synthetic:
        real = "scenes" if plan.is_vlm else "embedded"
        yield Finding(at="job.data", problem="synthetic data: this run is benchmark-only", fix={"job.data": real})


@rule(severity="warning", rows="EX-DROP")
def capacity_is_used(plan: Plan) -> Iterator[Finding]:
    """Capacity settings need experts, a scope needs a factor, and a factor has an effect below experts over top-k.

    Why: without a factor routing is dropless and the scope means nothing. An expert gets at most one copy of every
        token, so that from experts over top-k on nothing is dropped, and all that a factor adds is padding.
    Confirm: job.capacity_factor.
    Fix: delete the setting that has no effect.
    """
    job = plan.job
    if job.capacity_factor is not None and not plan.model.is_moe:
        problem = f"a capacity factor on {plan.model.name}, which has no experts"
        yield Finding(at="job.capacity_factor", problem=problem, fix={"job.capacity_factor": None})
    elif job.capacity_scope != "expert" and job.capacity_factor is None:
        problem = f"capacity per {job.capacity_scope} without a capacity factor"
        yield Finding(at="job.capacity_scope", problem=problem, fix={"job.capacity_scope": None})
    elif job.capacity_factor and (most := plan.expert_capacity_factor) and job.capacity_factor > most:
        problem = f"{job.capacity_factor:g}, where {most:g} lets every expert take every token: nothing is dropped"
        fixes = ({"job.capacity_factor": most},)  # where graphs need the fixed sizes of drop-and-pad
        yield Finding(at="job.capacity_factor", problem=problem, fix={"job.capacity_factor": None}, fixes=fixes)
