"""Whether a rehearsed rank fits its chip, and what to change where it does not."""

from collections.abc import Iterator

from threefold.cost.memory import SLACK, memory
from threefold.dryrun.rank import RankRehearsal
from threefold.findings import Finding
from threefold.plan.plan import Plan
from threefold.units import format_bytes

_STATES = ("weights", "gradients", "optimizer")
# What makes each term smaller, the cheapest first.
_CURES = {
    "weights": "more EP or PP, so that a rank holds less of the model",
    "gradients": "more EP or PP, or knobs.data_parallel fsdp, which keeps them in parts",
    "optimizer": "more data-parallel ranks to share it, knobs.optimizer_dtype bf16, or knobs.optimizer_offload",
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
    "quantised_weights": "more EP or PP, so that a rank holds less of the model",
    "workspace": "a smaller job.micro_batch, or more CP",
}


def device_bytes(plan: Plan, rank: RankRehearsal) -> float:
    """The rehearsed peak with what lies outside of tensors: an estimate, as no rehearsal sees it."""
    reserve = memory(plan).stages[rank.stage].reserve
    return rank.peak_bytes * (1 + SLACK) + reserve["context"] + reserve["communication"]


def misfits(plan: Plan, rank: RankRehearsal) -> Iterator[Finding]:
    short = device_bytes(plan, rank) - plan.chip.memory_bytes
    if short <= 0:
        return
    largest, cure = what_to_change(plan, rank)
    need = format_bytes(device_bytes(plan, rank))
    yield Finding(
        rule="rehearsal-fits-memory",
        at=f"rank {rank.rank}, stage {rank.stage}: {rank.at}",
        problem=(
            f"{format_bytes(short)} short: {need} of {format_bytes(plan.chip.memory_bytes)}, "
            f"{format_bytes(rank.peak_bytes)} of it tensors, {format_bytes(rank.terms.get(largest, 0))} {largest}"
        ),
        advice=cure,
    )


def what_to_change(plan: Plan, rank: RankRehearsal) -> tuple[str, str]:
    """The largest term, of states where these fill half of the chip, and what makes it smaller."""
    states = sum(rank.terms.get(name, 0) for name in _STATES)
    pool = _STATES if states > plan.chip.memory_bytes / 2 else [name for name in rank.terms if name not in _STATES]
    largest = max(pool, key=lambda name: rank.terms.get(name, 0))
    return largest, _CURES.get(largest, "spread the model over more ranks")
