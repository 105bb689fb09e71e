"""Memory: a lower bound that refuses what can never fit, and the predicted peak against the chip."""

from collections.abc import Iterator

from threefold.cost.estimate import memory_band
from threefold.cost.fit import state_bytes, surely_fits
from threefold.cost.memory.by_stack import memory
from threefold.findings import Finding
from threefold.plan.plan import Plan
from threefold.remedies.for_memory import ways_that_fit, what_would_fit
from threefold.rules.base import rule
from threefold.rules.layout.batch import can_be_priced
from threefold.units import format_bytes


@rule()
def master_weights_are_a_choice(plan: Plan) -> Iterator[Finding]:
    """Where master weights are left out, the target has a choice of them.

    Why: Megatron's optimizers always update weights in fp32, and FSDP's weights, kept in fp32 in parts, are their own.
    Confirm: knobs.master_weights with target and knobs.data_parallel.
    Fix: keep them.
    """
    if plan.knobs.master_weights:
        return
    if plan.target != "threefold":
        problem = f"{plan.target} always has master weights"
    elif plan.knobs.data_parallel != "zero1":
        problem = f"weights of {plan.knobs.data_parallel} are their own master weights"
    else:
        return
    yield Finding(at="knobs.master_weights", problem=problem, fix={"knobs.master_weights": True})


@rule()
def remainders_need_bf16(plan: Plan) -> Iterator[Finding]:
    """Where master weights are stored as remainders, there are master weights of bf16 weights to split.

    Why: a bf16 weight is the upper half of its fp32 master weight. One in fp16 has other exponents, one in fp32 is
        whole; and FSDP of our engine keeps weights in fp32 alone, of which nothing is stored twice.
    Confirm: knobs.store_param_remainders with knobs.precision, knobs.master_weights and knobs.data_parallel.
    Fix: store whole master weights.
    """
    knobs = plan.knobs
    if not knobs.store_param_remainders:
        return
    if knobs.precision in ("fp16", "fp32"):
        problem = f"weights in {knobs.precision} are no halves of fp32 master weights"
    elif not knobs.master_weights:
        problem = "there are no master weights of which remainders could be stored"
    elif plan.target == "threefold" and knobs.data_parallel != "zero1":
        problem = f"weights of {knobs.data_parallel} are their own master weights, without a bf16 weight beside them"
    else:
        return
    yield Finding(at="knobs.store_param_remainders", problem=problem, fix={"knobs.store_param_remainders": False})


@rule(severity="warning", target="threefold")
def muon_dtype_takes_effect(plan: Plan) -> Iterator[Finding]:
    """A dtype of Muon's GEMMs is named where Muon updates the weights.

    Why: AdamW has no GEMMs; the line changes nothing.
    Confirm: knobs.muon_dtype beside job.optimizer.
    Fix: delete the line.
    """
    if plan.knobs.muon_dtype is not None and plan.job.optimizer != "muon":
        problem = f"job.optimizer is {plan.job.optimizer}, which multiplies no matrices"
        yield Finding(at="knobs.muon_dtype", problem=problem, fix={"knobs.muon_dtype": None})


@rule(severity="warning", target="threefold")
def updates_need_bits(plan: Plan) -> Iterator[Finding]:
    """Narrow weights have master weights to be updated in.

    Why: a weight in bf16 has eight bits; an update below a 512th of it is rounded away, and late in a run most are.
    Confirm: the loss curve of the same run with master weights.
    Fix: keep them, or shard them over data parallel; without them memory and time are those of pure bf16.
    """
    if plan.knobs.master_weights or plan.knobs.precision == "fp32":
        return
    problem = "weights are updated in sixteen bits, where small updates round away"
    yield Finding(at="knobs.master_weights", problem=problem, fix={"knobs.master_weights": True})


@rule(rows="PW-MEMSIG MEM-EST LC-MINGPU")
def states_fit_memory(plan: Plan) -> Iterator[Finding]:
    """Weights, gradients and optimizer states alone fit the memory of a GPU.

    Why: activations come on top, so a plan over this bound cannot run on any day.
    Confirm: the bytes in the message against the chip's memory (`threefold chips`).
    Fix: spread the experts (EP), then the layers (PP); fewer bits; offload last. The message says how many GPUs help.
    """
    need, have = state_bytes(plan), plan.chip.memory_bytes
    if need <= have or not plan.layout.fits_ranks:
        return
    yield Finding(
        at="layout",
        problem=f"weights, gradients and optimizer states need {format_bytes(need)} of {format_bytes(have)} a GPU",
        fixes=ways_that_fit(plan) if can_be_priced(plan) else (),
        otherwise=lambda: what_would_fit(plan) if can_be_priced(plan) else "mend the layout first; then memory is told",
    )


# Published Megatron runs that did fit were predicted up to 15 % over the memory, so that less is no error there.
PUBLISHED_MARGIN = 0.18


def _predictable(plan: Plan) -> bool:
    """Whether the plan is whole enough to be priced; other rules speak where it is not."""
    return can_be_priced(plan) and state_bytes(plan) <= plan.chip.memory_bytes


def _overfull(plan: Plan, surely: bool) -> Iterator[Finding]:
    """A plan that is predicted not to fit: surely, or only at the top of its band."""
    if not _predictable(plan) or surely_fits(plan):
        return
    worst, band, have = memory(plan).worst, memory_band(plan), plan.chip.memory_bytes
    if plan.target == "threefold":
        is_sure = worst.device_bytes_at(-band) > have
    else:
        is_sure = worst.device_bytes > have * (1 + PUBLISHED_MARGIN)
    if is_sure != surely:
        return
    largest, _ = worst.by_size[0]
    yield Finding(
        at="layout",
        problem=(
            f"predicted {format_bytes(worst.device_bytes)} of {format_bytes(have)} on stage {worst.stage} "
            f"(up to {format_bytes(worst.device_bytes_at(band))}), most of it {largest}"
        ),
        fixes=ways_that_fit(plan),
        advice="" if surely or plan.target == "threefold" else "published runs predicted up to 15 % over did fit",
        otherwise=lambda: what_would_fit(plan),
    )


@rule(rows="PW-MEMSIG MEM-EST")
def peak_fits_memory(plan: Plan) -> Iterator[Finding]:
    """The predicted peak is not far over the memory of a GPU.

    Why: a run that is over by more than the prediction's own error ends in its first steps. That error is the band of
        the estimate for our engine; published runs of Megatron fit although predicted up to 15 % over.
    Confirm: `threefold estimate` prints the peak by stage and term.
    Fix: the first step of the ladder that makes it fit: selective recompute, a smaller microbatch, CP, EP, PP, fewer
        bits, full recompute, offload. Where none does, the message says how many GPUs or how short sequences would.
    """
    yield from _overfull(plan, surely=True)


@rule(severity="warning", rows="PW-MEMSIG")
def peak_near_memory(plan: Plan) -> Iterator[Finding]:
    """The predicted peak leaves room for its own error: it fits at the top of the estimate's band.

    Why: within that band a run may fit today and fail with the next skewed batch.
    Confirm: `threefold estimate` prints the peak and its band; a rehearsal is sharper.
    Fix: the first step of the same ladder that makes it fit.
    """
    yield from _overfull(plan, surely=False)
