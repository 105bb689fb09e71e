"""Vision-language models: FSDP or 3D, images in benchmarks, what is frozen."""

from collections.abc import Iterator
from dataclasses import replace

from threefold.cost.fit import fits
from threefold.cost.memory.by_stack import memory
from threefold.findings import Finding
from threefold.plan.plan import Plan
from threefold.rules.base import rule, without
from threefold.rules.knobs.precision import FP8_KNOBS
from threefold.rules.layout.batch import can_be_priced
from threefold.units import format_bytes

_AS_FSDP: dict[str, object] = {
    "knobs.data_parallel": "fsdp",
    "layout.pp": 1,
    "layout.vpp": 1,
    "layout.schedule": None,
}


def stage_of_work(plan: Plan) -> str:
    """What a plan is for, as far as it says: bring-up recomputes everything, finetuning has answers or frozen parts."""
    if plan.full_recompute:
        return "bring-up"
    is_tuned = plan.job.task == "sft" or plan.job.freeze or plan.job.lora_rank is not None
    return "finetuning" if is_tuned else "pretraining"


def _as_3d(plan: Plan) -> Plan:
    """The plan without FSDP, its layout as it is otherwise."""
    knobs = replace(plan.knobs, data_parallel="zero1")
    return replace(plan, knobs=knobs, layout=replace(plan.layout, replicate=1))


def fsdp_or_3d(plan: Plan) -> tuple[str, str]:
    """The one of the two that upstream's guides advise for this model, stage of work and cluster, and why."""
    stage, other = stage_of_work(plan), _as_3d(plan)
    if stage == "bring-up":
        return "FSDP", "it is the simplest path to a working multimodal run, and memory is tuned first"
    if stage == "finetuning" and plan.layout.stages is None:
        return "FSDP", "a frozen encoder goes with it as it is, and no pipeline has to be cut around the encoder"
    if other.layout.pp > 1 and other.layout.stages is None:
        return "FSDP", "the encoder makes pipeline stages uneven, and no layout with it is written (layout.stages)"
    if not fits(other):
        need, have = format_bytes(memory(other).worst.device_bytes), format_bytes(plan.chip.memory_bytes)
        return "FSDP", f"without it a rank would need {need} of {have}, and a pipeline is awkward to cut at the encoder"
    cut = "a written pipeline layout" if other.layout.pp > 1 else "no pipeline to cut"
    return "3D parallel", f"it has the higher ceiling for a stable model with {cut} and time for deeper sweeps"


@rule(severity="note", rows="VL-GUIDE")
def vlm_fsdp_or_3d(plan: Plan) -> Iterator[Finding]:
    """FSDP or 3D parallel for a MoE VLM follows from the stage of work, the model and the cluster.

    Why: FSDP is the simplest path to a working multimodal run: for bring-up, for tuning memory first, and where the
        encoder makes pipeline boundaries awkward. 3D parallel has the higher ceiling, for stable models with a clean
        layout and time for deeper sweeps. One checkpoint moves between both. Bring-up is taken to recompute in full,
        finetuning to have answers (`task = "sft"`) or frozen parts.
    Confirm: run both with real images and compare them by useful work: `threefold compare A B`.
    Fix: the other one, where the note says so; experts stay spread over EP, inside the NVLink domain where they can.
    """
    layout, experts = plan.layout, plan.model.num_experts
    if not plan.is_vlm or layout.gpus == 1 or plan.chip.architecture == "cpu":
        return
    if not can_be_priced(plan) or not plan.num_microbatches:
        return
    advised, reason = fsdp_or_3d(plan)
    has = "3D parallel" if plan.knobs.data_parallel == "zero1" else "FSDP"
    topology = ""
    if experts and layout.ep > 1:
        inside = "inside an NVLink domain" if plan.link("ep").link != "network" else "over the network"
        topology = f", EP {layout.ep} {inside}"
    problem = (
        f"{advised} for {stage_of_work(plan)} of {plan.model.name} on {layout.gpus} x {plan.chip.name}{topology}: "
        f"{reason}; this plan is {has}"
    )
    change = {"FSDP": "knobs.data_parallel=fsdp layout.tp=1 layout.pp=1", "3D parallel": "knobs.data_parallel=zero1"}
    advice = f"{change[advised]}; compare both with real images" if has != advised else "compare both with real images"
    yield Finding(at="knobs.data_parallel", problem=problem, advice=advice)


@rule(severity="warning", rows="VL-GUIDE")
def vlm_fsdp_before_pipeline(plan: Plan) -> Iterator[Finding]:
    """A MoE VLM comes up on FSDP; 3D parallel follows once its pipeline layout is known.

    Why: the vision encoder makes pipeline stages uneven; FSDP needs no cut. 3D parallel has the higher
        ceiling for stable models with a clean, written layout.
    Confirm: layout.pp above 1 while layout.stages is not written.
    Fix: FSDP with PP 1, or write the layout string that was tuned.
    """
    layout = plan.layout
    if plan.is_vlm and layout.pp > 1 and layout.stages is None:
        yield Finding(
            at="layout.pp",
            problem=f"PP {layout.pp} for a vision-language model without a written layout",
            fixes=[_AS_FSDP, {**_AS_FSDP, "knobs.recompute": ["full"], "knobs.graphs": []}],
            advice="or write layout.stages, with fewer layers beside the vision encoder; FSDP needs no cut",
        )


@rule(severity="warning", rows="VL-GUIDE PF-ETPWARN")
def vlm_3d_cuts_experts_first(plan: Plan) -> Iterator[Finding]:
    """A MoE VLM in 3D parallel spreads its experts over EP, with TP 1.

    Why: upstream's 3D family is TP 1, CP 1, PP 1 or modest, and EP sized to the experts. TP cuts the narrow vision
        encoder and the decoder's GEMMs alike, and ETP is a tool to fit, which brings traffic and tuning. One run of
        the tracker, 440 TFLOP/s on 64 GB200, did use TP 8 x ETP 8: a measurement overrides this.
    Confirm: `threefold estimate` with both layouts; then a sweep with real images.
    Fix: TP 1, and ETP's degree in EP.
    """
    layout, experts = plan.layout, plan.model.num_experts
    if not plan.is_vlm or plan.knobs.data_parallel != "zero1" or layout.tp == 1 or not experts:
        return
    both = layout.ep * layout.etp
    wide = {"layout.tp": 1, **({"layout.ep": both, "layout.etp": 1} if layout.etp > 1 and experts % both == 0 else {})}
    yield Finding(
        at="layout.tp",
        problem=f"TP {layout.tp} x ETP {layout.etp} for a vision-language model; upstream's 3D family has TP 1 "
        "(2026-08; the tracker's run with TP 8 x ETP 8 reached 440 TFLOP/s)",
        fixes=[wide, {"layout.tp": 1}],
        advice="measure both with real images",
    )


@rule(rows="VL-MOCK")
def vlm_benchmark_has_images(plan: Plan) -> Iterator[Finding]:
    """A vision-language run has images in it.

    Why: image-free runs look about twice as fast as real ones, because the encoder is idle, whatever data they read.
        Their throughput is no evidence; a text-only run is one of the text model.
    Confirm: job.images is 0, or absent with synthetic data.
    Fix: state a realistic number of images a sequence.
    """
    if plan.is_image_free:
        kind = "synthetic " if plan.is_synthetic else ""
        problem = f"a {kind}vision-language run without images says nothing about speed"
        yield Finding(at="job.images", problem=problem, fix={"job.images": 1.0})


@rule(severity="warning", rows="VL-MBS HO-MBS", needs_fix=True)
def vlm_sweep_microbatch(plan: Plan) -> Iterator[Finding]:
    """VLM runs try more than microbatch 1.

    Why: the vision path changes the ratio of compute to overhead, so these models are more sensitive to the
        microbatch than text models.
    Confirm: sweep 1, 2, 4 and 8 with real images.
    Fix: begin the sweep with 2.
    """
    layout, job = plan.layout, plan.job
    if plan.is_vlm and job.micro_batch == 1 and layout.dp and job.global_batch % (2 * layout.dp) == 0:
        problem = "microbatch 1 on a vision-language model: sweep it"
        yield Finding(at="job.micro_batch", problem=problem, fix={"job.micro_batch": 2})


@rule(severity="warning", rows="VL-UNTESTED", target="megatron-bridge", follows="Bridge's skill on MoE VLM training")
def vlm_in_bf16_without_cp(plan: Plan) -> Iterator[Finding]:
    """A MoE VLM runs in sixteen bits and without context parallelism, until both are measured.

    Why: upstream has no run of either (read 2026-08-22): images make sequences uneven over CP ranks, and an encoder's
        narrow layers gain little in FP8.
    Confirm: losses and useful tokens per second of both, with real images.
    Fix: bf16 and CP 1; stack.measured=precision where a run in fewer bits was sound.
    """
    if not plan.is_vlm:
        return
    if plan.low_precision and "precision" not in plan.stack.measured:
        bare = {f"knobs.{name}": None for name in FP8_KNOBS if getattr(plan.knobs, name)}
        problem = f"{plan.knobs.precision} on {plan.model.name}: untested upstream (2026-08)"
        advice = "stack.measured=precision where a run was sound"
        yield Finding(at="knobs.precision", problem=problem, fix={"knobs.precision": "bf16", **bare}, advice=advice)
    if plan.layout.cp > 1:
        problem = f"CP {plan.layout.cp} on {plan.model.name}: untested upstream (2026-08)"
        yield Finding(at="layout.cp", problem=problem, fixes=[{"layout.cp": 1}], advice="measure it with real images")


@rule(severity="warning", rows="VL-FREEZE")
def freeze_parts_exist(plan: Plan) -> Iterator[Finding]:
    """Only parts that exist can be frozen.

    Why: freezing the vision part of a text model has no effect.
    Confirm: `threefold models` shows which models see.
    Fix: delete the names.
    """
    absent = [part for part in plan.job.freeze if part in ("vision", "projector")]
    if absent and not plan.is_vlm:
        problem = f"{', '.join(absent)}: {plan.model.name} has none"
        yield Finding(at="job.freeze", problem=problem, fix={"job.freeze": without(plan.job.freeze, *absent)})


@rule(rows="VL-FREEZE")
def something_trains(plan: Plan) -> Iterator[Finding]:
    """Not everything is frozen.

    Why: a run without a trainable parameter ends where it began.
    Confirm: job.freeze.
    Fix: train the language model.
    """
    parts = {"language"} | ({"vision", "projector"} if plan.is_vlm else set())
    if parts <= set(plan.job.freeze):
        fix = {"job.freeze": without(plan.job.freeze, "language")}
        yield Finding(at="job.freeze", problem="every part of the model is frozen", fix=fix)


@rule(severity="warning", rows="VL-MOCK")
def images_need_vision(plan: Plan) -> Iterator[Finding]:
    """Images need a model that sees.

    Why: a text model ignores them.
    Confirm: `threefold models` shows which models see.
    Fix: delete job.images.
    """
    if plan.job.images and not plan.is_vlm:
        yield Finding(
            at="job.images", problem=f"{plan.model.name} has no vision part", fix={"job.images": None}, kind="fix"
        )


@rule(severity="warning", rows="VL-RECOMP")
def vision_recompute_needs_vision(plan: Plan) -> Iterator[Finding]:
    """Recompute of the image encoder needs a model that sees, and an encoder that trains.

    Why: a text model has no encoder, and one whose encoder and projector are frozen saves nothing to be recomputed.
    Confirm: `threefold models` shows which models see; job.freeze.
    Fix: delete the knob.
    """
    if not plan.knobs.vision_recompute:
        return
    problem = "" if plan.is_vlm else f"{plan.model.name} has no vision part"
    if {"vision", "projector"} <= set(plan.job.freeze):
        problem = problem or "encoder and projector are frozen and save nothing"
    if problem:
        yield Finding(at="knobs.vision_recompute", problem=problem, fix={"knobs.vision_recompute": None})
