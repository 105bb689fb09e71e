"""Precision by platform."""

from collections.abc import Iterator

from threefold.cost.format_support import experts_are_emulated, is_emulated, low_precisions
from threefold.findings import Finding
from threefold.plan.plan import Plan
from threefold.rules.base import divisors, rule, without
from threefold.spec.candidates import low_formats
from threefold.spec.chips import NATIVE_FORMATS
from threefold.spec.model import GqaSpec, MlaSpec
from threefold.spec.stacks import FUSED_DIM, FUSED_EXPERTS, FUSED_WIDTH, SCALE_BLOCKS

FP8_KNOBS = ("fp8_params", "fp8_attention", "fp8_output", "fp8_dispatch", "router_padding")


def _native(plan: Plan) -> bool:
    return plan.knobs.precision in NATIVE_FORMATS[plan.chip.architecture]


@rule(rows="FP-MAP", target="megatron-bridge", follows="Transformer Engine recipes by compute capability")
def precision_runs_on_chip(plan: Plan) -> Iterator[Finding]:
    """The chip multiplies the chosen format.

    Why: FP8 needs Hopper, MXFP8 and NVFP4 need Blackwell; Transformer Engine refuses them elsewhere.
    Confirm: `threefold chips` lists the peak rates by format.
    Fix: bf16, or another format that the chip multiplies.
    """
    if not _native(plan) and plan.knobs.precision != "fp8-rowwise":  # megatron-has-precision
        problem = f"{plan.chip.name} has no {plan.knobs.precision} units"
        fixes = [{"knobs.precision": name} for name in (*low_formats(plan.chip)[:1], "bf16")]
        yield Finding(at="knobs.precision", problem=problem, fixes=fixes)


@rule(severity="note", rows="FP-MAP FP-BF16FIRST FP-CAND FP-PROOF FP-HOSTSHIFT")
def low_precision_after_bf16(plan: Plan) -> Iterator[Finding]:
    """FP8 is a candidate that follows a sound BF16 run of the same contract.

    Why: scales and rounding change the training, so that there must be a run to compare losses with; and a gain is
        shown by step time, for the wall moves to host and communication. Recipes that a chip multiplies are legal and
        not ranked. Until 2026-08-01 upstream began with blockwise FP8 on Hopper and MXFP8 on Blackwell.
    Confirm: losses and step times of both runs; the low-precision kernels in a trace.
    Fix: bf16 first; stack.measured=precision where that run was sound.
    """
    native = _native(plan) and not (plan.target == "threefold" and is_emulated(plan))
    if plan.low_precision and plan.knobs.precision != "nvfp4" and native and "precision" not in plan.stack.measured:
        yield Finding(
            at="knobs.precision",
            problem=f"{plan.knobs.precision} follows a sound bf16 run of the same job",
            advice="stack.measured=precision where that run was sound; step time decides, not the peak",
        )


_MANY_REDUCED = 128  # ranks of a ring, from which sums of sixteen bits lose too much (Bridge's performance guide)


@rule(severity="note", rows="TD-BF16RED")
def narrow_reduction_over_many(plan: Plan) -> Iterator[Finding]:
    """Gradients are reduced in fp32 over 128 ranks and more.

    Why: a ring adds them one after the other, and each sum in bf16 rounds. Below that BF16 is usually safe, and a
        switch that reduces (SHARP) adds in fp32 (Bridge's performance guide, read 2026-08-22).
    Confirm: losses of both; NCCL_DEBUG=INFO names ring, tree or SHARP.
    Fix: knobs.grad_dtype fp32, where the memory is there.
    """
    ranks = plan.layout.dp * plan.layout.cp
    if plan.knobs.grad_dtype == "bf16" and ranks >= _MANY_REDUCED:
        problem = f"gradients are reduced in bf16 over {ranks} ranks"
        yield Finding(at="knobs.grad_dtype", problem=problem, fix={"knobs.grad_dtype": "fp32"})


@rule(severity="warning", rows="FP-EMU", target="threefold")
def precision_is_emulated(plan: Plan) -> Iterator[Finding]:
    """What the chip or the engine has no kernels for is emulated: right numbers, no speed.

    Why: emulation rounds as the format does and multiplies in a wider one. Experts have kernels of their own for
        fp8-blockwise and fp8-rowwise on Hopper, without biases and in widths that are multiples of 128.
    Confirm: `threefold chips` lists the peak rates by format, docs/reference/precision.md who multiplies on which chip.
    Fix: a format with kernels when speed matters, or bf16 where there is none.
    """
    if is_emulated(plan):
        problem = f"{plan.knobs.precision} is emulated on {plan.chip.name}"
    elif experts_are_emulated(plan):
        problem = f"{_what_is_emulated(plan)} on {plan.chip.name}"
    else:
        return
    names = [name for name in (*low_precisions(plan)[:1], "bf16") if name != plan.knobs.precision]
    yield Finding(at="knobs.precision", problem=problem, fixes=[{"knobs.precision": name} for name in names])


def _what_is_emulated(plan: Plan) -> str:
    name, moe, etp = plan.knobs.precision, plan.model.moe, plan.layout.etp
    if moe is None or name not in FUSED_EXPERTS:
        return f"experts in {name} are emulated"
    if moe.bias:
        return f"experts with biases in {name} are emulated"
    if plan.model.dim % FUSED_DIM:
        return f"experts of a model {plan.model.dim} wide, no multiple of {FUSED_DIM}, in {name} are emulated"
    over = f" over ETP {etp}" if etp > 1 else ""
    return f"experts {moe.expert_dim} wide{over}, no multiple of {FUSED_WIDTH}, in {name} are emulated"


@rule(severity="warning", rows="FP-MAP")
def nvfp4_after_stable(plan: Plan) -> Iterator[Finding]:
    """NVFP4 comes after a stable BF16 or FP8 run.

    Why: four bits need stochastic rounding and Hadamard transforms to train; when loss misbehaves there must
        be a run to compare with.
    Confirm: a run of the same job in bf16 or mxfp8 whose loss is sound.
    Fix: MXFP8 first on Blackwell.
    """
    runs = _native(plan) or plan.target == "threefold"  # elsewhere precision-runs-on-chip speaks
    if plan.knobs.precision == "nvfp4" and runs and "precision" not in plan.stack.measured:
        problem = "nvfp4 is for speed after the bf16 or fp8 path is stable"
        advice = "stack.measured=precision where that run was sound"
        fixes = [{"knobs.precision": name} for name in (*low_precisions(plan)[:1], "bf16") if name != "nvfp4"]
        yield Finding(at="knobs.precision", problem=problem, fixes=fixes, advice=advice)


@rule(severity="warning", rows="FP-MFU")
def mfu_with_its_peak(plan: Plan) -> Iterator[Finding]:
    """A low-precision benchmark is judged by throughput, with MFU beside it and its peak named.

    Why: FP8 doubles the peak but not the whole step, so MFU falls while the run gets faster; attention and, without
        knobs.fp8_output, the output layer still run in bf16.
    Confirm: compare tokens per second of both precisions.
    Fix: report absolute throughput first.
    """
    forced = plan.model.is_moe and plan.job.routing == "forced-balance"
    if plan.low_precision and (forced or plan.is_synthetic):
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
    # Others speak of these: engine-has-a-choice; router-padding-needs-quantization and fp8-output-needs-mxfp8.
    elsewhere = ("router_padding",) if plan.target == "threefold" else ("router_padding", "fp8_output")
    for name in without(FP8_KNOBS, *elsewhere):
        if getattr(plan.knobs, name):
            problem = f"{name} with precision {plan.knobs.precision}"
            yield Finding(at=f"knobs.{name}", problem=problem, fix={f"knobs.{name}": None})


@rule(rows="FP-BLOCK FP-MX FP-NV4", target="threefold")
def cuts_hold_whole_blocks(plan: Plan) -> Iterator[Finding]:
    """Where ranks cut a width, each holds whole blocks of numbers that share a scale.

    Why: a block that two ranks share would be rounded otherwise than on one rank, and FP8 kernels take whole blocks.
    Confirm: the width in the message over the degree, against the block (fp8-blockwise 128, mxfp8 32, nvfp4 16).
    Fix: a smaller degree, or fp8-rowwise, which has no blocks along a width.
    """
    block = SCALE_BLOCKS.get(plan.knobs.precision)
    if block is None:
        return
    for axis, widths in (("tp", dict(_tensor_widths(plan))), ("etp", dict(_expert_widths(plan)))):
        degree = plan.layout.degree(axis)
        broken = [name for name, width in widths.items() if _splits(width, degree, block)]
        if degree > 1 and broken:
            fitting = [d for d in divisors(degree) if not any(_splits(width, d, block) for width in widths.values())]
            yield Finding(
                at=f"layout.{axis}",
                problem=f"{', '.join(f'{name} {widths[name]}' for name in broken)} over {degree} ranks: "
                f"no whole blocks of {block}",
                fixes=[
                    *({f"layout.{axis}": d} for d in reversed(fitting)),
                    {"knobs.precision": "fp8-rowwise"},
                    {"knobs.precision": "bf16"},
                ],
            )


def _splits(width: int, degree: int, block: int) -> bool:
    return degree > 1 and width % (degree * block) != 0


def _tensor_widths(plan: Plan) -> Iterator[tuple[str, int]]:
    model, spec, moe = plan.model, plan.model.attention, plan.model.moe
    if isinstance(spec, GqaSpec):
        yield "query width", spec.q_dim
        # Past the number of key/value heads, ranks hold one each.
        yield "key width", spec.kv_dim * max(1, plan.layout.tp // spec.num_kv_heads)
    elif isinstance(spec, MlaSpec):
        yield "query width", spec.num_heads * spec.qk_dim
        yield "key and value width", spec.num_heads * (spec.nope_dim + spec.v_dim)
        yield "value width", spec.num_heads * spec.v_dim
    if model.delta is not None:
        yield "delta width", 2 * model.delta.keys + 2 * model.delta.values
        yield "delta values", model.delta.values
    if model.mamba is not None:
        yield "Mamba width", model.mamba.projected_dim
        yield "Mamba inner width", model.mamba.inner_dim
    if any(layer.ffn == "dense" for layer in model.layers):
        yield "feed-forward width", model.dense_dim
    if moe is not None and moe.num_shared:
        yield "shared expert width", moe.shared_width


def _expert_widths(plan: Plan) -> Iterator[tuple[str, int]]:
    if plan.model.moe is not None:
        yield "expert width", plan.model.moe.expert_dim


@rule(rows="FP-BLOCK", target="threefold")
def tp_overlap_in_sixteen_bits(plan: Plan) -> Iterator[Finding]:
    """The rings of `tp_overlap` multiply in sixteen bits.

    Why: a ring multiplies a piece of the sequence while the next one travels; its products are written for whole
        weights in the model's own dtype.
    Confirm: knobs.tp_overlap and knobs.precision.
    Fix: the overlap off.
    """
    if plan.knobs.tp_overlap and plan.low_precision:
        problem = f"tp_overlap with {plan.knobs.precision}"
        yield Finding(at="knobs.tp_overlap", problem=problem, fix={"knobs.tp_overlap": None})


@rule(rows="FP-BLOCK DI-A2A", target="threefold")
def fp8_dispatch_by_alltoall(plan: Plan) -> Iterator[Finding]:
    """FP8 rows travel by all-to-all, in whole blocks of 128.

    Why: the flex dispatchers are written for bf16 rows here; and a row is rounded in blocks of 128 numbers.
    Confirm: knobs.dispatcher and the model's width.
    Fix: alltoall, or rows in bf16.
    """
    if not plan.knobs.fp8_dispatch:
        return
    if plan.knobs.dispatcher in ("deepep", "hybridep"):
        problem = f"fp8_dispatch with {plan.knobs.dispatcher}"
        yield Finding(at="knobs.dispatcher", problem=problem, fix={"knobs.dispatcher": "alltoall"})
    if plan.model.dim % 128:
        problem = f"rows of {plan.model.dim} numbers are no whole blocks of 128"
        yield Finding(at="knobs.fp8_dispatch", problem=problem, fix={"knobs.fp8_dispatch": None})


@rule(rows="FP-BLOCK", target="threefold")
def fp8_output_fits_head(plan: Plan) -> Iterator[Finding]:
    """The output layer is multiplied in FP8 where its format, its bias and its width allow it.

    Why: a bias of the head is a column of its matrix here, which would be rounded among weights. Gradients of a softmax
        span five orders of magnitude, more than four bits and their scales do. Kernels want the vocabulary of a rank in
        multiples of 16.
    Confirm: knobs.precision, the model's vocabulary, layout.tp.
    Fix: the output layer in bf16.
    """
    if not plan.knobs.fp8_output or not plan.low_precision:
        return
    width = -(-plan.model.vocab // plan.layout.tp)
    problem = None
    if plan.knobs.precision == "nvfp4":
        problem = "the output layer in nvfp4: small probabilities would be lost"
    elif plan.model.head_bias:
        problem = f"the output layer of {plan.model.name} has a bias"
    elif not is_emulated(plan) and (width % 16 or plan.model.vocab % 16):
        problem = f"a vocabulary of {plan.model.vocab} over {plan.layout.tp} ranks: {width} columns, no multiple of 16"
    if problem is not None:
        yield Finding(at="knobs.fp8_output", problem=problem, fix={"knobs.fp8_output": None})


@rule(
    rows="FP-MAP", target="megatron-bridge", follows="Megatron-LM --fp8-recipe: delayed, tensorwise, blockwise, mxfp8"
)
def megatron_has_precision(plan: Plan) -> Iterator[Finding]:
    """Row-wise FP8 and FP8 rows in the dispatch are our engine's.

    Why: Transformer Engine has no recipe with a scale a row, and Megatron's dispatchers send bf16.
    Confirm: knobs.precision and knobs.fp8_dispatch.
    Fix: blockwise FP8, and rows in bf16.
    """
    if plan.knobs.precision == "fp8-rowwise":
        problem = "Megatron has no row-wise FP8"
        fixes = [{"knobs.precision": name} for name in (*low_formats(plan.chip)[:1], "bf16")]
        yield Finding(at="knobs.precision", problem=problem, fixes=fixes)
    if plan.knobs.fp8_dispatch:
        problem = "Megatron sends rows in bf16"
        yield Finding(at="knobs.fp8_dispatch", problem=problem, fix={"knobs.fp8_dispatch": None})
