"""Families, pipelines, graphs and schedules as Megatron Core and Bridge validate them."""

from collections.abc import Iterator
from math import gcd

from threefold.findings import Changes, Finding
from threefold.plan.plan import Plan
from threefold.rules.base import megatron_refuses, rule, without
from threefold.spec.candidates import FLEX
from threefold.spec.derived import DerivedModel
from threefold.spec.megatron import BridgeRelease, bridge_releases, release_of
from threefold.spec.model import MlaSpec, ModelSpec
from threefold.spec.stacks import CORE_CONFIG

_EVENLY: Changes = {"layout.stages": None, "layout.schedule": None}  # other virtual stages need other chunks
_ONE_CHUNK: list[Changes] = [  # EP overlap with a pipeline needs several chunks, and goes with them
    {"layout.vpp": 1, **_EVENLY},
    {"layout.vpp": 1, **_EVENLY, "knobs.ep_overlap": None, "knobs.delay_wgrad": None},
]


@megatron_refuses(
    "bridge/models/conversion/auto_bridge.py", "Model architecture '{architecture}' is not yet supported", rows="CF-ONE"
)
def bridge_trains_family(plan: Plan) -> Iterator[Finding]:
    """The release of Megatron Bridge has a bridge for the model's architecture.

    Why: without one Bridge can neither build the model nor read its weights.
    Confirm: the registered architectures in `spec/megatron.json`, by release.
    Fix: another target, or a release that has it.
    """
    release, family = release_of(plan.stack.release), plan.model.family
    if not _has_bridge(release, plan.model):
        of_text = " without an encoder" if family in release.families else ""
        problem = f"Megatron Bridge {release.bridge} has no bridge for {family} models{of_text}"
        known = sorted(r.bridge for r in bridge_releases() if _has_bridge(r, plan.model))
        advice = (
            f"releases {', '.join(known)} have one" if known else "no release that was read has one: another target"
        )
        yield Finding(at="target", problem=problem, advice=advice)


# Classes of models without an encoder that a release registers apart from those with one.
_OF_TEXT = {"gemma4": "Gemma4ForCausalLM", "qwen3_5_moe": "Qwen3_5MoeForCausalLM"}


def _has_bridge(release: BridgeRelease, model: ModelSpec) -> bool:
    if isinstance(model, DerivedModel):
        return model.architecture in release.architectures
    of_text = _OF_TEXT.get(model.family) if model.vision is None else None
    return model.family in release.families and (of_text is None or of_text in release.architectures)


@megatron_refuses(
    "core/optimizer_param_scheduler.py", "assert self.lr_warmup_steps < self.lr_decay_steps", rows="RR-SHORT"
)
def warmup_ends_before_training(plan: Plan) -> Iterator[Finding]:
    """The learning rate warms up in fewer steps than the run has.

    Why: Megatron's scheduler asserts it when the optimizer is built. Recipes warm up for hundreds of steps, so that an
        export of a short run states the warm-up and the decay too.
    Confirm: job.warmup_steps against job.steps.
    Fix: a shorter warm-up.
    """
    job = plan.job
    if "job.warmup_steps" in plan.stated and job.warmup_steps >= job.steps:
        problem = f"{job.warmup_steps} steps of warm-up in a run of {job.steps}"
        fixes: list[Changes] = [{"job.warmup_steps": job.steps // 10}]
        yield Finding(at="job.warmup_steps", problem=problem, fixes=fixes)


@megatron_refuses(
    "bridge/models/hybrid/hybrid_provider.py",
    "Virtual pipeline model parallelism is temporarily unsupported",
    rows="PP-VPP",
)
def hybrid_models_without_vpp(plan: Plan) -> Iterator[Finding]:
    """Megatron runs models with Mamba layers without virtual stages.

    Why: its hybrid model has no interface for them.
    Confirm: layout.vpp; `threefold models` for the layers.
    Fix: VPP 1.
    """
    yield from _virtual_stages_with_mamba(plan)


@megatron_refuses(
    "bridge/models/mamba/mamba_provider.py",
    "Virtual pipeline model parallelism is temporarily unsupported",
    rows="PP-VPP",
)
def mamba_models_without_vpp(plan: Plan) -> Iterator[Finding]:
    """Releases of Bridge before 0.6 run models with Mamba layers without virtual stages.

    Why: their Mamba model has no interface for them; later ones have a hybrid model (hybrid-models-without-vpp).
    Confirm: layout.vpp; `threefold models` for the layers.
    Fix: VPP 1.
    """
    yield from _virtual_stages_with_mamba(plan)


def _virtual_stages_with_mamba(plan: Plan) -> Iterator[Finding]:
    if plan.model.mamba is not None and plan.layout.vpp > 1:
        problem = f"VPP {plan.layout.vpp} on {plan.model.name}"
        yield Finding(at="layout.vpp", problem=problem, fixes=_ONE_CHUNK)


@rule(
    target="megatron-bridge",
    rows="PP-VPP",
    follows="megatron-core 0.19.2, core/models/hybrid/hybrid_layer_allocation.py:437",
)
def hybrid_stages_are_equal(plan: Plan) -> Iterator[Finding]:
    """The pipeline stages of a model with Mamba layers have equally many layers.

    Why: Megatron cuts the pattern of a hybrid model into equal parts, and has no layout string for it.
    Confirm: the layers of `threefold models` against layout.pp.
    Fix: a PP that divides them.
    """
    layers, pp = plan.model.num_layers, plan.layout.pp
    if plan.model.mamba is not None and layers % pp:
        problem = f"{layers} layers over PP {pp} on {plan.model.name}"
        yield Finding(at="layout.pp", problem=problem, fix={"layout.pp": gcd(layers, pp), "layout.stages": None})


@megatron_refuses(
    "core/models/gpt/gpt_layer_specs.py", "Experimental attention variant is not supported with ", rows="PP-LAYOUT"
)
def chunks_next_to_mtp_have_layers(plan: Plan) -> Iterator[Finding]:
    """Every chunk of a model with the gated delta rule or sparse attention has a decoder layer, where it has MTP.

    Why: Megatron makes the layer of MTP like the last decoder layer of a chunk, in every chunk, also where MTP is in
        another one. Without a layer it makes an ordinary one, which it refuses for these models.
    Confirm: the chunks of `threefold show PLAN`.
    Fix: the even layout, or fewer virtual stages.
    """
    spec, layout = plan.model.attention, plan.layout
    is_variant = plan.model.delta is not None or (isinstance(spec, MlaSpec) and spec.indexer is not None)
    bare = next((chunk for chunk in plan.chunks if not chunk.layers), None)
    if is_variant and plan.mtp and bare is not None:
        even: Changes = {"layout.stages": None}
        fewer = [vpp for vpp in range(layout.vpp - 1, 0, -1) if layout.vpp % vpp == 0]
        fixes = [even, *({**even, "layout.vpp": vpp, "layout.schedule": None} for vpp in fewer)]
        problem = f"a chunk without a decoder layer, {bare}, and MTP on {plan.model.name}"
        yield Finding(at="layout.stages", problem=problem, fixes=fixes)


@rule(
    target="megatron-bridge",
    rows="PP-VPP VL-GUIDE",
    follows="megatron-core 0.19.2, core/transformer/transformer_layer.py:191",
)
def bridge_model_without_vpp(plan: Plan) -> Iterator[Finding]:
    """Qwen3-VL and Gemma 4 run in Bridge without virtual stages.

    Why: Bridge's providers make these models without saying for which virtual stage, and each of their layers, or the
        layout string, asks.
    Confirm: layout.vpp.
    Fix: VPP 1.
    """
    layout = plan.layout
    if plan.model.family in ("qwen3_vl_moe", "gemma4") and layout.pp > 1 and layout.vpp > 1:
        problem = f"VPP {layout.vpp} on {plan.model.name}"
        yield Finding(at="layout.vpp", problem=problem, fixes=_ONE_CHUNK)


@megatron_refuses(
    "bridge/models/qwen_vl/modelling_qwen3_vl/model.py",
    "the deepstack_visual_embeds should on the first pp-stage",
    rows="PP-LAYOUT VL-GUIDE",
)
def first_stage_takes_image_features(plan: Plan) -> Iterator[Finding]:
    """The first chunk of a pipeline has a decoder layer for each layer of the image encoder whose output it takes.

    Why: Bridge adds these features inside its first model chunk only.
    Confirm: the layers of the first chunk in `threefold show`; `threefold models` for the encoder's.
    Fix: fewer chunks, or a layout string with more layers in the first.
    """
    vision, layout = plan.model.vision, plan.layout
    if vision is None or layout.pp == 1 or len(plan.chunks[0].layers) >= len(vision.deepstack):
        return
    here, need = len(plan.chunks[0].layers), len(vision.deepstack)
    fixes: list[Changes] = [{"layout.vpp": 1, **_EVENLY}, {"layout.pp": 1, "layout.vpp": 1, **_EVENLY}]
    problem = f"the first chunk has {here} layers for the features of {need} encoder layers"
    yield Finding(at="layout.pp", problem=problem, fixes=fixes)


@megatron_refuses(CORE_CONFIG, "mlp cuda graph is only supported for dense layers", rows="CG-ATTN")
def mlp_graph_needs_dense_layers(plan: Plan) -> Iterator[Finding]:
    """Megatron captures `mlp` where the model has dense layers.

    Why: it refuses a scope without a layer to capture.
    Confirm: `threefold models` shows the layers.
    Fix: delete the scope.
    """
    if "mlp" in plan.knobs.graphs and all(layer.ffn != "dense" for layer in plan.model.layers):
        fix = {"knobs.graphs": without(plan.knobs.graphs, "mlp")}
        yield Finding(at="knobs.graphs", problem=f"mlp: {plan.model.name} has no dense layers", fix=fix)


@megatron_refuses(CORE_CONFIG, "moe cuda graph is only supported for MoE.", rows="CG-ROUTER")
def moe_graph_needs_experts(plan: Plan) -> Iterator[Finding]:
    """Megatron captures `moe` and `moe_router` where the model has experts.

    Why: it refuses a scope without a layer to capture.
    Confirm: `threefold models` shows the experts.
    Fix: delete the scopes.
    """
    scopes = [scope for scope in plan.knobs.graphs if scope.startswith("moe")]
    if scopes and not plan.model.is_moe:
        fix = {"knobs.graphs": without(plan.knobs.graphs, *scopes)}
        yield Finding(at="knobs.graphs", problem=f"{', '.join(scopes)}: {plan.model.name} has no experts", fix=fix)


@megatron_refuses(CORE_CONFIG, "moe_shared_expert_intermediate_size must be ", rows="CF-ONE")
def ernie_has_shared_experts(plan: Plan) -> Iterator[Finding]:
    """Bridge builds ERNIE 4.5 models that have shared experts.

    Why: it states their width also where there are none, as 0, which Megatron Core refuses.
    Confirm: `threefold models` for the shared experts.
    Fix: another target.
    """
    moe = plan.model.moe
    if plan.model.family == "ernie4_5_moe" and moe is not None and not moe.num_shared:
        problem = f"{plan.model.name} has no shared experts, and Bridge states a width of 0 for them"
        yield Finding(at="target", problem=problem, advice="choose another target")


@megatron_refuses(
    "bridge/models/gemma/gemma4_provider.py", "separate router/shared/routed inputs do not yet support", rows="CF-ONE"
)
def gemma4_on_target(plan: Plan) -> Iterator[Finding]:
    """Bridge's Gemma 4 has no graphs, no overlap of shared experts, recomputes no `layernorm`, offloads no `mlp_norm`.

    Why: router, shared and routed experts of a layer have inputs of their own, which bypass Megatron's paths for these.
    Confirm: knobs.graphs, knobs.recompute, knobs.activation_offload.
    Fix: without them.
    """
    if plan.model.family != "gemma4" or not plan.model.is_moe:
        return
    knobs = plan.knobs
    found: list[tuple[str, list[str], tuple[str, ...]]] = [
        ("knobs.graphs", list(knobs.graphs), knobs.graphs),
        ("knobs.recompute", ["layernorm"] if "full" not in knobs.recompute else [], knobs.recompute),
        ("knobs.activation_offload", ["mlp_norm"], knobs.activation_offload),
    ]
    for at, refused, names in found:
        if caught := [name for name in names if name in refused]:
            problem = f"{', '.join(caught)} on {plan.model.name}"
            yield Finding(at=at, problem=problem, fix={at: without(names, *caught)})
    if knobs.shared_expert_overlap and knobs.dispatcher not in FLEX:
        at = "knobs.shared_expert_overlap"
        yield Finding(at=at, problem=f"shared_expert_overlap on {plan.model.name}", fix={at: None})


@rule(
    target="megatron-bridge",
    rows="FP-BLOCK",
    follows="transformer_engine 2.9.0, pytorch/module/base.py:635: Unsupported quantizer for Userbuffers",
)
def tp_overlap_has_buffers(plan: Plan) -> Iterator[Finding]:
    """Transformer Engine overlaps tensor parallelism in sixteen bits, with scales of a tensor, or in MXFP8.

    Why: its buffers hold no tensors with the scales of other recipes. A configuration with them is accepted, and the
        first step ends in an error.
    Confirm: knobs.tp_overlap and knobs.precision.
    Fix: the overlap off.
    """
    if plan.knobs.tp_overlap and plan.layout.tp > 1 and plan.knobs.precision in ("fp8-blockwise", "nvfp4"):
        problem = f"tp_overlap with {plan.knobs.precision}"
        yield Finding(at="knobs.tp_overlap", problem=problem, fix={"knobs.tp_overlap": None})


@megatron_refuses(
    "core/extensions/transformer_engine.py",
    "The user buffer name {tp_comm_buffer_name} is not supported",
    rows="CF-ONE",
    severity="warning",
)
def tp_overlap_stays_on(plan: Plan) -> Iterator[Finding]:
    """The overlap of tensor parallelism is asked for where Megatron leaves it on.

    Why: projections of latents and of MTP have names that Transformer Engine has no buffers for. The first of them
        switches the overlap off for all layers after it, with a warning in the log.
    Confirm: `Disabling TP communication overlap` in the log; `threefold models` for the kind of attention.
    Fix: the overlap off.
    """
    if not plan.knobs.tp_overlap or plan.layout.tp == 1:
        return
    problem = ""
    if isinstance(plan.model.attention, MlaSpec):
        problem = f"Megatron switches tp_overlap off on {plan.model.name}, whose attention is latent"
    elif plan.mtp:
        problem = (
            f"Megatron switches tp_overlap off at the first MTP depth of {plan.model.name}, for all layers after it"
        )
    if problem:
        yield Finding(at="knobs.tp_overlap", problem=problem, fix={"knobs.tp_overlap": None})
