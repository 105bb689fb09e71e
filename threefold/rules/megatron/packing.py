"""Packed conversations as Megatron Bridge takes them: offline, in one sequence a microbatch."""

from collections.abc import Iterator

from threefold.findings import Finding
from threefold.plan.plan import Plan
from threefold.rules.base import megatron_refuses, rule

# Families whose finetuning recipes in Bridge 0.6.2 switch packing off (recipes/qwen/h100/qwen3_next.py:163,
# recipes/glm/h100/glm45.py:299) and whose guide says that they do not pack.
_UNPACKED = ("qwen3_next", "glm4_moe")


@megatron_refuses(
    "bridge/training/config.py",
    "Micro batch size should be 1 when training with packed sequence",
    rows="PK-MBS PK-THREE",
)
def packed_microbatch_is_one(plan: Plan) -> Iterator[Finding]:
    """A microbatch of offline-packed conversations is one sequence.

    Why: the conversations of a microbatch already stand in one row with their bounds; Bridge raises at its start. More
        tokens in a microbatch are a longer sequence: length x batch, with as many sequences fewer in a step.
    Confirm: job.packing with job.task = "sft" and job.micro_batch.
    Fix: micro_batch 1.
    """
    job = plan.job
    if plan.packs_offline and job.micro_batch > 1:
        equal = f"job.seq_len={job.seq_len * job.micro_batch} job.global_batch={job.global_batch // job.micro_batch}"
        problem = f"{job.micro_batch} packed sequences in a microbatch"
        advice = f"equal token slots in each microbatch: job.micro_batch=1 {equal}"
        yield Finding(at="job.micro_batch", problem=problem, fix={"job.micro_batch": 1}, advice=advice)


@rule(
    target="megatron-bridge",
    rows="PK-FAMILY",
    follows="megatron/bridge/recipes/qwen/h100/qwen3_next.py:163 and recipes/glm/h100/glm45.py:299 (Bridge 0.6.2)",
)
def packing_needs_its_family(plan: Plan) -> Iterator[Finding]:
    """Qwen3-Next and GLM-4.5 are finetuned without packing in Bridge.

    Why: their recipes switch it off and hold no specification of packed sequences, which overrides could fill in.
    Confirm: job.packing on these families.
    Fix: no packing.
    """
    if plan.packs_offline and plan.model.family in _UNPACKED:
        problem = f"Bridge's recipes of {plan.model.family} do not pack conversations"
        yield Finding(at="job.packing", problem=problem, fix={"job.packing": False})


@rule(
    target="megatron-bridge",
    rows="PK-MTP",
    severity="warning",
    follows="Bridge's guide on sequence packing, 2026-08; its GLM-5 recipes do both (recipes/glm/h100/glm5.py)",
)
def packing_with_mtp(plan: Plan) -> Iterator[Finding]:
    """Bridge's guide does not pack conversations for multi-token prediction.

    Why: a depth looks beyond the next token, and the guide does not vouch for the ends of packed documents. Bridge
        does not refuse it, and some of its recipes do both. Our own engine masks them, which a test holds in fp64.
    Confirm: job.packing and job.mtp.
    Fix: job.mtp 0, or no packing.
    """
    if plan.packs_offline and plan.mtp:
        problem = f"packed conversations with MTP depth {plan.mtp}"
        yield Finding(at="job.mtp", problem=problem, fix={"job.mtp": 0}, kind="suggestion")
