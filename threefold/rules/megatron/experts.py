"""Experts, dispatchers and the output layer as Megatron Core validates them."""

from collections.abc import Iterator

from threefold.findings import Changes, Finding
from threefold.plan.plan import Plan
from threefold.rules.base import megatron_refuses, without
from threefold.spec.candidates import runs_dispatcher
from threefold.spec.stacks import CORE_CONFIG

_FUSED_ACTIVATIONS = ("silu", "clamped swiglu", "relu2")
_FUSION: Changes = {"knobs.expert_fusion": None}


@megatron_refuses(
    CORE_CONFIG,
    "moe_expert_rank_capacity_factor requires moe_flex_dispatcher_backend to be",
    rows="EX-DROP DI-RANKCAP CG-PAGEDREQ",
)
def rank_capacity_needs_hybridep(plan: Plan) -> Iterator[Finding]:
    """Megatron has a capacity per rank with HybridEP only.

    Why: the buffer of a fixed size is HybridEP's (from Megatron Core 0.19 on also NCCL EP's, which no plan names).
        Bridge 0.5 and later drop nothing at it: an iteration that overflows is run once more without a graph.
    Confirm: job.capacity_scope and knobs.dispatcher.
    Fix: hybridep, or a capacity per expert.
    """
    if plan.has_rank_capacity and plan.knobs.dispatcher != "hybridep":
        fixes: list[Changes] = [{"knobs.dispatcher": "hybridep"}, {"job.capacity_scope": None}]
        problem = f"a capacity per rank with {plan.knobs.dispatcher}"
        yield Finding(at="job.capacity_scope", problem=problem, fixes=fixes)


@megatron_refuses(CORE_CONFIG, "use_transformer_engine_op_fuser to ", rows="EX-DROP DI-RANKCAP")
def rank_capacity_needs_expert_fusion(plan: Plan) -> Iterator[Finding]:
    """Megatron has a capacity per rank with fused experts only.

    Why: unfused grouped GEMMs read the number of rows on the host.
    Confirm: job.capacity_scope and knobs.expert_fusion.
    Fix: expert_fusion, or a capacity per expert.
    """
    if plan.has_rank_capacity and plan.knobs.dispatcher == "hybridep" and not plan.knobs.expert_fusion:
        fixes: list[Changes] = [{"knobs.expert_fusion": True}, {"job.capacity_scope": None}]
        yield Finding(at="job.capacity_scope", problem="a capacity per rank without expert_fusion", fixes=fixes)


@megatron_refuses(
    CORE_CONFIG, "Flex token dispatcher with deepep backend does not support", rows="EX-DROP DI-DROP DI-GATE-DE"
)
def capacity_without_deepep(plan: Plan) -> Iterator[Finding]:
    """Megatron pads experts to their capacity without DeepEP only.

    Why: DeepEP receives as many rows as there are. Upstream's guide on parallelism (read 2026-08) names alltoall alone
        for dropped tokens; the code has them with HybridEP too, and is followed.
    Confirm: job.capacity_factor and knobs.dispatcher.
    Fix: alltoall or hybridep.
    """
    job = plan.job
    padded = plan.model.is_moe and job.capacity_factor is not None and job.capacity_scope == "expert"
    if padded and plan.knobs.dispatcher == "deepep":
        fixes: list[Changes] = [{"knobs.dispatcher": name} for name in ("alltoall", "hybridep")]
        yield Finding(at="knobs.dispatcher", problem="a capacity per expert with deepep", fixes=fixes)


@megatron_refuses("core/transformer/moe/token_dispatcher.py", "DeepEP dispatcher requires TPxEP > 1", rows="DI-GATE-DE")
def deepep_has_somewhere_to_send(plan: Plan) -> Iterator[Finding]:
    """Megatron runs DeepEP over more than one rank.

    Why: with ETP x EP of 1 there is no group to send to.
    Confirm: layout.ep and layout.etp.
    Fix: alltoall.
    """
    alone = plan.layout.ep * plan.layout.etp == 1
    if plan.model.is_moe and plan.knobs.dispatcher == "deepep" and alone:
        yield Finding(at="knobs.dispatcher", problem="deepep with EP 1", fix={"knobs.dispatcher": "alltoall"})


@megatron_refuses(CORE_CONFIG, "Bias in Moe is only supported when ETP==1", rows="PF-ETPWARN")
def expert_bias_without_etp(plan: Plan) -> Iterator[Finding]:
    """Megatron cuts experts over ETP only where they have no biases.

    Why: each rank would add the bias of the second GEMM once more.
    Confirm: layout.etp; `threefold models` for the biases.
    Fix: ETP 1.
    """
    if plan.model.moe and plan.model.moe.bias and plan.layout.etp > 1:
        problem = f"ETP {plan.layout.etp} on {plan.model.name}, whose experts have biases"
        wide: Changes = {"layout.etp": 1, "layout.ep": plan.layout.ep * plan.layout.etp}
        yield Finding(at="layout.etp", problem=problem, fixes=[{"layout.etp": 1}, wide])


@megatron_refuses(
    "core/transformer/moe/experts.py", "Fused GroupedMLP is not supported for this configuration", rows="EX-GG"
)
def expert_fusion_on_target(plan: Plan) -> Iterator[Finding]:
    """Megatron fuses experts that are whole, with an activation that it has a kernel for, and not offloaded in parts.

    Why: the fused operation takes GEMMs and activation together; its support is tested layer by layer.
    Confirm: knobs.expert_fusion with layout.etp, knobs.activation_offload and the model's activation.
    Fix: expert_fusion off, or what stands in its way.
    """
    if not plan.model.is_moe or not plan.knobs.expert_fusion:
        return
    names = plan.knobs.activation_offload
    parts = [name for name in names if name in ("expert_fc1", "moe_act")]
    problem, more = "", list[Changes]()
    if plan.layout.etp > 1:
        problem, more = f"expert_fusion with ETP {plan.layout.etp}", [{"layout.etp": 1}]
    elif parts:
        whole = list(dict.fromkeys([*without(names, *parts), "fused_group_mlp"]))
        problem, more = f"expert_fusion with offload of {', '.join(parts)}", [{"knobs.activation_offload": whole}]
    elif plan.model.activation not in _FUSED_ACTIVATIONS:
        problem = f"expert_fusion with the activation {plan.model.activation} of {plan.model.name}"
    if problem:
        yield Finding(at="knobs.expert_fusion", problem=problem, fixes=[*more, _FUSION])


@megatron_refuses(CORE_CONFIG, "fp8/fp4 must be specified when moe_router_padding_for_quantization", rows="FP-PAD")
def router_padding_needs_quantization(plan: Plan) -> Iterator[Finding]:
    """Megatron pads the rows of experts for quantized GEMMs only.

    Why: GEMMs in sixteen bits take any number of rows.
    Confirm: knobs.router_padding and knobs.precision.
    Fix: delete it.
    """
    if plan.model.is_moe and plan.knobs.router_padding and not plan.low_precision:
        problem = f"router_padding with precision {plan.knobs.precision}"
        yield Finding(at="knobs.router_padding", problem=problem, fix={"knobs.router_padding": None})


@megatron_refuses(CORE_CONFIG, "fp8_output_proj requires fp8_recipe=", rows="FP-BLOCK")
def fp8_output_needs_mxfp8(plan: Plan) -> Iterator[Finding]:
    """Megatron multiplies the output layer below sixteen bits in MXFP8 only.

    Why: it refuses every other recipe.
    Confirm: knobs.fp8_output and knobs.precision.
    Fix: the output layer in bf16.
    """
    if plan.knobs.fp8_output and plan.knobs.precision != "mxfp8":
        problem = f"fp8_output with precision {plan.knobs.precision}"
        yield Finding(at="knobs.fp8_output", problem=problem, fix={"knobs.fp8_output": None})


@megatron_refuses("bridge/training/flex_dispatcher_backend.py", "Skipping DeepEP configuration.", rows="DI-GATE-DE")
def deepep_on_its_chips(plan: Plan) -> Iterator[Finding]:
    """Releases of Bridge before 0.6 refuse DeepEP on chips that they do not apply it on.

    Why: they leave the flex dispatcher set and then find no backend for the GPU; later ones run alltoall in its place
        (dispatcher-supports-chip).
    Confirm: knobs.dispatcher, cluster.chip and stack.release.
    Fix: hybridep, or alltoall.
    """
    if plan.model.is_moe and plan.knobs.dispatcher == "deepep" and not runs_dispatcher("deepep", plan.chip):
        fixes: list[Changes] = [{"knobs.dispatcher": name} for name in ("hybridep", "alltoall")]
        yield Finding(at="knobs.dispatcher", problem=f"deepep on {plan.chip.name}", fixes=fixes)


@megatron_refuses(CORE_CONFIG, "Pipeline model parallel size must be larger than 1", rows="EO-V11")
def ep_overlap_with_mtp_needs_pipeline(plan: Plan) -> Iterator[Finding]:
    """Releases before 0.5 overlap experts of a model with MTP in a pipeline only.

    Why: their merged schedule has a place for the MTP depth on the last of several stages.
    Confirm: knobs.ep_overlap, job.mtp, layout.pp and stack.release.
    Fix: no MTP, or no overlap.
    """
    if plan.knobs.ep_overlap and plan.mtp and plan.layout.pp == 1:
        fixes: list[Changes] = [{"knobs.ep_overlap": False, "knobs.delay_wgrad": False}, {"job.mtp": 0}]
        yield Finding(at="knobs.ep_overlap", problem="EP overlap with MTP and PP 1", fixes=fixes)
