"""What a job trains: LoRA adapters and patterns of frozen parameters."""

from collections.abc import Iterator

from threefold.cost.local_parameters import lora_target, parameters_of_all_parts
from threefold.findings import Changes, Finding, nearest, shown
from threefold.plan.plan import LORA_TARGETS, Plan
from threefold.rules.base import rule, without
from threefold.spec.model import MlaSpec
from threefold.spec.params import PARTS, idle_patterns

_MOST_SHOWN = 3


def _has_patterns(plan: Plan) -> bool:
    return any(entry not in PARTS for entry in plan.job.freeze)


@rule(target="threefold")
def freeze_patterns_match(plan: Plan) -> Iterator[Finding]:
    """Every pattern in job.freeze freezes some parameter.

    Why: a pattern with a slip in it would train what was meant to stay as it is.
    Confirm: `threefold dry-run` lists the parameters by name; `*` also stands for dots, as in `layers.0.*`.
    Fix: correct the pattern, or delete it.
    """
    if not _has_patterns(plan):
        return
    names = [one.name for one in parameters_of_all_parts(plan)]
    for entry in idle_patterns(plan.job.freeze, names):
        near = nearest(entry, [*PARTS, *names])[:_MOST_SHOWN]
        yield Finding(
            at="job.freeze",
            problem=f"{shown(entry)} is neither a part of the model nor a pattern of its parameters",
            fix={"job.freeze": without(plan.job.freeze, entry)},
            advice=f"near it: {', '.join(near)}" if near else "names are such as layers.0.mixer.q.weight",
        )


@rule(target="threefold")
def freeze_leaves_something(plan: Plan) -> Iterator[Finding]:
    """Some parameter trains where patterns freeze the others, or adapters take the place of weights.

    Why: a run without a trained parameter ends where it began.
    Confirm: job.freeze, and whether the model has what job.lora_targets names.
    Fix: fewer patterns, or targets that the model has.
    """
    if not (_has_patterns(plan) or plan.job.lora_rank is not None):
        return
    parameters = parameters_of_all_parts(plan)
    if any(not one.is_frozen for one in parameters):
        return
    has = {target for one in parameters if (target := lora_target(one.name))}
    if plan.job.lora_rank is not None and not has.intersection(plan.job.lora_targets):
        problem = f"{plan.model.name} has no {' or '.join(plan.job.lora_targets) or 'adapters to train'}"
        fix = {"job.lora_targets": [target for target in LORA_TARGETS if target in has and target != "experts"]}
        yield Finding(at="job.lora_targets", problem=problem, fix=fix)
    else:
        yield Finding(at="job.freeze", problem="every parameter is frozen", fix={"job.freeze": []})


@rule(severity="warning")
def lora_needs_rank(plan: Plan) -> Iterator[Finding]:
    """Settings of LoRA come with a rank.

    Why: without job.lora_rank there are no adapters, and all weights train.
    Confirm: job.lora_alpha and job.lora_targets beside an absent job.lora_rank.
    Fix: state the rank, or delete the settings.
    """
    written = dict(plan.written)  # a run's own plan states every field, those at their defaults too
    stated = [path for path in ("job.lora_alpha", "job.lora_targets") if path in written]
    if plan.job.lora_rank is None and stated:
        yield Finding(
            at=stated[0],
            problem="without job.lora_rank there are no adapters",
            fix=dict.fromkeys(stated, None),
            kind="fix",
        )


@rule(severity="warning", target="threefold")
def lora_targets_exist(plan: Plan) -> Iterator[Finding]:
    """The model has the weights that job.lora_targets names.

    Why: a target that the model lacks gets no adapters: a dense model has no experts, some have no shared ones.
    Confirm: `threefold show` lists the parts of the model.
    Fix: delete the names.
    """
    if plan.job.lora_rank is None or "job.lora_targets" not in dict(plan.written):
        return
    has = {lora_target(one.name) for one in parameters_of_all_parts(plan)}
    absent = [target for target in plan.job.lora_targets if target not in has]
    if absent and len(absent) < len(plan.job.lora_targets):
        yield Finding(
            at="job.lora_targets",
            problem=f"{plan.model.name} has no {' and no '.join(absent)}",
            fix={"job.lora_targets": without(plan.job.lora_targets, *absent)},
        )


@rule(target="megatron-bridge")
def adapters_need_our_engine(plan: Plan) -> Iterator[Finding]:
    """LoRA and patterns of frozen parameters are for the threefold engine.

    Why: names of parameters are those of our engine, and no adapters are priced for Megatron Bridge, whose own PEFT
        recipes are set up in its Python.
    Confirm: target, job.lora_rank, job.freeze.
    Fix: the threefold engine; or whole parts of the model in job.freeze.
    """
    if plan.job.lora_rank is not None:
        fix: Changes = {"job.lora_rank": None, "job.lora_alpha": None, "job.lora_targets": None}
        problem = "no LoRA is planned for megatron-bridge"
        yield Finding(at="job.lora_rank", problem=problem, fixes=[{"target": "threefold"}, fix])
    if _has_patterns(plan):
        kept = [entry for entry in plan.job.freeze if entry in PARTS]
        problem = "patterns of frozen parameters are not planned for megatron-bridge"
        yield Finding(at="job.freeze", problem=problem, fixes=[{"target": "threefold"}, {"job.freeze": kept}])


@rule(target="threefold")
def lora_excludes_tp_overlap(plan: Plan) -> Iterator[Finding]:
    """Adapters go without knobs.tp_overlap.

    Why: the overlapped GEMMs work on pieces of the sequence that travel, and know nothing of adapters.
    Confirm: job.lora_rank and knobs.tp_overlap.
    Fix: no overlap; the collectives then run before and behind the GEMMs.
    """
    if plan.job.lora_rank is not None and plan.knobs.tp_overlap:
        problem = "LoRA adapters with knobs.tp_overlap"
        yield Finding(at="knobs.tp_overlap", problem=problem, fix={"knobs.tp_overlap": None})


@rule(target="threefold")
def lora_excludes_latents(plan: Plan) -> Iterator[Finding]:
    """Adapters of attention go with expanded heads where MLA runs over context-parallel ranks.

    Why: attention over exchanged latents multiplies by the up projections block by block, without adapters.
    Confirm: knobs.cp_exchange, and attention in job.lora_targets.
    Fix: knobs.cp_exchange = "expanded".
    """
    adapts = plan.job.lora_rank is not None and "attention" in plan.job.lora_targets
    if adapts and isinstance(plan.model.attention, MlaSpec) and plan.exchanges_latents:
        problem = "adapters of attention with exchanged latents"
        yield Finding(at="knobs.cp_exchange", problem=problem, fix={"knobs.cp_exchange": "expanded"})


@rule(severity="warning", target="threefold")
def lora_experts_unfused(plan: Plan) -> Iterator[Finding]:
    """Fused expert kernels are asked for where experts have no adapters.

    Why: an adapter adds to the output of each layer of an expert, between the steps that the fused kernels do in one.
        With adapters of experts the GEMMs run one after the other, as they do without knobs.expert_fusion.
    Confirm: experts in job.lora_targets, knobs.expert_fusion.
    Fix: delete knobs.expert_fusion, or train no adapters of experts.
    """
    if plan.job.lora_rank is not None and "experts" in plan.job.lora_targets and plan.knobs.expert_fusion:
        fixes: list[Changes] = [
            {"knobs.expert_fusion": None, "knobs.expert_kernels": None},
            {"job.lora_targets": without(plan.job.lora_targets, "experts")},
        ]
        yield Finding(at="knobs.expert_fusion", problem="fused experts with adapters of experts", fixes=fixes)
