"""Parameters that one rank holds outside and inside its routed experts, as Megatron shards them.

`memory/` asks for each pipeline stage, `time/` and `traffic/` for the average stage. Every result is a pair
(dense, experts), because data parallelism shards the two over different groups. Our own engine pads no vocabulary and
leaves more parameters whole; `memory/threefold/states.py` corrects for that.
"""

from threefold.cost.stage_contents import StageContents
from threefold.cost.trained_weights import is_frozen_by_name, trained_by_name
from threefold.plan.plan import Plan
from threefold.spec.flops import padded_vocab
from threefold.spec.params import (
    count_params,
    dense_params,
    expert_params,
    mixer_params,
    norm_params,
    router_params,
    shared_params,
    vision_params,
)


def stage_params(plan: Plan, contents: StageContents) -> tuple[float, float]:
    """Parameters of a rank of one pipeline stage."""
    model, layout = plan.model, plan.layout
    depths = min(contents.mtp, 1) if model.mtp_shared else contents.mtp
    layers = [*contents.layers, *(model.mtp_depth * depths)]
    dense = 0.0
    num_moe_layers = 0
    for layer in layers:
        sharded = mixer_params(model, layer) + (dense_params(model) if layer.ffn == "dense" else 0)
        replicated = norm_params(model, layer)
        if layer.ffn == "moe":
            sharded += shared_params(model)
            replicated += router_params(model)
            num_moe_layers += 1
        dense += sharded / layout.tp + replicated
    table = padded_vocab(model, layout.tp) * model.dim / layout.tp
    has_head = contents.loss or contents.mtp > 0 if not model.tied else 0
    has_embedding = contents.embedding or contents.mtp > 0 or (model.tied and contents.loss)
    dense += table * (has_embedding + has_head)
    dense += depths * 2 * model.dim**2 / layout.tp
    dense += model.dim if contents.loss else 0
    if contents.embedding and model.vision:
        dense += vision_params(model.vision, model.dim)
    experts = 0.0
    if model.moe:
        experts = num_moe_layers * model.moe.num_experts * expert_params(model) / layout.ep / layout.etp
    return dense, experts


def rank_params(plan: Plan) -> tuple[float, float]:
    """Parameters of a rank of an average pipeline stage."""
    layout = plan.layout
    params = count_params(plan.model, plan.mtp)
    depths = min(plan.mtp, 1) if plan.model.mtp_shared else plan.mtp
    moe = plan.model.moe
    mtp_experts = 0
    if moe and depths:
        per_depth = sum(layer.ffn == "moe" for layer in plan.model.mtp_depth)
        mtp_experts = depths * per_depth * moe.num_experts * expert_params(plan.model)
    experts = params.experts + mtp_experts
    dense = params.total - experts
    return dense / layout.tp / layout.pp, experts / layout.ep / layout.etp / layout.pp


def trained_params(plan: Plan) -> tuple[float, float]:
    """Parameters of an average rank that get gradients. With a frozen language model only the image encoder's do."""
    if is_frozen_by_name(plan):
        return trained_by_name(plan)
    dense, experts = rank_params(plan)
    if "language" not in plan.job.freeze:
        return dense, experts
    vision = count_params(plan.model).vision / plan.layout.tp / plan.layout.pp
    return vision, 0.0
