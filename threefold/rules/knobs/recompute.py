"""Recompute and offload: names, conflicts, and the order in which to reach for them."""

from collections.abc import Iterator
from dataclasses import replace

from threefold.cost.fit import surely_fits
from threefold.findings import Finding
from threefold.plan.plan import Plan
from threefold.remedies.recompute_sets import fitting_sets
from threefold.rules.base import megatron_refuses, older, rule, without
from threefold.rules.knobs.dispatch import fuses_experts
from threefold.rules.layout.batch import can_be_priced
from threefold.spec.flops import layer_flops
from threefold.spec.model import MlaSpec
from threefold.spec.stacks import CORE_CONFIG


@rule(rows="RC-FULL", follows=f"megatron-core 0.19.2, {CORE_CONFIG}: recompute_granularity is full or selective")
def full_recompute_alone(plan: Plan) -> Iterator[Finding]:
    """Full recompute and named modules exclude each other.

    Why: full recompute already redoes the whole layer.
    Confirm: knobs.recompute.
    Fix: keep the named modules; full only where they do not suffice.
    """
    words = plan.knobs.recompute
    if "full" in words and len(words) > 1:
        fix = {
            "knobs.recompute": without(words, "full"),
            "knobs.recompute_method": None,
            "knobs.recompute_layers": None,
        }
        yield Finding(
            at="knobs.recompute",
            problem="full beside named modules",
            fixes=[fix, {"knobs.recompute": ["full"]}, {**fix, "knobs.recompute": []}],
        )


@rule(rows="RC-FULL", follows=f"megatron-core 0.19.2, {CORE_CONFIG}: a method belongs to full recompute")
def recompute_method_needs_full(plan: Plan) -> Iterator[Finding]:
    """A recompute method and a number of layers belong to full recompute.

    Why: selective recompute works inside every layer, and nothing else is left to choose. Megatron never sees the pair:
        an export leaves out what has no effect.
    Confirm: knobs.recompute_method and knobs.recompute_layers.
    Fix: delete both.
    """
    knobs = plan.knobs
    if not plan.full_recompute and (knobs.recompute_method or knobs.recompute_layers):
        fix = {"knobs.recompute_method": None, "knobs.recompute_layers": None}
        problem = "a method or a number of layers without full recompute"
        at = "knobs.recompute_method" if knobs.recompute_method else "knobs.recompute_layers"
        yield Finding(at=at, problem=problem, fix=fix)


@rule(severity="warning", rows="RC-FULL")
def recompute_save_has_use(plan: Plan) -> Iterator[Finding]:
    """Outputs are saved inside layers that are recomputed whole, by our engine.

    Why: where a layer is not recomputed whole, attention runs once anyway. Megatron's full recompute saves nothing
        inside a layer, and our engine saves the outputs of softmax attention over all keys alone.
    Confirm: knobs.recompute_save with knobs.recompute; `threefold models` for the attention.
    Fix: delete it, or recompute whole layers.
    """
    if not plan.knobs.recompute_save:
        return
    spec, problem = plan.model.attention, ""
    if not plan.full_recompute:
        problem = "no layer is recomputed whole"
    elif plan.target != "threefold":
        problem = f"{plan.target} saves nothing inside a recomputed layer"
    elif spec is None or (isinstance(spec, MlaSpec) and spec.indexer is not None):
        problem = f"{plan.model.name} has no attention over all keys"
    if problem:
        fix = {"knobs.recompute_save": None}
        yield Finding(at="knobs.recompute_save", problem=f"core_attn: {problem}", fix=fix)


@rule(severity="warning", rows="RC-ORDER", target="threefold", needs_fix=True)
def full_recompute_saves_attention(plan: Plan) -> Iterator[Finding]:
    """Full recompute of long sequences saves the outputs of attention.

    Why: attention takes more time for every token of a longer sequence, and its outputs take no more memory: at a
        million tokens its second forward is a fifth of the step.
    Confirm: `threefold estimate` with the fix: the term `recompute` of the time.
    Fix: save them, where they are predicted to fit.
    """
    if not plan.full_recompute or plan.knobs.recompute_save or not can_be_priced(plan):
        return
    parts = [
        layer_flops(plan.model, layer, plan.job.seq_len) for layer in plan.model.layers if layer.mixer == "attention"
    ]
    if sum(each.attention for each in parts) < sum(each.counted for each in parts) / 2 or not parts:
        return
    saving = replace(plan, knobs=replace(plan.knobs, recompute_save=("core_attn",)))
    if surely_fits(saving) and not any(recompute_save_has_use(saving)):
        yield Finding(
            at="knobs.recompute_save",
            problem="attention runs twice forward, which is most of what full recompute repeats here",
            fix={"knobs.recompute_save": ["core_attn"]},
        )


def _missing_modules(plan: Plan) -> dict[str, str]:
    """Modules named for recompute that this model does not have, with what is missing."""
    model, is_latent = plan.model, isinstance(plan.model.attention, MlaSpec)
    no_heads = "no heads that are saved, for its ranks exchange latents" if is_latent else "no latent attention"
    has = {
        "mla_up_proj": (is_latent and not plan.exchanges_latents, no_heads),
        "moe": (model.is_moe, "no experts"),
        "moe_act": (model.is_moe, "no experts"),
        "shared_experts": (bool(model.moe and model.moe.shared_width), "no shared experts"),
        "gdn_norm_out": (model.delta is not None, "no gated delta rule"),
        "mlp": (any(layer.ffn == "dense" for layer in model.layers), "no dense feed-forward layer"),
        "core_attn": (model.attention is not None, "no attention"),
    }
    # Megatron refuses some of them, by rules of their own (`rules/megatron/memory.py`).
    refused = ("mla_up_proj", "moe_act", "gdn_norm_out") if plan.target == "megatron-bridge" else ()
    names = [name for name in plan.knobs.recompute if name in has and name not in refused]
    return {name: has[name][1] for name in names if not has[name][0]}


@rule(severity="warning", rows="RC-MLAUP RC-MOEACT RC-GDN RC-ALIAS")
def recompute_module_exists(plan: Plan) -> Iterator[Finding]:
    """Every recomputed module is part of the model.

    Why: a name without a module saves nothing, and upstream refuses some of them.
    Confirm: `threefold models` shows what the model is made of.
    Fix: delete the names that have no effect. Upstream's `up_proj` and `norm` are read as `mla_up_proj`
        and `layernorm`, the names Megatron accepts.
    """
    missing = _missing_modules(plan)
    if missing:
        said = "; ".join(f"{name}: {plan.model.name} has {what}" for name, what in missing.items())
        yield Finding(
            at="knobs.recompute", problem=said, fix={"knobs.recompute": without(plan.knobs.recompute, *missing)}
        )


@rule(
    rows="RC-SHEXP", refused_in=(CORE_CONFIG, "shared_experts recompute cannot work with --moe-shared-expert-overlap.")
)
def shared_recompute_or_overlap(plan: Plan) -> Iterator[Finding]:
    """Shared experts are recomputed or overlapped, not both.

    Why: the overlap runs them on a stream of its own, where their forward cannot be redone in place.
    Confirm: knobs.recompute and knobs.shared_expert_overlap.
    Fix: turn the overlap off.
    """
    if "shared_experts" in plan.knobs.recompute and plan.knobs.shared_expert_overlap:
        problem = "recompute of shared_experts with shared_expert_overlap"
        yield Finding(at="knobs.shared_expert_overlap", problem=problem, fix={"knobs.shared_expert_overlap": False})


_OUTPUT_DISCARDED = ("moe_act", "layernorm")


@megatron_refuses(CORE_CONFIG, "Delayed scaling does not support moe_act and layernorm recompute", rows="RC-FP8")
def recompute_fp8_scaling(plan: Plan) -> Iterator[Finding]:
    """FP8 recompute of moe_act and layernorm needs scales that are computed on the spot, and TE 2.6.

    Why: these modules discard their output and redo it; with delayed scaling the second pass would use
        another scale than the first.
    Confirm: knobs.precision (fp8-tensor is delayed scaling) and stack.te.
    Fix: current or block scaling, or other modules.
    """
    names = [name for name in plan.knobs.recompute if name in _OUTPUT_DISCARDED]
    if not names or not plan.low_precision:
        return
    if plan.knobs.precision == "fp8-tensor":
        problem = f"{', '.join(names)} with delayed scaling (fp8-tensor)"
        fewer = without(plan.knobs.recompute, *names)
        fixes: list[dict[str, object]] = [{"knobs.precision": "fp8-blockwise"}, {"knobs.precision": "fp8-cs"}]
        yield Finding(at="knobs.recompute", problem=problem, fixes=[*fixes, {"knobs.recompute": fewer}])
    elif older(plan.stack.te, "2.6"):
        yield Finding(
            at="knobs.recompute",
            problem=f"{', '.join(names)} in {plan.knobs.precision} with Transformer Engine {plan.stack.te}",
            fix={"knobs.recompute": without(plan.knobs.recompute, *names)},
            advice="or run Transformer Engine 2.6 or newer",
        )


@rule(severity="warning", rows="RC-ORDER PW-MEMSIG")
def selective_before_full(plan: Plan) -> Iterator[Finding]:
    """Selective recompute comes before full recompute.

    Why: norms, expert activations and MLPs give back most of the memory for a small part of the time; a plan
        that only fits with full recompute stands at the memory wall. Which module comes first is no law: until
        2026-08-14 upstream had core_attn first, and it then measured no saving under fused attention and a slower step.
        Its two matched studies ended with different winners: in Moonlight moe_act took 1.9% off the peak for 2% of the
        time and mla_up_proj 2% for 5%, in Nemotron Nano whole MoE layers alone finished a step.
    Confirm: rehearse with the selective set; full recompute adds about a third to the compute.
    Fix: selective modules that are predicted to fit; full recompute is for bring-up, and where no such set is left.
    """
    if plan.full_recompute:
        method = {"knobs.recompute_method": None, "knobs.recompute_layers": None}
        sets = fitting_sets(plan) if can_be_priced(plan) else ()
        yield Finding(
            at="knobs.recompute",
            problem="full recompute repeats every layer's forward: a sign of the memory wall",
            fixes=({"knobs.recompute": names or None, **method} for names in sets),
            otherwise=lambda: "no selective set is predicted to fit this layout: more ranks, or more EP, CP or PP",
        )


@rule(rows="OF-OPT", target="threefold")
def optimizer_offload_needs_adamw(plan: Plan) -> Iterator[Finding]:
    """Optimizer states on the host are AdamW's.

    Why: they visit the GPU piece by piece; Muon needs a matrix whole.
    Confirm: job.optimizer and knobs.optimizer_offload.
    Fix: keep the states on the GPU.
    """
    if plan.knobs.optimizer_offload and plan.job.optimizer != "adamw":
        problem = f"optimizer offload with {plan.job.optimizer}"
        yield Finding(at="knobs.optimizer_offload", problem=problem, fix={"knobs.optimizer_offload": 0.0})


_IN_MOE = ("expert_fc1", "moe_act", "fused_group_mlp")


@rule(severity="warning", rows="OF-ACT")
def offload_of_what_is_kept(plan: Plan) -> Iterator[Finding]:
    """Activation offload names modules that keep something.

    Why: a module inside a recomputed one keeps nothing, nor does one that the model lacks: there is nothing to move to
        the host. What our engine's fused experts keep is moved by `fused_group_mlp` alone.
    Confirm: knobs.recompute holds `moe` or `full`; knobs.expert_fusion; `threefold models` for the experts.
    Fix: delete the names that have no effect.
    """
    names = plan.knobs.activation_offload
    idle, why = _moves_nothing(plan)
    if idle:
        fix = {"knobs.activation_offload": without(names, *idle)}
        yield Finding(at="knobs.activation_offload", problem=f"{', '.join(idle)}: {why}", fix=fix)


def _moves_nothing(plan: Plan) -> tuple[list[str], str]:
    """Names whose offload has no effect, and why."""
    names = list(plan.knobs.activation_offload)
    inside = [name for name in names if name in _IN_MOE]
    if plan.full_recompute:
        return without(tuple(names), *plan.knobs.recompute_save), "recomputed as part of a layer"
    if not plan.model.is_moe:
        return inside, f"{plan.model.name} has no experts"
    if "moe" in plan.knobs.recompute and plan.target == "threefold":  # else offload-outside-recomputed-moe
        return inside, "recomputed as part of moe"
    if _experts_in_one(plan):
        apart = without(tuple(inside), "fused_group_mlp")
        return apart, "fused experts keep nothing apart; fused_group_mlp moves all of it"
    return [], ""


def _experts_in_one(plan: Plan) -> bool:
    """In our engine, where it certainly has kernels: those in FP8 also ask for the sizes."""
    in_16_bits = plan.knobs.precision in ("bf16", "fp16") or plan.chip.architecture == "cpu"
    fused = plan.knobs.expert_fusion and in_16_bits and not plan.low_precision
    return plan.target == "threefold" and fused and fuses_experts(plan)


@rule(rows="OF-ACT", target="threefold")
def activation_offload_without_ep_overlap(plan: Plan) -> Iterator[Finding]:
    """Activation offload and EP overlap exclude each other.

    Why: offload brings layers back in the order in which one microbatch needs them; the overlap runs two at a time.
    Confirm: knobs.activation_offload, activation_offload_layers and knobs.ep_overlap.
    Fix: no activation offload; recompute goes with the overlap.
    """
    knobs = plan.knobs
    if knobs.ep_overlap and (knobs.activation_offload or knobs.activation_offload_layers):
        fix = {"knobs.activation_offload": None, "knobs.activation_offload_layers": None}
        yield Finding(at="knobs.activation_offload", problem="activation offload with EP overlap", fix=fix)


EXPECTED_LENGTH = 131_072  # tokens from which upstream expects optimizer states on the host


@rule(severity="warning", rows="RC-ORDER OF-OPT LC-OFFLOAD", needs_fix=True)
def offload_comes_last(plan: Plan) -> Iterator[Finding]:
    """Offload comes after recompute and parallelism.

    Why: it moves optimizer states or activations over the host link every step; recompute is cheaper while
        there is any left to do. Where no selective recompute makes the plan fit, offload is in its place; from 128K
        on that of optimizer states is expected (Bridge's card on long context).
    Confirm: rehearse with recompute and without offload.
    Fix: recompute first.
    """
    knobs = plan.knobs
    ways = ["activation_offload", "activation_offload_layers"]
    ways += ["optimizer_offload"] if plan.job.seq_len < EXPECTED_LENGTH else []
    offloads = [name for name in ways if getattr(knobs, name)]
    if not offloads or knobs.recompute or not can_be_priced(plan):
        return
    bare = {f"knobs.{name}": None for name in offloads}
    fixes = ({"knobs.recompute": names or None, **bare} for names in fitting_sets(plan))
    yield Finding(at=f"knobs.{offloads[0]}", problem="offload while nothing is recomputed", fixes=fixes)
