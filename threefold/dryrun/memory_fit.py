"""Whether a rehearsed rank fits into the memory of its chip and, if it does not, which memory term is the largest.

`rehearse_plan` turns each rank that does not fit into a finding. What could help, `api/rehearsals.py` adds.
"""

from collections.abc import Iterator

from threefold.cost.memory.by_stack import memory
from threefold.cost.memory.stage_memory import ALLOCATOR_SLACK
from threefold.dryrun.rehearse_rank import RankRehearsal
from threefold.findings import Finding
from threefold.plan.plan import Plan
from threefold.units import format_bytes

_STATES = ("weights", "gradients", "optimizer")


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
    largest = largest_term(rank)
    need = format_bytes(device_bytes(plan, rank))
    yield Finding(
        rule="rehearsal-fits-memory",
        at=f"rank {rank.rank}, stage {rank.stage}: {rank.at}",
        problem=(
            f"{format_bytes(short)} short: {need} of {format_bytes(plan.chip.memory_bytes)}, "
            f"{format_bytes(rank.peak_bytes)} of it tensors, {format_bytes(rank.terms.get(largest, 0))} {largest}"
        ),
    )


def largest_term(rank: RankRehearsal) -> str:
    """The largest memory term.

    It is one of the model's states if weights, gradients and optimizer states together are more than all other terms,
    and otherwise one of those: which of the two is larger decides whether a change of the layout or of the activations
    helps.
    """
    states = sum(rank.terms.get(name, 0) for name in _STATES)
    is_state = 2 * states > sum(rank.terms.values())
    return max((name for name in rank.terms if (name in _STATES) == is_state), key=lambda name: rank.terms[name])
