"""Megatron's FSDP: what it needs, what it runs with, and what nobody has validated.

An export asks for its first version. The second one (`megatron_fsdp_version`, on Megatron's main branch in August 2026)
is a bring-up for BF16 and data parallelism alone.
"""

from collections.abc import Iterator

from threefold.findings import Changes, Finding
from threefold.plan.plan import Plan
from threefold.rules.base import megatron_refuses, older, rule, without
from threefold.rules.knobs.graphs import narrower
from threefold.spec.megatron import release_of, version
from threefold.spec.stacks import MEGATRON_ARGUMENTS, MEGATRON_FSDP

_ADAPTER = "core/distributed/fsdp/mcore_fsdp_adapter.py"
_ZERO1: Changes = {"knobs.data_parallel": "zero1", "layout.replicate": 1}
_CAPTURED_SINCE = (0, 5)  # Bridge with Megatron Core 0.18: ddp.megatron_fsdp_cuda_graph_mode


def _is_fsdp(plan: Plan) -> bool:
    return plan.knobs.data_parallel != "zero1"


@rule(
    severity="warning",
    rows="VL-COMPAT FS-PP",
    target="megatron-bridge",
    follows="megatron-core 0.19.2, core/pipeline_parallel/schedules.py: only the one without a pipeline knows FSDP",
)
def fsdp_pipeline_is_untried(plan: Plan) -> Iterator[Finding]:
    """Megatron's FSDP runs without a pipeline, as long as the pair was not tried.

    Why: Bridge's guide on FSDP (2026-08) means the pair to run and says that no matrix of it was validated; validation
        accepts it. In the code only the schedule without a pipeline ends FSDP's gathers. Until 2026-08 this was an
        error here.
    Confirm: knobs.data_parallel and layout.pp; losses of a few steps against the same plan without a pipeline.
    Fix: PP 1, or zero1 with the pipeline.
    """
    if _is_fsdp(plan) and plan.layout.pp > 1:
        whole: Changes = {"layout.pp": 1, "layout.vpp": 1, "layout.stages": None, "layout.schedule": None}
        problem = f"{plan.knobs.data_parallel} with PP {plan.layout.pp}: nobody has validated the pair (2026-08)"
        yield Finding(at="knobs.data_parallel", problem=problem, fixes=[_ZERO1, whole])


# What does not go with Megatron's FSDP: the knob, its value at rest, and the reason.
_BESIDE_FSDP: dict[str, tuple[object, str]] = {
    "optimizer_offload": (0.0, "FSDP keeps sharded states on the GPU"),
    "activation_offload_layers": (0, "FSDP's hooks and those of whole layers replace the same saved tensors"),
    "delay_wgrad": (False, "FSDP reduces the gradients of a unit when its backward ends"),
}


@rule(severity="warning", rows="VL-COMPAT FS-HSDP FS-V2", target="megatron-bridge", follows=MEGATRON_FSDP)
def fsdp_features(plan: Plan) -> Iterator[Finding]:
    """Beside Megatron's FSDP stand only features that it has.

    Why: HybridEP, scoped graphs after bring-up, a frozen encoder and selective recompute go with both FSDP and 3D
        parallel. Bridge 0.6 (2026-08) ships recipes for DeepSeek-V3 on GB300 with FSDP and HSDP, MXFP8 parameters and
        offload of core_attn, so that these are no longer warned of; only the second version of FSDP refuses them.
    Confirm: the knob of the message beside knobs.data_parallel.
    Fix: the knob back to its default, or zero1 (3D parallel) with the feature.
    """
    knobs = plan.knobs
    if not _is_fsdp(plan):
        return
    for name, (rest, why) in _BESIDE_FSDP.items():
        if getattr(knobs, name) != rest:
            problem = f"{name} with {knobs.data_parallel}: {why}"
            at_rest: Changes = {f"knobs.{name}": rest}
            advice = "published runs did so on FSDP v1 (2026-08): measure"
            yield Finding(at=f"knobs.{name}", problem=problem, fixes=[at_rest, _ZERO1], advice=advice)


@rule(rows="VL-COMPAT FS-GRAPH")
def fsdp_excludes_full_graph(plan: Plan) -> Iterator[Finding]:
    """FSDP and a full-iteration graph exclude each other in our engine, and in Bridge before 0.5.

    Why: gathered parameters live in buffers that come and go; a graph replays fixed addresses. Since Megatron Core 0.18
        `ddp.megatron_fsdp_cuda_graph_mode` keeps the buffers in place, and an export sets it; Bridge 0.6 (2026-08) has
        a recipe that does so for DeepSeek-V3 on 128 GB300.
    Confirm: knobs.data_parallel and knobs.graphs, stack.release.
    Fix: scoped graphs, or a newer release.
    """
    is_captured = plan.target == "megatron-bridge" and version(release_of(plan.stack.release).bridge) >= _CAPTURED_SINCE
    if _is_fsdp(plan) and "full_iteration" in plan.knobs.graphs and not is_captured:
        kept = without(plan.knobs.graphs, "full_iteration")
        problem = f"full_iteration with {plan.knobs.data_parallel}"
        yield Finding(at="knobs.graphs", problem=problem, fixes=narrower(plan, kept))


@megatron_refuses(_ADAPTER, "1F1B overlap with FSDP does not support per-layer CUDA graphs", rows="VL-COMPAT")
def fsdp_overlap_without_scoped_graphs(plan: Plan) -> Iterator[Finding]:
    """Megatron's FSDP with EP overlap goes without graphs of parts of a layer.

    Why: the merged schedule calls parts of layers, whose gathered weights a graph would not find. The wrapper says so
        when it is built, after a configuration with all three was accepted.
    Confirm: knobs.data_parallel with knobs.ep_overlap and knobs.graphs.
    Fix: no graphs, or no EP overlap.
    """
    knobs = plan.knobs
    if _is_fsdp(plan) and knobs.ep_overlap and without(knobs.graphs, "full_iteration"):
        fixes: list[Changes] = [{"knobs.graphs": []}, {"knobs.ep_overlap": False, "knobs.delay_wgrad": False}]
        problem = f"{knobs.data_parallel} with EP overlap and graphs of {', '.join(knobs.graphs)}"
        yield Finding(at="knobs.graphs", problem=problem, fixes=fixes)


@megatron_refuses(_ADAPTER, "Megatron-FSDP with gradient_accumulation_fusion requires", rows="VL-COMPAT OP-GAF")
def fsdp_fusion_te(plan: Plan) -> Iterator[Finding]:
    """Megatron's FSDP with fused gradient accumulation needs Transformer Engine 2.10.

    Why: older releases add into a buffer that FSDP does not have yet.
    Confirm: print transformer_engine.__version__; knobs.grad_accum_fusion.
    Fix: no fusion, or TE 2.10.
    """
    knobs = plan.knobs
    if _is_fsdp(plan) and knobs.grad_accum_fusion and older(plan.stack.te, "2.10"):
        problem = f"grad_accum_fusion with {knobs.data_parallel} on Transformer Engine {plan.stack.te}"
        fix: Changes = {"knobs.grad_accum_fusion": False}
        yield Finding(at="stack.te", problem=problem, fix=fix, advice="or run Transformer Engine 2.10 or newer")


@megatron_refuses(
    "bridge/training/config.py", "FSDP requires CUDA_DEVICE_MAX_CONNECTIONS > 1 or unset.", rows="FS-CONN"
)
def fsdp_needs_connections(plan: Plan) -> Iterator[Finding]:
    """Megatron's FSDP runs with several hardware queues.

    Why: with CUDA_DEVICE_MAX_CONNECTIONS=1 its gathers wait for the GEMMs that they should hide behind. Upstream is at
        odds with itself: templates of its skills on Slurm and memory export 1, Megatron-LM asserts 1 for TP or CP
        before Blackwell, and only warns where FSDP is on. The check of Bridge is followed.
    Confirm: print the variable in the run.
    Fix: 8, or leave it to the export.
    """
    if _is_fsdp(plan) and plan.knobs.max_connections == 1:
        problem = f"CUDA_DEVICE_MAX_CONNECTIONS=1 with {plan.knobs.data_parallel}"
        fixes: list[Changes] = [{"knobs.max_connections": None}, {"knobs.max_connections": 8}]
        yield Finding(at="knobs.max_connections", problem=problem, fixes=fixes)


@megatron_refuses("training/arguments.py", "optimizer does not support Megatron-FSDP for now.", rows="FS-OPT")
def fsdp_needs_adam(plan: Plan) -> Iterator[Finding]:
    """Megatron's FSDP updates its shards by Adam.

    Why: Muon takes whole matrices, and FSDP has flat shards of them.
    Confirm: job.optimizer and knobs.data_parallel.
    Fix: zero1 with Muon, or AdamW.
    """
    if _is_fsdp(plan) and plan.job.optimizer == "muon":
        fixes: list[Changes] = [_ZERO1, {"job.optimizer": "adamw"}]
        yield Finding(at="job.optimizer", problem=f"muon with {plan.knobs.data_parallel}", fixes=fixes)


@rule(severity="warning", target="megatron-bridge", rows="FS-TP FS-CONN", follows=f"{MEGATRON_ARGUMENTS}:1416")
def fsdp_with_small_tp(plan: Plan) -> Iterator[Finding]:
    """Before Blackwell, FSDP goes with TP 1 or 2.

    Why: TP wants one hardware queue there and FSDP several, so that one of them does not hide its communication
        (Bridge's recipe recommender, 2026-04; Megatron-LM warns of any TP or CP).
    Confirm: exposed communication of TP in a trace.
    Fix: TP 2 or 1, where that is predicted to fit; or zero1.
    """
    if _is_fsdp(plan) and plan.layout.tp > 2 and plan.chip.architecture in ("ampere", "hopper"):
        problem = f"{plan.knobs.data_parallel} with TP {plan.layout.tp} on {plan.chip.name}"
        yield Finding(at="layout.tp", problem=problem, fixes=[{"layout.tp": 2}, {"layout.tp": 1}, _ZERO1])
