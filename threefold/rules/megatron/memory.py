"""Recompute and offload as Megatron Core validates them."""

from collections.abc import Iterator

from threefold.findings import Finding
from threefold.plan.plan import Plan
from threefold.rules.base import megatron_refuses, without
from threefold.spec.model import MlaSpec
from threefold.spec.stacks import CORE_CONFIG

_LAYERS = "knobs.activation_offload_layers"
_NAMES = "knobs.activation_offload"
_INSIDE_MOE = ("expert_fc1", "moe_act", "fused_group_mlp")


@megatron_refuses(
    CORE_CONFIG, "Currently there is no support for Pipeline parallelism with CPU offloading", rows="OF-ACT"
)
def layer_offload_without_pipeline(plan: Plan) -> Iterator[Finding]:
    """Megatron offloads whole layers without a pipeline only.

    Why: its CPU offloading knows one order of layers, and a pipeline runs microbatches in between.
    Confirm: knobs.activation_offload_layers with layout.pp above 1.
    Fix: no offload of whole layers; modules by name (knobs.activation_offload) go with a pipeline.
    """
    if plan.knobs.activation_offload_layers and plan.layout.pp > 1:
        problem = f"offload of whole layers with PP {plan.layout.pp}"
        yield Finding(at=_LAYERS, problem=problem, fix={_LAYERS: 0})


@megatron_refuses(CORE_CONFIG, "CPU offloading does not work when activation recomputation is enabled", rows="OF-ACT")
def layer_offload_without_recompute(plan: Plan) -> Iterator[Finding]:
    """Megatron offloads whole layers only where nothing is recomputed.

    Why: both replace what autograd saves of a layer.
    Confirm: knobs.activation_offload_layers with knobs.recompute.
    Fix: one of the two.
    """
    if plan.knobs.activation_offload_layers and plan.knobs.recompute:
        fixes: list[dict[str, object]] = [{_LAYERS: 0}, {"knobs.recompute": []}]
        yield Finding(at=_LAYERS, problem="offload of whole layers with recompute", fixes=fixes)


@megatron_refuses(CORE_CONFIG, "CPU offloading can be done only for layers less", rows="OF-ACT")
def layer_offload_leaves_a_layer(plan: Plan) -> Iterator[Finding]:
    """Megatron keeps at least one layer on the GPU.

    Why: the layers that stay hide the copies of the others. Upstream's skill on offload (2026-08) allows one layer less
        than the code does, which is followed.
    Confirm: knobs.activation_offload_layers against the model's layers.
    Fix: one layer fewer than there are.
    """
    layers = plan.model.num_layers
    if plan.knobs.activation_offload_layers >= layers:
        problem = f"offload of {plan.knobs.activation_offload_layers} of {layers} layers"
        yield Finding(at=_LAYERS, problem=problem, fix={_LAYERS: layers - 1})


@megatron_refuses(
    CORE_CONFIG, "fine_grained_activation_offloading cannot be enabled with cpu_offloading", rows="OF-ACT"
)
def offload_by_layer_or_module(plan: Plan) -> Iterator[Finding]:
    """Megatron offloads whole layers or modules by name, not both.

    Why: each has hooks of its own on saved tensors.
    Confirm: knobs.activation_offload with knobs.activation_offload_layers.
    Fix: the modules.
    """
    if plan.knobs.activation_offload and plan.knobs.activation_offload_layers:
        fixes: list[dict[str, object]] = [{_LAYERS: 0}, {_NAMES: []}]
        yield Finding(at=_LAYERS, problem="offload of whole layers and of modules", fixes=fixes)


@megatron_refuses(CORE_CONFIG, "attn_proj cannot be set to offload_modules alone without core_attn", rows="OF-ACT")
def offload_projection_with_attention(plan: Plan) -> Iterator[Finding]:
    """Megatron offloads what `attn_proj` saves only together with `core_attn`.

    Why: the input of the projection is the output of attention, which the backward of attention needs as well.
    Confirm: knobs.activation_offload.
    Fix: add core_attn, or leave attn_proj out.
    """
    names = plan.knobs.activation_offload
    if "attn_proj" in names and "core_attn" not in names:
        fixes = [{_NAMES: [*names, "core_attn"]}, {_NAMES: without(names, "attn_proj")}]
        yield Finding(at=_NAMES, problem="offload of attn_proj without core_attn", fixes=fixes)


@megatron_refuses(CORE_CONFIG, "while recomputing the entire MoE layer", rows="OF-ACT")
def offload_outside_recomputed_moe(plan: Plan) -> Iterator[Finding]:
    """Megatron offloads nothing inside a MoE layer that it recomputes whole.

    Why: nothing is saved there, and the copies would have no tensors to move.
    Confirm: knobs.activation_offload with `moe` in knobs.recompute.
    Fix: delete the names inside the MoE layer.
    """
    names = plan.knobs.activation_offload
    inside = [name for name in names if name in _INSIDE_MOE]
    if inside and "moe" in plan.knobs.recompute:
        problem = f"offload of {', '.join(inside)} with recompute of moe"
        yield Finding(at=_NAMES, problem=problem, fix={_NAMES: without(names, *inside)})


@megatron_refuses(CORE_CONFIG, "fused_group_mlp requires use_transformer_engine_op_fuser", rows="OF-ACT")
def offload_of_fused_experts(plan: Plan) -> Iterator[Finding]:
    """`fused_group_mlp` is offloaded where experts are fused.

    Why: the name stands for what the fused operation saves; without it there is no such operation.
    Confirm: knobs.activation_offload and knobs.expert_fusion.
    Fix: moe_act and expert_fc1 in its place.
    """
    names = plan.knobs.activation_offload
    if "fused_group_mlp" in names and not plan.knobs.expert_fusion:
        kept = without(names, "fused_group_mlp")
        apart = list(dict.fromkeys([*kept, "expert_fc1", "moe_act"]))
        problem = "offload of fused_group_mlp without expert_fusion"
        yield Finding(at=_NAMES, problem=problem, fixes=[{_NAMES: apart}, {_NAMES: kept}])


@megatron_refuses(CORE_CONFIG, "mla_up_proj in recompute_modules is only supported with", rows="RC-MLAUP RC-ALIAS")
def recompute_mla_up_proj_needs_mla(plan: Plan) -> Iterator[Finding]:
    """Megatron recomputes `mla_up_proj` in models with multi-head latent attention.

    Why: other models have no up-projection of latents.
    Confirm: `threefold models` shows the kind of attention.
    Fix: delete the name.
    """
    yield from _absent(plan, "mla_up_proj", isinstance(plan.model.attention, MlaSpec), "no latent attention")


@megatron_refuses(CORE_CONFIG, "gdn_norm_out in recompute_modules is only supported with", rows="RC-GDN RC-ALIAS")
def recompute_gdn_norm_needs_gdn(plan: Plan) -> Iterator[Finding]:
    """Megatron recomputes `gdn_norm_out` in models with the gated delta rule.

    Why: other models have no such norm.
    Confirm: `threefold models` shows the layers.
    Fix: delete the name.
    """
    yield from _absent(plan, "gdn_norm_out", plan.model.delta is not None, "no gated delta rule")


@megatron_refuses(CORE_CONFIG, "moe_act in recompute_modules is only supported with", rows="RC-MOEACT RC-ALIAS")
def recompute_moe_act_needs_experts(plan: Plan) -> Iterator[Finding]:
    """Megatron recomputes `moe_act` in models with experts.

    Why: it asks for grouped GEMMs, which a dense model has none of.
    Confirm: `threefold models` shows the experts.
    Fix: delete the name.
    """
    yield from _absent(plan, "moe_act", plan.model.is_moe, "no experts")


def _absent(plan: Plan, name: str, is_there: bool, what: str) -> Iterator[Finding]:
    if name in plan.knobs.recompute and not is_there:
        fix = {"knobs.recompute": without(plan.knobs.recompute, name)}
        yield Finding(at="knobs.recompute", problem=f"{name}: {plan.model.name} has {what}", fix=fix)


@megatron_refuses(
    "core/optimizer/optimizer_config.py", "--use-precision-aware-optimizer only supported with adam", rows="OF-OPT"
)
def narrow_states_need_adamw(plan: Plan) -> Iterator[Finding]:
    """Megatron keeps narrower optimizer states, gradients or remainders of weights, and states on the host, for Adam.

    Why: all of them belong to its precision-aware optimizer. Without that one, next to quantized parameters, an offload
        is accepted, and the matrices that Muon updates stay on the GPU.
    Confirm: job.optimizer with knobs.optimizer_dtype, grad_dtype, store_param_remainders and optimizer_offload.
    Fix: states and gradients in fp32 on the GPU, or AdamW.
    """
    knobs = plan.knobs
    usual = {"optimizer_dtype": "fp32", "grad_dtype": "fp32", "store_param_remainders": False, "optimizer_offload": 0}
    other = [name for name, value in usual.items() if getattr(knobs, name) != value]
    if plan.job.optimizer != "adamw" and other:
        fixes: list[dict[str, object]] = [{f"knobs.{name}": None for name in other}, {"job.optimizer": "adamw"}]
        problem = f"{', '.join(other)} with {plan.job.optimizer}"
        yield Finding(at=f"knobs.{other[0]}", problem=problem, fixes=fixes)
