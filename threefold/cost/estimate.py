"""The estimate of a plan: memory by stage and term, time by term, throughput, the limit that binds, and its error.

The limit that binds is called the wall: memory where it is nearly full, or would be if whole layers were not
recomputed; else the kind of work whose share of the time is largest, over the share from which that kind is a wall.
`threefold estimate` and `plan` and the search call `estimate(plan)`; it takes about a millisecond and never changes its
input. `Estimate.to_json()` is what `--json` prints.

Whether a plan fits is judged at the top of the memory's band for our own engine, whose tensors are counted one by one
and held to rehearsals. For Megatron Bridge it is the middle: published runs were predicted up to 15 % too high.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from threefold.cost.expert_load import is_uneven, load_band, load_of, per_thousand_steps
from threefold.cost.memory.by_stack import memory, out_of_memory_chance
from threefold.cost.memory.stage_memory import Memory
from threefold.cost.rates import Calibration, Rates, calibration, peak_flops, rates_of
from threefold.cost.time.delta_chunks import MEASURED_HEADS, delta_heads
from threefold.cost.time.step import StepTime, step_time
from threefold.notebook import ShownAsTable
from threefold.plan.plan import Plan
from threefold.spec.flops import flops_per_token
from threefold.spec.model import GqaSpec
from threefold.units import format_bytes, format_number

# The wall that each term of time belongs to.
WALLS = {
    "communication": ("tp", "cp", "ep", "dp", "bubble"),
    "compute": ("gemm", "experts", "attention", "elementwise", "quantize", "recompute", "loss", "vision", "optimizer"),
    "host": ("host", "other", "offload"),
}
MEMORY_BOUND = 0.92  # fraction of the chip's memory beyond which memory is the wall
WALL_SHARES = {"communication": 0.35, "compute": 0.6, "host": 0.25}  # of the step, from which a kind of work is a wall


@dataclass(frozen=True, slots=True)
class UnevenLoad:
    """What the load of a plan costs. `to_json` prints the fields under these names."""

    load: str
    skew: float  # rows of the largest expert rank over the mean, in a layer
    largest_rows: float  # the same of all layers that are held, in a rare step: memory is that of such a rank
    dropped: float  # of the token copies, above the capacity of their experts
    overflows: float  # steps whose rows do not fit a capacity per rank, as a part of all
    balanced_seconds: float  # of a step, as forced balance would promise
    out_of_memory: float  # the chance of running out of memory in a thousand steps, at the middle of the band

    def lines(self, step_seconds: float) -> Iterator[str]:
        """What it costs, and what forced balance would have promised."""
        yield (
            f"{self.load}: the largest expert rank has {self.skew:.3g} times the mean rows; forced balance would "
            f"promise {format_number(self.balanced_seconds)} s a step, "
            f"{step_seconds / self.balanced_seconds:.3g} times as fast"
        )
        yield (
            f"memory is for {self.largest_rows:.3g} times the mean rows; chance of running out in a thousand steps: "
            f"{self.out_of_memory:.2g}"
        )
        if self.dropped:
            yield f"{self.dropped:.1%} of the token copies are dropped: their experts are at their capacity"
        if self.overflows:
            yield f"in {self.overflows:.1%} of the steps the rows of some rank do not fit its buffers"


@dataclass(frozen=True, slots=True, repr=False)
class Estimate(ShownAsTable):
    """What a plan is predicted to need and to reach."""

    memory: Memory
    time: StepTime
    tokens_per_second_per_gpu: float
    model_tflops_per_gpu: float
    mfu: float
    mfu_peak: str  # the chip and the format whose dense peak MFU is measured against
    peak_tflops: float  # that peak
    wall: str  # "memory", or `time_wall`
    time_wall: str  # the first name of `wall_scores`
    fits: bool  # whether the fullest stage fits the chip's memory, as `fit_band` judges it
    headroom_bytes: float  # memory that is left at the middle of the band, negative where the plan does not fit
    seconds_band: tuple[float, float]  # range of the step time
    bytes_band: tuple[float, float]  # range of the peak of memory
    device_bytes_band: tuple[float, float]  # the same with what the device holds outside the allocator
    calibrated: bool  # whether measured runs like this one are behind the rates
    basis: str  # where the rates come from
    assumed: tuple[str, ...]  # what was assumed of kernels that no published run tells
    uneven: UnevenLoad | None = None  # where the load of the plan is not balanced

    def summary(self) -> str:
        fits = "fits" if self.fits else "does not fit"
        return (
            f"{self.time.step_seconds:.4g} s a step, {self.model_tflops_per_gpu:.0f} TFLOP/s a GPU, "
            f"{format_bytes(self.memory.device_bytes)} ({fits}), wall: {self.wall}"
        )

    def table(self) -> tuple[list[str], list[list[str]]]:
        """What a step reaches and needs, then its terms of time, the largest first."""
        low, high = self.seconds_band
        worst, by_time = self.memory.worst, sorted(self.time.terms.items(), key=lambda term: -term[1])
        rows = [
            ["seconds a step", f"{self.time.step_seconds:.4g}", f"{low:.4g} to {high:.4g}"],
            ["tokens/s a GPU", f"{self.tokens_per_second_per_gpu:,.0f}", self.basis],
            ["model TFLOP/s a GPU", f"{self.model_tflops_per_gpu:.0f}", f"MFU {self.mfu:.1%} of {self.mfu_peak}"],
            ["memory", format_bytes(worst.device_bytes), f"stage {worst.stage}, {worst.moment}"],
            ["headroom", format_bytes(self.headroom_bytes), "fits" if self.fits else "does not fit"],
            *([f"time: {name}", f"{seconds:.4g} s", ""] for name, seconds in by_time if seconds),
        ]
        return ["", "value", "of"], rows

    def to_json(self) -> dict[str, Any]:
        worst = self.memory.worst
        return {
            "level": "estimated",
            "memory": {
                "peak_bytes": round(self.memory.peak_bytes),
                "device_bytes": round(self.memory.device_bytes),
                "headroom_bytes": round(self.headroom_bytes),
                "at": f"stage {worst.stage}: {worst.moment}",
                "stages": [
                    {
                        "stage": stage.stage,
                        "peak_bytes": round(stage.peak_bytes),
                        "device_bytes": round(stage.device_bytes),
                        "moment": stage.moment,
                        "terms": {name: round(value) for name, value in stage.terms.items()},
                        "reserve": {name: round(value) for name, value in stage.reserve.items()},
                    }
                    for stage in self.memory.stages
                ],
            },
            "time": {"step_seconds": self.time.step_seconds, "stage": self.time.stage, "terms": self.time.terms},
            "tokens_per_second_per_gpu": self.tokens_per_second_per_gpu,
            "model_tflops_per_gpu": self.model_tflops_per_gpu,
            "mfu": {"value": self.mfu, "peak": self.mfu_peak, "peak_tflops": self.peak_tflops},
            "wall": self.wall,
            "time_wall": self.time_wall,
            "fits": self.fits,
            "band": {
                "step_seconds": list(self.seconds_band),
                "peak_bytes": list(self.bytes_band),
                "device_bytes": list(self.device_bytes_band),
            },
            "calibrated": self.calibrated,
            "basis": self.basis,
            "assumed": list(self.assumed),
            **({"uneven_load": asdict(self.uneven)} if self.uneven else {}),
        }


def estimate(plan: Plan, rates: Rates | None = None, skew: float | None = None) -> Estimate:
    """Predict one plan. `rates` replace the shipped calibration; `skew` is the busiest expert rank's load over the
    balanced load, in place of the load of the plan."""
    basis = calibration(plan.target)
    used = rates or rates_of(plan)
    need = memory(plan, skew)
    spent = step_time(plan, used, skew)
    per_gpu = plan.tokens_per_step / spent.step_seconds / plan.layout.gpus
    tflops = (
        per_gpu * flops_per_token(plan.model, plan.job.seq_len, plan.mtp, plan.layout.tp, plan.stack.release) / 1e12
    )
    top = peak_flops(plan.chip, plan.knobs.precision) / 1e12
    headroom = plan.chip.memory_bytes - need.device_bytes
    known = _is_calibrated(plan, basis, used)
    seconds_band, bytes_band = _time_band(plan, basis, known), memory_band(plan, used)
    worst, time_wall = need.worst, next(iter(wall_scores(spent)))
    return Estimate(
        memory=need,
        time=spent,
        tokens_per_second_per_gpu=per_gpu,
        model_tflops_per_gpu=tflops,
        mfu=tflops / top,
        mfu_peak=_peak_name(plan),
        peak_tflops=top,
        wall="memory" if memory_binds(plan, need) else time_wall,
        time_wall=time_wall,
        fits=worst.device_bytes_at(fit_band(plan, used)) <= plan.chip.memory_bytes,
        headroom_bytes=headroom,
        seconds_band=(spent.step_seconds / (1 + seconds_band), spent.step_seconds * (1 + seconds_band)),
        bytes_band=(need.peak_bytes * (1 - bytes_band), need.peak_bytes * (1 + bytes_band)),
        device_bytes_band=(worst.device_bytes_at(-bytes_band), worst.device_bytes_at(bytes_band)),
        calibrated=known,
        basis=_basis(plan, basis, known),
        assumed=tuple(_assumed(plan)),
        uneven=_uneven_load(plan, used) if skew is None and is_uneven(plan) else None,
    )


def _uneven_load(plan: Plan, used: Rates) -> UnevenLoad:
    load, layout, factor = load_of(plan), plan.layout, plan.job.capacity_factor
    overflows = load.chance_above(factor, layout.edp) if plan.has_rank_capacity and factor else 0.0
    chance = per_thousand_steps(out_of_memory_chance(plan))
    balanced = step_time(plan, used, 1.0).step_seconds
    return UnevenLoad(plan.job.load, load.skew, load.largest, load.dropped, overflows, balanced, chance)


def gain(plan: Plan, other: Plan) -> float:
    """By how much faster `other` is predicted to train than `plan`, as a fraction."""
    seconds = [step_time(one, rates_of(one)).step_seconds for one in (plan, other)]
    return seconds[0] / seconds[1] * other.tokens_per_step / plan.tokens_per_step - 1


def time_band(plan: Plan) -> float:
    """The relative error of the step time, wider where no run like the plan was seen."""
    basis = calibration(plan.target)
    return _time_band(plan, basis, _is_calibrated(plan, basis, rates_of(plan)))


def _time_band(plan: Plan, basis: Calibration, known: bool) -> float:
    if not known:
        return basis.wide_band + load_band(plan)
    return (basis.band if plan.chip.measured_error is None else plan.chip.measured_error) + load_band(plan)


def memory_band(plan: Plan, used: Rates | None = None) -> float:
    """The relative error of the peak of memory.

    It is twice as wide where no run like the plan was seen. The memory of our own engine has nothing to do with runs:
    rehearsals of plans of every kind are behind its band.
    """
    basis = calibration(plan.target)
    sure = plan.target == "threefold" or _is_calibrated(plan, basis, used or rates_of(plan))
    return basis.memory_band * (1 if sure else 2)


def fit_band(plan: Plan, used: Rates | None = None) -> float:
    """How much higher than predicted the peak is taken to be where a plan is said to fit."""
    return memory_band(plan, used) if plan.target == "threefold" else 0.0


def memory_binds(plan: Plan, need: Memory) -> bool:
    """Whether little memory is left, or would be left if layers were not recomputed whole."""
    most = MEMORY_BOUND * plan.chip.memory_bytes
    if need.device_bytes > most or not plan.full_recompute:
        return need.device_bytes > most
    bare = replace(plan.knobs, recompute=(), recompute_method=None, recompute_layers=None, recompute_save=())
    return memory(replace(plan, knobs=bare)).device_bytes > most


def wall_scores(spent: StepTime) -> dict[str, float]:
    """The share of each kind of work over the share from which it is a wall, the largest first."""
    shares = {wall: sum(spent.terms[term] for term in terms) / spent.step_seconds for wall, terms in WALLS.items()}
    scores = {wall: share / WALL_SHARES[wall] for wall, share in shares.items()}
    return dict(sorted(scores.items(), key=lambda score: -score[1]))


def _assumed(plan: Plan) -> Iterator[str]:
    """What was assumed of links and kernels, in words."""
    measured_gpus = plan.chip.measured_gpus if plan.chip.measured_error is not None else 1
    if plan.target == "threefold" and plan.layout.gpus > measured_gpus and plan.chip.architecture != "cpu":
        yield "exchanges run at the links' bandwidth with the efficiency of published Megatron Bridge runs: unmeasured"
    if is_uneven(plan):
        yield f"experts are loaded as {plan.job.load} says, and tokens choose independently of each other"
    heads = delta_heads(plan)
    if heads not in (0, MEASURED_HEADS):
        yield f"the delta rule takes as long as its heads, {heads:g} a microbatch: measured for {MEASURED_HEADS} alone"
    spec = plan.model.attention
    if not isinstance(spec, GqaSpec) or not spec.sinks:
        return
    if plan.target == "threefold":
        yield "attention with sinks runs in the flash kernel, which writes out no scores"
    elif not plan.knobs.fp8_attention:
        yield (
            "attention with sinks runs in a fused kernel, which writes out no scores; what published runs in 16 bits "
            "lost at 4K is charged to every token"
        )


def _peak_name(plan: Plan) -> str:
    """The peak behind MFU, in words. A format that the chip lacks is emulated in bf16."""
    found, _ = plan.chip.dense_peak(plan.knobs.precision)
    return f"{plan.chip.name} {found} {'measured' if plan.cluster.measured else 'dense'}"


def _basis(plan: Plan, basis: Calibration, known: bool) -> str:
    """Where the rates and the chip's facts come from, in words."""
    measured = plan.cluster.measured
    origin = measured.sources.get("measured", "undated") if measured else ""
    if known and plan.chip.measured_error is not None:
        return f"{origin}, error {plan.chip.measured_error:.0%}"
    said = basis.provenance if known else f"uncalibrated here: {basis.provenance}"
    return f"{said}; chip file: {origin}" if measured else said


def _is_calibrated(plan: Plan, basis: Calibration, used: Rates) -> bool:
    """Whether measured runs like this one are behind the rates: those of the user's machine, or those of the stack.

    Rates or facts that somebody wrote into a chip file are nearer to a machine, but no run has tested them.
    """
    if plan.chip.measured_error is not None and plan.target == "threefold":
        is_measured = plan.knobs.precision in plan.chip.measured_precisions
        return is_measured and plan.layout.gpus <= plan.chip.measured_gpus
    chip, precision, dispatcher = plan.chip.name, plan.knobs.precision, plan.knobs.dispatcher
    is_catalogued = plan.cluster.measured is None and plan.cluster.own is None
    shipped = is_catalogued and used == basis.rates
    near = f"{chip}:{precision}" in basis.seen and plan.model.is_moe
    near = near and (plan.layout.ep == 1 or dispatcher in basis.seen) and plan.layout.gpus <= basis.most_gpus
    return shipped and near and plan.job.seq_len <= basis.longest and plan.layout.cp == 1
