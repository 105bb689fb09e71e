"""Dynamic context parallelism (`knobs.cp_dynamic`): what it needs, what it runs with, and where it has no effect."""

from collections.abc import Iterator
from typing import Any

from threefold.findings import Finding
from threefold.plan.plan import Plan
from threefold.rules.base import rule
from threefold.spec.model import MlaSpec

OFF = {"knobs.cp_dynamic": False}


@rule(rows="LC-CP-DYN")
def cp_dynamic_halves_groups(plan: Plan) -> Iterator[Finding]:
    """With dynamic context parallelism CP is a power of two.

    Why: a sequence is sharded over 1, 2, 4, ... or all CP ranks, and the blocks of each size must tile the group.
    Confirm: layout.cp.
    Fix: the next power of two below.
    """
    cp = plan.layout.cp
    if plan.shards_dynamically and cp & (cp - 1):
        yield Finding(
            at="layout.cp",
            problem=f"CP {cp} is no power of two: dynamic context parallelism shards over 1, 2, 4, ... or all ranks",
            fix={"layout.cp": 1 << (cp.bit_length() - 1)},
            fixes=[OFF],
        )


@rule(rows="LC-CP-DYN")
def cp_dynamic_without_pipeline(plan: Plan) -> Iterator[Finding]:
    """Dynamic context parallelism runs without a pipeline.

    Why: stages exchange hidden states of one size, and all ranks of a stage would have to change the degree together.
        Megatron's hybrid context parallelism has the same limit.
    Confirm: layout.pp with knobs.cp_dynamic.
    Fix: one CP degree for all sequences, or no pipeline.
    """
    if plan.shards_dynamically and plan.layout.pp > 1:
        problem = f"dynamic context parallelism does not run with a pipeline (PP {plan.layout.pp})"
        yield Finding(at="knobs.cp_dynamic", problem=problem, fix=OFF)


@rule(rows="LC-CP-DYN", target="threefold")
def cp_dynamic_runs_with(plan: Plan) -> Iterator[Finding]:
    """Dynamic context parallelism runs with what can change its lengths and groups from microbatch to microbatch.

    Why: EP overlap has two microbatches under way, and a layer has one CP degree at a time. CUDA graphs record one
        length and one group. A microbatch is one row, whose tokens the packer counts. A capacity needs the order of all
        tokens of a microbatch. The buffers of DeepEP V2 and HybridEP are made by all ranks together, for equally many
        tokens. Some rotary scalings depend on which documents share a microbatch, and so on the layout. Pictures are
        balanced over ranks by a packer of their own.
    Confirm: the fields in the message.
    Fix: the field that the message names, or knobs.cp_dynamic = false.
    """
    if not plan.shards_dynamically:
        return
    for at, problem, fix in _refused(plan):
        yield Finding(at=at, problem=f"dynamic context parallelism does not run with {problem}", fix=fix, fixes=[OFF])


def _refused(plan: Plan) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The field, what is wrong with it, and its fix."""
    knobs, job = plan.knobs, plan.job
    if knobs.ep_overlap:
        yield "knobs.ep_overlap", "two microbatches under way", {"knobs.ep_overlap": False, "knobs.delay_wgrad": False}
    if knobs.graphs:
        yield "knobs.graphs", "CUDA graphs, which record one length and one group", {"knobs.graphs": []}
    if job.micro_batch > 1:
        yield "job.micro_batch", f"microbatches of {job.micro_batch} sequences", {"job.micro_batch": 1}
    if job.capacity_factor is not None:
        yield "job.capacity_factor", "a capacity factor", {"job.capacity_factor": None}
    if knobs.dispatcher in ("deepep", "hybridep") and plan.layout.ep > 1:
        yield (
            "knobs.dispatcher",
            f"{knobs.dispatcher}, whose buffers take equally many tokens on all ranks",
            {"knobs.dispatcher": "alltoall"},
        )
    scalings = [attention.rope_scaling for attention in plan.model.attention_kinds]
    if any(scaling is not None and scaling.depends_on_length for scaling in scalings):
        yield "knobs.cp_dynamic", "rotary frequencies that depend on the longest document of a microbatch", OFF
    if plan.is_vlm:
        yield "knobs.cp_dynamic", f"the pictures of {plan.model.name}", OFF


@rule(
    rows="LC-CP-DYN",
    target="megatron-bridge",
    follows="Megatron-Core's multi-latent attention raises where a packed batch has a CP size of its own",
)
def cp_dynamic_without_latents(plan: Plan) -> Iterator[Finding]:
    """Megatron runs hybrid context parallelism without multi-latent attention.

    Why: its MLA refuses batches with a CP size of their own; Threefold's engine shards MLA at any degree.
    Confirm: `threefold models NAME` shows the kind of attention.
    Fix: one CP degree for all sequences.
    """
    if plan.shards_dynamically and isinstance(plan.model.attention, MlaSpec):
        problem = f"hybrid context parallelism does not run with the MLA of {plan.model.name}"
        yield Finding(at="knobs.cp_dynamic", problem=problem, fix=OFF)


@rule(severity="warning", rows="LC-CP-DYN")
def cp_dynamic_takes_effect(plan: Plan) -> Iterator[Finding]:
    """Dynamic context parallelism has CP ranks to choose from, and sequences of several lengths.

    Why: with CP 1 there is one degree. Pretraining without packing joins all documents to sequences of job.seq_len
        tokens that attend across documents: each of them needs all CP ranks.
    Confirm: layout.cp, job.packing and job.task.
    Fix: pack documents, or leave the knob out.
    """
    if not plan.knobs.cp_dynamic:
        return
    if plan.layout.cp == 1:
        yield Finding(at="knobs.cp_dynamic", problem="CP 1 has one degree for all sequences", fix=OFF)
    elif not plan.job.packing and plan.job.task == "pretrain":
        problem = "every sequence has its full length, and needs all CP ranks, where documents are not packed"
        yield Finding(at="knobs.cp_dynamic", problem=problem, fix={"job.packing": True}, fixes=[OFF])
