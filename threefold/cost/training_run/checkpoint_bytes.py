"""Bytes of a checkpoint, and of what the host holds beside training.

Both stacks save the weights in their own format and the optimizer's states: fp32 master weights and the moments. Over
all ranks every element is written once.
"""

from dataclasses import replace

from threefold.cost.expert_load import largest_rows
from threefold.cost.format_support import STATE_BYTES
from threefold.cost.memory.by_stack import memory
from threefold.cost.memory.stage_memory import in_flight
from threefold.cost.memory.threefold.timelines.optimizer_step import host_slot_bytes
from threefold.cost.rank_params import trained_params
from threefold.cost.stack_traits import STACK_TRAITS
from threefold.cost.stage_contents import chunk_layers, stage_contents
from threefold.cost.time.offload import offloaded_bytes
from threefold.plan.plan import Plan
from threefold.spec.params import count_params


def checkpoint_bytes(plan: Plan) -> float:
    """Bytes of one checkpoint: weights, master weights, moments. Frozen parts have weights alone."""
    knobs, params = plan.knobs, count_params(plan.model, plan.mtp)
    weight_bytes = 4 if knobs.precision == "fp32" else 2
    master_bytes = 4 if weight_bytes == 2 and knobs.master_weights else 0
    trained = _trained_of_all_ranks(plan)
    adapters = trained if plan.job.lora_rank else 0.0  # they come beside the model's own weights
    moments = 2 * STATE_BYTES[knobs.optimizer_dtype] * trained
    if plan.job.optimizer == "muon":  # one momentum in fp32; tables stay with AdamW
        tables = min(trained, params.embedding + params.head)
        moments = 4 * (trained - tables) + 2 * STATE_BYTES[knobs.optimizer_dtype] * tables
    return weight_bytes * (params.total + adapters) + master_bytes * trained + moments


def _trained_of_all_ranks(plan: Plan) -> float:
    """Parameters that get gradients, each counted once: dense ones lie on TP x PP ranks, experts on EP x ETP x PP."""
    layout, (dense, experts) = plan.layout, trained_params(plan)
    return (dense * layout.tp + experts * layout.ep * layout.etp) * layout.pp


def host_bytes_by_term(plan: Plan, skew: float | None = None) -> dict[str, float]:
    """Bytes of host memory for one GPU, at the pipeline rank that needs the most.

    `optimizer` and `activations` are what the plan offloads. `checkpoint` is the copy that is written in the
    background. The processes themselves, their libraries and the data come on top.
    """
    skew = largest_rows(plan) if skew is None else skew
    all_on_device = replace(plan, knobs=replace(plan.knobs, optimizer_offload=0.0))
    pairs = zip(memory(all_on_device, skew).stages, memory(plan, skew).stages, strict=True)
    optimizer = [before.terms.get("optimizer", 0.0) - after.terms.get("optimizer", 0.0) for before, after in pairs]
    if not STACK_TRAITS[plan.target].updates_on_host:  # states that pass through the device are on the host too
        optimizer = [
            freed + host_slot_bytes(plan, contents)
            for freed, contents in zip(optimizer, stage_contents(plan), strict=True)
        ]
    activations = [_offloaded_activations(plan, stage, skew) for stage in range(plan.layout.pp)]
    fullest = max(range(plan.layout.pp), key=lambda stage: optimizer[stage] + activations[stage])
    return {
        "optimizer": max(0.0, optimizer[fullest]),
        "activations": activations[fullest],
        "checkpoint": checkpoint_bytes(plan) / plan.layout.gpus,
    }


def _offloaded_activations(plan: Plan, stage: int, skew: float) -> float:
    """Activations of all microbatches in flight that a pipeline rank keeps on the host."""
    contents = stage_contents(plan)[stage]
    held = in_flight(plan, stage)
    counts = held if len(held) == len(contents.chunks) else [max(held)] * len(contents.chunks)
    by_chunk = zip(contents.chunks, counts, strict=True)
    return sum(offloaded_bytes(plan, chunk_layers(plan, chunk), skew) * count for chunk, count in by_chunk)
