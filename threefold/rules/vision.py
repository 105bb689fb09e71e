"""Vision-language models: FSDP or 3D, images in benchmarks, what is frozen."""

from collections.abc import Iterator

from threefold.findings import Finding
from threefold.plan.plan import Plan
from threefold.rules.base import rule, without


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
            fix={
                "knobs.data_parallel": "fsdp",
                "layout.pp": 1,
                "layout.vpp": 1,
                "layout.schedule": None,
            },
            advice="or write layout.stages",
        )


@rule(rows="VL-MOCK")
def vlm_benchmark_has_images(plan: Plan) -> Iterator[Finding]:
    """A vision-language benchmark has images in it.

    Why: image-free runs look about twice as fast as real ones, because the encoder is idle.
    Confirm: job.data is synthetic and job.images is absent or 0.
    Fix: state a realistic number of images a sequence.
    """
    if plan.is_vlm and plan.is_synthetic and not plan.job.images:
        problem = "a synthetic vision-language run without images says nothing about speed"
        yield Finding(at="job.images", problem=problem, fix={"job.images": 1.0})


@rule(severity="warning", rows="VL-MBS HO-MBS")
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


@rule(rows="VL-COMPAT", target="megatron-bridge", follows="Megatron FSDP: no pipeline parallel")
def fsdp_excludes_pipeline(plan: Plan) -> Iterator[Finding]:
    """Megatron's FSDP runs without a pipeline.

    Why: FSDP shards and gathers layer by layer over all ranks of the dense grid; Megatron has no schedule
        that does so per stage.
    Confirm: knobs.data_parallel and layout.pp.
    Fix: PP 1, or zero1 with the pipeline.
    """
    if plan.knobs.data_parallel != "zero1" and plan.layout.pp > 1:
        yield Finding(
            at="knobs.data_parallel",
            problem=f"{plan.knobs.data_parallel} with PP {plan.layout.pp}",
            fix={"knobs.data_parallel": "zero1", "layout.replicate": 1},
            advice="or set layout.pp to 1",
        )


@rule(rows="VL-COMPAT")
def fsdp_excludes_full_graph(plan: Plan) -> Iterator[Finding]:
    """FSDP and a full-iteration graph exclude each other.

    Why: gathered parameters live in buffers that come and go; a graph replays fixed addresses.
    Confirm: knobs.data_parallel and knobs.graphs.
    Fix: scoped graphs.
    """
    if plan.knobs.data_parallel != "zero1" and "full_iteration" in plan.knobs.graphs:
        fix = {"knobs.graphs": without(plan.knobs.graphs, "full_iteration")}
        yield Finding(at="knobs.graphs", problem=f"full_iteration with {plan.knobs.data_parallel}", fix=fix)


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
        yield Finding(at="job.images", problem=f"{plan.model.name} has no vision part", fix={"job.images": None})
