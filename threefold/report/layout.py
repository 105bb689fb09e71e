"""Pictures of a layout: the two grids, the groups of a rank, the pipeline."""

from itertools import groupby

from threefold.layout.degrees import AXES, DENSE_AXES, EXPERT_AXES
from threefold.layout.stages import Chunk, chunk_rank, format_stages
from threefold.plan.plan import Plan
from threefold.report.terminal import table
from threefold.units import format_bytes, format_count, format_many, format_tokens

AXIS_NAMES = {
    "pp": "pipeline",
    "dp": "data",
    "cp": "context",
    "tp": "tensor",
    "edp": "expert data",
    "ep": "expert",
    "etp": "expert tensor",
}


def grids_text(plan: Plan, used: bool = False) -> str:
    """Both grids over the same ranks; only axes in use where `used` asks for them."""
    layout = plan.layout

    def grid(axes: tuple[str, ...]) -> str:
        shown = [axis for axis in axes if layout.degree(axis) > 1 or not used]
        return " x ".join(f"{axis.upper()} {layout.degree(axis)}" for axis in shown) or "one rank"

    dense, expert = grid(DENSE_AXES), grid(EXPERT_AXES)
    width, ranks = max(len(dense), len(expert)), format_many(layout.gpus, "rank")
    return f"attention  {dense.ljust(width)}  = {ranks}\nexperts    {expert.ljust(width)}  = {ranks}"


def axes_text(plan: Plan) -> str:
    """Degree, stride and link of every axis."""
    rows = []
    for axis in AXES:
        link = plan.link(axis)
        shared = "" if link.degree == 1 else f"{link.in_domain} of {link.degree}"
        rows.append([axis, AXIS_NAMES[axis], str(link.degree), str(link.stride), link.link, shared])
    return table(["axis", "parallel", "degree", "stride", "link", "share a domain"], rows)


def groups_text(plan: Plan, rank: int) -> str:
    """The ranks that one rank talks to, axis by axis."""
    rows = []
    for axis in AXES:
        group = plan.layout.group(axis, rank)
        rows.append([axis, f"{plan.layout.coordinate(axis, rank)}", _ranks(group)])
    return table(["axis", "place", f"group of rank {rank}"], rows)


def _ranks(group: tuple[int, ...]) -> str:
    if len(group) <= 8:
        return " ".join(map(str, group))
    return f"{' '.join(map(str, group[:4]))} ... {group[-1]}  ({len(group)} ranks, stride {group[1] - group[0]})"


def pipeline_text(plan: Plan) -> str:
    """One line a pipeline rank with its chunks; equal neighbors are folded."""
    layout, chunks = plan.layout, plan.chunks
    v_shaped = layout.pipeline_schedule == "dualpipev"
    held: dict[int, list[Chunk]] = {rank: [] for rank in range(layout.pp)}
    for index, chunk in enumerate(chunks):
        held[chunk_rank(index, layout.pp, v_shaped)].append(chunk)
    lines = [(" | ".join(_bar(chunk) for chunk in held[rank]), rank) for rank in range(layout.pp)]
    out = []
    for text, run in groupby(lines, key=lambda line: line[0]):
        ranks = [rank for _, rank in run]
        name = f"stage {ranks[0]}" if len(ranks) == 1 else f"stages {ranks[0]}-{ranks[-1]}"
        out.append(f"{name:>14}  {text}")
    head = (
        f"{layout.pipeline_schedule}, {format_many(plan.num_microbatches, 'microbatch')}, "
        f"{format_many(len(chunks), 'chunk')}: {format_stages(chunks)}"
    )
    legend = "(E embedding, t layer, m MTP, L loss)"
    return "\n".join([head, *out, " " * 16 + legend])


def _bar(chunk: Chunk) -> str:
    return str(chunk) or "-"


def summary_text(plan: Plan) -> str:
    """What a rank holds and does."""
    layout, job = plan.layout, plan.job
    experts = plan.model.num_experts // layout.ep if plan.model.is_moe else 0
    rows = [
        ["plan", plan.hash],
        ["chip", f"{layout.gpus} x {plan.chip.name}, {format_bytes(plan.chip.memory_bytes)} each"],
        ["tokens a step", format_count(plan.tokens_per_step)],
        ["microbatches", f"{plan.num_microbatches} of {job.micro_batch} x {format_tokens(job.seq_len)} tokens"],
        ["tokens a rank", f"{job.micro_batch * job.seq_len // (layout.cp * layout.tp)} in a microbatch"],
    ]
    if experts:
        rows.append(["experts a rank", f"{experts} of {plan.model.num_experts} in each MoE layer"])
    return table(["what", "value"], rows)
