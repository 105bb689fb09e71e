"""Whether a rehearsed rank fits into the memory of its chip and, if it does not, which change would help.

`rehearse_plan` turns each rank that does not fit into a finding. Its advice is about the largest memory term.
"""

from collections.abc import Iterator

from threefold.cost.memory.by_stack import memory
from threefold.cost.memory.stage_memory import ALLOCATOR_SLACK
from threefold.dryrun.rehearse_rank import RankRehearsal
from threefold.findings import Finding
from threefold.plan.plan import Plan
from threefold.units import format_bytes

_STATES = ("weights", "gradients", "optimizer")
# Memory term -> changes of the plan that make it smaller, the cheapest first.
_ADVICE = {
    "weights": "more EP or PP, so that a rank holds less of the model",
    "gradients": "more EP or PP, or knobs.data_parallel fsdp, which keeps them in parts",
    "optimizer": "more data-parallel ranks to share it, knobs.store_param_remainders, knobs.optimizer_dtype bf16, or "
    "knobs.optimizer_offload",
    "attention": "more CP or TP, or knobs.recompute of attention parts",
    "norms": 'more TP or CP, or knobs.recompute ["layernorm"]',
    "mlp": 'more TP, or knobs.recompute ["mlp"]',
    "router": 'a smaller job.micro_batch, or knobs.recompute ["moe"]',
    "dispatch": 'a smaller job.micro_batch, or knobs.recompute ["moe"]',
    "experts": 'knobs.recompute ["moe_act"] or ["moe"], or a smaller job.micro_batch',
    "shared_experts": 'knobs.recompute ["shared_experts"]',
    "logits": "more TP, which cuts the vocabulary",
    "embedding": "more TP or CP",
    "recompute": "a smaller job.micro_batch, or more CP",
    "overlap": "a smaller job.micro_batch, or knobs.ep_overlap false",
    "graphs": "fewer scopes in knobs.graphs, or knobs.graph_memory_gb",
    "quantised_weights": "more EP or PP, so that a rank holds less of the model",
    "workspace": "a smaller job.micro_batch, or more CP",
}


def device_bytes(plan: Plan, rank: RankRehearsal) -> float:
    """The rehearsed peak plus an estimate of the memory outside of tensors, which a rehearsal does not see.

    That memory is the allocator's fragmentation, the CUDA context and the buffers of NCCL.
    """
    reserve = memory(plan).stages[rank.stage].reserve
    return rank.peak_bytes * (1 + ALLOCATOR_SLACK) + reserve["context"] + reserve["communication"]


def memory_findings(plan: Plan, rank: RankRehearsal) -> Iterator[Finding]:
    """One finding if the rank needs more memory than its chip has."""
    short = device_bytes(plan, rank) - plan.chip.memory_bytes
    if short <= 0:
        return
    largest, advice = largest_term_advice(rank)
    need = format_bytes(device_bytes(plan, rank))
    yield Finding(
        rule="rehearsal-fits-memory",
        at=f"rank {rank.rank}, stage {rank.stage}: {rank.at}",
        problem=(
            f"{format_bytes(short)} short: {need} of {format_bytes(plan.chip.memory_bytes)}, "
            f"{format_bytes(rank.peak_bytes)} of it tensors, {format_bytes(rank.terms.get(largest, 0))} {largest}"
        ),
        advice=advice,
    )


def largest_term_advice(rank: RankRehearsal) -> tuple[str, str]:
    """The largest memory term and what makes it smaller.

    It is one of the model's states if weights, gradients and optimizer states together are more than all other terms,
    and otherwise one of those: which of the two is larger decides whether a change of the layout or of the activations
    helps.
    """
    states = sum(rank.terms.get(name, 0) for name in _STATES)
    is_state = 2 * states > sum(rank.terms.values())
    largest = max((name for name in rank.terms if (name in _STATES) == is_state), key=lambda name: rank.terms[name])
    return largest, _ADVICE.get(largest, "spread the model over more ranks")
