"""The estimate of a plan: memory by stage and term, time by term, throughput, the limit that binds, and its error.

The limit that binds is called the wall: memory where it is nearly full or whole layers are recomputed, else the kind of
work that takes most of the time. `threefold estimate` and `plan` and the search call `estimate(plan)`; it takes about a
millisecond and never changes its input. `Estimate.to_json()` is what `--json` prints.
"""

from dataclasses import dataclass
from typing import Any

from threefold.cost.memory.by_stack import memory
from threefold.cost.memory.stage_memory import Memory
from threefold.cost.rates import Calibration, Rates, calibration, gemm_format, peak_flops
from threefold.cost.time.step import StepTime, step_time
from threefold.plan.plan import Plan
from threefold.spec.flops import flops_per_token

# The wall that each term of time belongs to.
WALLS = {
    "communication": ("tp", "cp", "ep", "dp", "bubble"),
    "compute": ("gemm", "experts", "attention", "elementwise", "quantise", "recompute", "loss", "vision", "optimizer"),
    "host": ("host", "other", "offload"),
}
MEMORY_BOUND = 0.92  # fraction of the chip's memory beyond which memory is the wall


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a plan is predicted to need and to reach."""

    memory: Memory
    time: StepTime
    tokens_per_second_per_gpu: float
    model_tflops_per_gpu: float
    mfu: float
    mfu_peak: str  # the chip and the format whose dense peak MFU is measured against
    peak_tflops: float  # that peak
    wall: str  # "memory", or the name in `WALLS` with the most seconds
    fits: bool  # whether the stage with the highest peak fits the chip's memory
    headroom_bytes: float  # memory that is left, negative where the plan does not fit
    seconds_band: tuple[float, float]  # range of the step time
    bytes_band: tuple[float, float]  # range of the peak of memory
    calibrated: bool  # whether published runs like this one are behind the rates
    basis: str  # where the rates come from

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
            "time": {"step_seconds": self.time.step_seconds, "terms": self.time.terms},
            "tokens_per_second_per_gpu": self.tokens_per_second_per_gpu,
            "model_tflops_per_gpu": self.model_tflops_per_gpu,
            "mfu": {"value": self.mfu, "peak": self.mfu_peak, "peak_tflops": self.peak_tflops},
            "wall": self.wall,
            "fits": self.fits,
            "band": {"step_seconds": list(self.seconds_band), "peak_bytes": list(self.bytes_band)},
            "calibrated": self.calibrated,
            "basis": self.basis,
        }


def estimate(plan: Plan, rates: Rates | None = None, skew: float = 1.0) -> Estimate:
    """Predict one plan. `rates` replace the shipped calibration; `skew` is the busiest expert rank's load over the
    balanced load."""
    basis = calibration(plan.target)
    used = rates or basis.rates
    need = memory(plan, skew)
    spent = step_time(plan, used, skew)
    per_gpu = plan.tokens_per_step / spent.step_seconds / plan.layout.gpus
    tflops = (
        per_gpu * flops_per_token(plan.model, plan.job.seq_len, plan.mtp, plan.layout.tp, plan.stack.release) / 1e12
    )
    top = peak_flops(plan.chip, plan.knobs.precision) / 1e12
    headroom = plan.chip.memory_bytes - need.device_bytes
    known, time_band, memory_band = _confidence(plan, basis, used)
    return Estimate(
        memory=need,
        time=spent,
        tokens_per_second_per_gpu=per_gpu,
        model_tflops_per_gpu=tflops,
        mfu=tflops / top,
        mfu_peak=_peak_name(plan),
        peak_tflops=top,
        wall=_wall(plan, need, spent),
        fits=headroom >= 0,
        headroom_bytes=headroom,
        seconds_band=(spent.step_seconds / (1 + time_band), spent.step_seconds * (1 + time_band)),
        bytes_band=(need.peak_bytes * (1 - memory_band), need.peak_bytes * (1 + memory_band)),
        calibrated=known,
        basis=_basis(plan, basis, known),
    )


def _wall(plan: Plan, need: Memory, spent: StepTime) -> str:
    """What limits the plan: memory where little is left or layers are recomputed whole, else the largest part of
    time."""
    if need.device_bytes > MEMORY_BOUND * plan.chip.memory_bytes or plan.full_recompute:
        return "memory"
    seconds = {wall: sum(spent.terms[term] for term in terms) for wall, terms in WALLS.items()}
    return max(seconds, key=seconds.__getitem__)


def _peak_name(plan: Plan) -> str:
    """The peak behind MFU, in words. A format that the chip lacks is emulated in bf16."""
    wanted = gemm_format(plan.knobs.precision)
    found = wanted if wanted in plan.chip.peak_flops else "bf16"
    return f"{plan.cluster.chip} {found} {'measured' if plan.cluster.measured else 'dense'}"


def _basis(plan: Plan, basis: Calibration, known: bool) -> str:
    """Where the rates and the chip's facts come from, in words."""
    measured = plan.cluster.measured
    said = basis.provenance if known else f"uncalibrated here: {basis.provenance}"
    return f"{said}; chip file: {measured.sources.get('measured', 'undated')}" if measured else said


def _confidence(plan: Plan, basis: Calibration, used: Rates) -> tuple[bool, float, float]:
    """Whether runs like this one were seen, and the relative bands of time and memory, twice as wide where none was.

    Rates or facts measured on the user's machine are nearer to it, but no published run has tested them.
    """
    chip, precision, dispatcher = plan.cluster.chip, plan.knobs.precision, plan.knobs.dispatcher
    key = f"{chip}:{precision}"
    shipped = plan.cluster.measured is None and used == basis.rates
    near = key in basis.seen and plan.model.is_moe and (plan.layout.ep == 1 or dispatcher in basis.seen)
    long = plan.job.seq_len > 16384 or plan.layout.cp > 1  # no published row with known settings is longer
    if basis.rows and near and shipped and not long:
        return True, basis.band, basis.memory_band
    return False, 2 * basis.band, 2 * basis.memory_band
