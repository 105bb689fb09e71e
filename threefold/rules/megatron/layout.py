"""Families, context parallelism, pipelines and graphs as Megatron Core and Bridge validate them."""

from collections.abc import Iterator

from threefold.findings import Changes, Finding
from threefold.plan.plan import Plan
from threefold.rules.base import rule, without
from threefold.spec.megatron import bridge_releases, release_of
from threefold.spec.model import MlaSpec
from threefold.spec.stacks import CORE_CONFIG


@rule(
    target="megatron-bridge",
    rows="CF-ONE",
    refused_in=("bridge/models/conversion/auto_bridge.py", "Model architecture '{architecture}' is not yet supported"),
)
def bridge_trains_family(plan: Plan) -> Iterator[Finding]:
    """The release of Megatron Bridge has a bridge for the model's architecture.

    Why: without one Bridge can neither build the model nor read its weights.
    Confirm: the registered architectures in `spec/megatron.json`, by release.
    Fix: another target, or a release that has it.
    """
    release, family = release_of(plan.stack.release), plan.model.family
    if family not in release.families:
        problem = f"Megatron Bridge {release.bridge} has no bridge for {family} models"
        known = sorted(r.bridge for r in bridge_releases() if family in r.families)
        advice = (
            f"releases {', '.join(known)} have one" if known else "no release that was read has one: another target"
        )
        yield Finding(at="target", problem=problem, advice=advice)


@rule(
    target="megatron-bridge",
    rows="LC-CP",
    refused_in=(CORE_CONFIG, "self.linear_num_key_heads=} must be a multiple of"),
)
def delta_heads_divide(plan: Plan) -> Iterator[Finding]:
    """TP x CP divides the key and value heads of the gated delta rule.

    Why: Megatron gives each of these ranks whole heads of a linear layer, over context parallelism as over tensors.
    Confirm: the heads in the message against layout.tp x layout.cp.
    Fix: a smaller CP or TP.
    """
    delta, layout = plan.model.delta, plan.layout
    if delta is None or layout.tp * layout.cp == 1:
        return
    shares = layout.tp * layout.cp
    if delta.num_k_heads % shares or delta.num_v_heads % shares:
        heads = f"{delta.num_k_heads} key heads and {delta.num_v_heads} value heads"
        degrees = [d for d in range(layout.cp, 0, -1) if layout.cp % d == 0]
        whole = [d for d in degrees if delta.num_k_heads % (layout.tp * d) == 0]
        fixes: list[Changes] = [{"layout.cp": d} for d in whole if delta.num_v_heads % (layout.tp * d) == 0]
        yield Finding(at="layout.cp", problem=f"{heads} over TP {layout.tp} x CP {layout.cp}", fixes=fixes)


@rule(target="megatron-bridge", rows="LC-CP", refused_in=(CORE_CONFIG, "cp_comm_type=allgather only"))
def sparse_attention_gathers(plan: Plan) -> Iterator[Finding]:
    """Sparse attention exchanges keys over context parallelism by all-gather.

    Why: an indexer chooses among the keys of the whole sequence.
    Confirm: knobs.cp_comm.
    Fix: all_gather.
    """
    spec, layout = plan.model.attention, plan.layout
    is_sparse = isinstance(spec, MlaSpec) and spec.indexer is not None
    modes = {plan.knobs.cp_comm} if isinstance(plan.knobs.cp_comm, str) else set(plan.knobs.cp_comm)
    if is_sparse and layout.cp > 1 and modes != {"all_gather"}:
        problem = f"cp_comm {', '.join(sorted(modes))} on {plan.model.name}, whose attention is sparse"
        yield Finding(at="knobs.cp_comm", problem=problem, fix={"knobs.cp_comm": "all_gather"})


@rule(
    target="megatron-bridge",
    rows="PP-VPP",
    refused_in=(
        "bridge/models/hybrid/hybrid_provider.py",
        "Virtual pipeline model parallelism is temporarily unsupported",
    ),
)
def hybrid_models_without_vpp(plan: Plan) -> Iterator[Finding]:
    """Megatron runs models with Mamba layers without virtual stages.

    Why: its hybrid model has no interface for them.
    Confirm: layout.vpp; `threefold models` for the layers.
    Fix: VPP 1.
    """
    if plan.model.mamba is not None and plan.layout.vpp > 1:
        fix: Changes = {"layout.vpp": 1, "layout.stages": None, "layout.schedule": None}
        yield Finding(at="layout.vpp", problem=f"VPP {plan.layout.vpp} on {plan.model.name}", fix=fix)


@rule(
    target="megatron-bridge",
    rows="CG-ATTN",
    refused_in=(CORE_CONFIG, "mlp cuda graph is only supported for dense layers"),
)
def mlp_graph_needs_dense_layers(plan: Plan) -> Iterator[Finding]:
    """Megatron captures `mlp` where the model has dense layers.

    Why: it refuses a scope without a layer to capture.
    Confirm: `threefold models` shows the layers.
    Fix: delete the scope.
    """
    if "mlp" in plan.knobs.graphs and all(layer.ffn != "dense" for layer in plan.model.layers):
        fix = {"knobs.graphs": without(plan.knobs.graphs, "mlp")}
        yield Finding(at="knobs.graphs", problem=f"mlp: {plan.model.name} has no dense layers", fix=fix)


@rule(target="megatron-bridge", rows="CG-ROUTER", refused_in=(CORE_CONFIG, "moe cuda graph is only supported for MoE."))
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


@rule(
    target="megatron-bridge",
    rows="CF-ONE",
    refused_in=("bridge/models/gemma/gemma4_provider.py", "separate router/shared/routed inputs do not yet support"),
)
def gemma4_on_target(plan: Plan) -> Iterator[Finding]:
    """Bridge's Gemma 4 has no graphs, no selective recompute of `layernorm` and no offload of `mlp_norm`.

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
