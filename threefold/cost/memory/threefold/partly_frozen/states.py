"""Weights, gradients and optimizer states of a pipeline rank where some weights are frozen, parameter by parameter.

`states.py` of the folder above calls these for plans with `job.freeze` or LoRA adapters. A frozen weight has its own
bytes and nothing else; under FSDP it is sharded as others are, but needs no fp32 for an optimizer to update.
"""

from threefold.cost.format_support import STATE_BYTES, master_weight_bytes
from threefold.cost.local_parameters import LocalParameter
from threefold.cost.memory.stage_memory import Terms
from threefold.cost.memory.threefold.fsdp import expert_shards
from threefold.cost.memory.threefold.local_sizes import FP32
from threefold.cost.memory.threefold.timelines.optimizer_step import device_fraction, rank_parameters
from threefold.cost.memory.threefold.vocab_tables import num_unsharded_tables
from threefold.cost.stage_contents import StageContents
from threefold.plan.plan import Plan

_TABLES = ("embed.weight", "head.weight")


def states_by_parameter(plan: Plan, contents: StageContents) -> Terms:
    """Bytes of the states of one rank, sharded as the plan says."""
    knobs, layout = plan.knobs, plan.layout
    weight_bytes = 4 if knobs.precision == "fp32" else 2
    master = master_weight_bytes(plan)
    accumulates = layout.gpus > 1 or plan.num_microbatches > 1
    grad_dtype_bytes = FP32 if knobs.precision == "fp16" else STATE_BYTES[knobs.grad_dtype]
    grad_bytes = max(weight_bytes, grad_dtype_bytes) if accumulates else weight_bytes
    on_device = device_fraction(plan, contents)
    terms = {"weights": 0.0, "gradients": 0.0, "optimizer": 0.0}
    for one in rank_parameters(plan, contents):
        shards, moments = fsdp_shards(plan, contents, one), _moment_bytes(plan, one)
        if shards:
            # A trained shard is in fp32 and is its own master weight.
            terms["weights"] += (weight_bytes if one.is_frozen else FP32) * one.elements / shards
            terms["gradients"] += 0.0 if one.is_frozen else FP32 * one.elements / shards
            terms["optimizer"] += 0.0 if one.is_frozen else moments * one.elements / shards * on_device
        else:
            terms["weights"] += weight_bytes * one.elements
            terms["gradients"] += 0.0 if one.is_frozen else grad_bytes * one.elements
            states = (master + moments) * one.elements / one.num_copies * on_device
            terms["optimizer"] += 0.0 if one.is_frozen else states
    return terms


def trained_expert_elements(plan: Plan, contents: StageContents) -> float:
    """Elements of experts on a rank that have gradients."""
    return sum(one.elements for one in rank_parameters(plan, contents) if one.is_expert and not one.is_frozen)


def fsdp_shards(plan: Plan, contents: StageContents, parameter: LocalParameter) -> float:
    """Ranks over which FSDP spreads a parameter; 0 where it is left to ZeRO-1, or on one rank."""
    layout = plan.layout
    if plan.knobs.data_parallel == "zero1":
        return 0
    if parameter.is_expert:
        num_ranks = layout.edp // layout.replicate
        return expert_shards(plan, num_ranks) if num_ranks > 1 else 0
    is_apart = parameter.name in _TABLES and bool(num_unsharded_tables(plan, contents)) and parameter.is_shared
    num_ranks = layout.dp * layout.cp // layout.replicate
    return num_ranks if num_ranks > 1 and not is_apart else 0


def _moment_bytes(plan: Plan, parameter: LocalParameter) -> float:
    """Bytes of the optimizer's moments for each element: Muon has one, in fp32."""
    if plan.job.optimizer == "muon" and parameter.uses_muon:
        return FP32
    return 2 * STATE_BYTES[plan.knobs.optimizer_dtype]
