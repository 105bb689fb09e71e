"""Precision by platform."""

from collections.abc import Iterator

from threefold.findings import Finding
from threefold.plan.plan import Plan
from threefold.rules.base import rule
from threefold.spec.chips import NATIVE_FORMATS
from threefold.spec.stacks import PRECISION


def _native(plan: Plan) -> bool:
    return plan.knobs.precision in NATIVE_FORMATS[plan.chip.architecture]


@rule(rows="FP-MAP", target="megatron-bridge", follows="Transformer Engine recipes by compute capability")
def precision_runs_on_chip(plan: Plan) -> Iterator[Finding]:
    """The chip multiplies the chosen format.

    Why: FP8 needs Hopper, MXFP8 and NVFP4 need Blackwell; Transformer Engine refuses them elsewhere.
    Confirm: `threefold chips` lists the peak rates by format.
    Fix: the platform's starting point: FP8 blockwise on Hopper, MXFP8 on Blackwell.
    """
    if not _native(plan):
        default = PRECISION[plan.chip.architecture]
        problem = f"{plan.cluster.chip} has no {plan.knobs.precision} units"
        yield Finding(at="knobs.precision", problem=problem, fix={"knobs.precision": default.value})


@rule(severity="warning", rows="FP-EMU", target="threefold")
def precision_is_emulated(plan: Plan) -> Iterator[Finding]:
    """A format the chip lacks is emulated: right numbers, no speed.

    Why: emulation rounds as the format does and multiplies in a wider one.
    Confirm: `threefold chips` lists the peak rates by format.
    Fix: the platform's starting point when speed matters.
    """
    if not _native(plan):
        default = PRECISION[plan.chip.architecture]
        problem = f"{plan.knobs.precision} is emulated on {plan.cluster.chip}"
        yield Finding(at="knobs.precision", problem=problem, fix={"knobs.precision": default.value})


@rule(severity="warning", rows="FP-MAP")
def nvfp4_after_stable(plan: Plan) -> Iterator[Finding]:
    """NVFP4 comes after a stable BF16 or FP8 run.

    Why: four bits need stochastic rounding and Hadamard transforms to train; when loss misbehaves there must
        be a run to compare with.
    Confirm: a run of the same job in bf16 or mxfp8 whose loss is sound.
    Fix: MXFP8 first on Blackwell.
    """
    if plan.knobs.precision == "nvfp4":
        problem = "nvfp4 is for speed after the bf16 or fp8 path is stable"
        yield Finding(at="knobs.precision", problem=problem, fix={"knobs.precision": "mxfp8"})


@rule(severity="warning", rows="FP-MFU")
def mfu_with_its_peak(plan: Plan) -> Iterator[Finding]:
    """A low-precision benchmark is judged by throughput, with MFU beside it and its peak named.

    Why: FP8 doubles the peak but not the whole step, so MFU falls while the run gets faster; attention and
        the output layer still run in bf16.
    Confirm: compare tokens per second of both precisions.
    Fix: report absolute throughput first.
    """
    if plan.low_precision and (plan.job.routing == "forced-balance" or plan.is_synthetic):
        yield Finding(
            at="knobs.precision",
            problem=f"a benchmark in {plan.knobs.precision}: MFU against one peak misleads",
            advice="report tokens/s and TFLOP/s, and name the peak beside MFU",
        )


@rule(severity="warning", rows="FP-PAD FP-BLOCK")
def fp8_knobs_need_fp8(plan: Plan) -> Iterator[Finding]:
    """FP8 knobs are set only with a low precision.

    Why: without it they have no effect.
    Confirm: knobs.precision.
    Fix: delete them.
    """
    if plan.low_precision:
        return
    for name in ("fp8_params", "fp8_attention", "fp8_output", "router_padding"):
        if getattr(plan.knobs, name):
            problem = f"{name} with precision {plan.knobs.precision}"
            yield Finding(at=f"knobs.{name}", problem=problem, fix={f"knobs.{name}": None})
