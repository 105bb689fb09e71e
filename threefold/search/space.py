"""The space of a draft: which fields are free, and the values each of them may take.

Everything here is arithmetic on whole numbers. What does not divide is never made; what a warning of
`rules` advises against is left out unless the draft asks for it.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from threefold.findings import Finding, FindingsError
from threefold.layout.degrees import Layout
from threefold.layout.stages import parse_stages
from threefold.plan.parse import Fields, normalize, parse
from threefold.plan.plan import Plan
from threefold.plan.table import AUTO
from threefold.rules.base import divisors
from threefold.rules.layout.context import target_cp
from threefold.spec.chips import ChipSpec
from threefold.spec.tensor_parallel import tp_fits

MOST_TP = 8  # no published plan has more, and past it GEMMs are too narrow
MOST_CHUNKS = 24  # a rank, the most of any published run: Qwen3-30B on PP 2, a layer a chunk
MOST_MICRO_BATCH = 8
MOST_RANK_TOKENS = 32_768  # of a microbatch on one rank; beyond, activations of a single layer fill a GPU
LARGE_JOB = 128  # GPUs from which a step takes the larger batch
BATCH_TOKENS = {"small": 2**22, "large": 2**24}  # 4M and 16M tokens a step, what pretraining runs of each size use
MOST_RELAXED = 2


@dataclass(frozen=True)
class Space:
    """A draft: a plan whose free fields stand at their defaults, and the paths that are fixed."""

    base: Plan
    given: Fields  # the fixed fields as the draft spells them
    auto_gpus: bool = False  # the draft leaves the number of GPUs open
    low_precision: bool = False  # formats below sixteen bits; taken only where BF16 gives no plan
    relaxed: int = 0  # 1: any CP, 2: ETP too; taken only where the degrees that are preferred give no plan

    def free(self, path: str) -> bool:
        return path not in self.given

    @property
    def gpus(self) -> int:
        return self.base.layout.gpus


def _budget_in_draft(plan: Plan) -> Finding:
    return Finding(
        rule="recompute-chosen",
        at="knobs.recompute",
        problem=f"{plan.knobs.recompute[0]} in a draft: a search chooses for the memory of the chip",
        fix={"knobs.recompute": AUTO},
        advice="or give the finished plan a budget",
    )


def read_draft(fields: Mapping[str, Any], measured: ChipSpec | None = None) -> Space:
    """The space of a draft; raises every finding about its fixed fields at once.

    `measured` are facts of a chip file, which hold where the draft is for that chip.
    """
    found, findings = normalize(fields)
    if any(finding.severity == "error" for finding in findings):
        raise FindingsError(findings)
    given = {path: value for path, value in found.items() if value != AUTO}
    parsed = parse(given)
    if parsed.plan is None:
        raise FindingsError(parsed.findings)
    plan = parsed.plan
    if measured and measured.plan_name == plan.chip.plan_name:
        plan = plan.on_chip(measured)
    if plan.recompute_budget is not None:
        raise FindingsError([_budget_in_draft(plan)])
    if "job.global_batch" not in given:
        batch = default_batch(plan.layout.gpus, plan.job.seq_len)
        plan = replace(plan, job=replace(plan.job, global_batch=batch))
    return Space(plan, {**given, "model": plan.model_name}, found.get("cluster.gpus") == AUTO)


def default_batch(gpus: int, seq_len: int) -> int:
    """Sequences a step where the draft names none: about 16M tokens on 128 GPUs and more, 4M below.

    A power of two times the odd part of the GPU count, so that every data-parallel degree divides it.
    """
    tokens = BATCH_TOKENS["large" if gpus >= LARGE_JOB else "small"]
    odd = gpus // (gpus & -gpus)
    rounds = max(1, round(tokens / seq_len / odd))
    return odd * int(2 ** (rounds.bit_length() - 1))


def layouts(space: Space) -> Iterator[Layout]:
    """Every layout whose two grids cut the ranks and the model evenly."""
    for pp in _pipeline_degrees(space):
        stage = space.gpus // pp
        chunk_counts = _chunk_counts(space, pp)
        for tp in _tensor_degrees(space):
            if stage % tp:
                continue
            for cp in _context_degrees(space, tp):
                if stage % (tp * cp):
                    continue
                for ep, etp in _expert_degrees(space, stage):
                    if stage % math.lcm(tp * cp, ep * etp):
                        continue
                    for vpp in chunk_counts:
                        yield replace(space.base.layout, tp=tp, cp=cp, pp=pp, vpp=vpp, ep=ep, etp=etp)


def micro_batches(space: Space, layout: Layout) -> list[int]:
    """Microbatch sizes that divide the batch, fill the pipeline and leave a rank a sane number of tokens."""
    job = space.base.job
    if not space.free("job.micro_batch"):
        sizes = [job.micro_batch]
    else:
        tokens = job.seq_len / (layout.cp * layout.tp)
        sizes = [2**i for i in range(10) if 2**i <= MOST_MICRO_BATCH]
        sizes = [size for size in sizes if size == 1 or size * tokens <= MOST_RANK_TOKENS]
    least = layout.pp if layout.pipeline_schedule == "interleaved" else 1
    whole = [size for size in sizes if job.global_batch % (layout.dp * size) == 0]
    return [size for size in whole if job.global_batch // (layout.dp * size) >= least]


def _powers(most: int) -> list[int]:
    return [2**i for i in range(max(0, most).bit_length())]


def _tensor_degrees(space: Space) -> list[int]:
    plan = space.base
    if not space.free("layout.tp"):
        return [plan.layout.tp]
    most = min(MOST_TP, plan.cluster.domain_ranks)  # tp-inside-domain
    return [tp for tp in _powers(most) if tp_fits(plan.model, tp) is None and plan.job.seq_len % tp == 0]


def _context_degrees(space: Space, tp: int) -> list[int]:
    """Around sequence / 4096, where TP may take over a part (cp-from-shard-target, tp-for-cp-on-rack)."""
    seq = space.base.job.seq_len
    if not space.free("layout.cp"):
        return [space.base.layout.cp]
    target = target_cp(seq)
    whole = [cp for cp in _powers(2 * target) if cp == 1 or seq % (2 * cp * tp) == 0]
    if space.relaxed:
        return whole
    most = 2 * target if space.base.is_long else target  # cp-only-when-long
    # The threefold engine hands the states of the delta rule from rank to rank in a slow loop (cost/delta_rule.py).
    alone = space.base.model.delta is not None and space.base.target == "threefold"
    return [cp for cp in whole if (2 * cp * tp >= target or (alone and cp == 1)) and cp <= most]


def _items(plan: Plan) -> int:
    """What a pipeline can cut apart: layers, MTP depths and the two ends."""
    return plan.model.num_layers + plan.mtp + 2


def _pipeline_degrees(space: Space) -> list[int]:
    plan = space.base
    if not space.free("layout.pp"):
        fixed = [plan.layout.pp]
    elif plan.job.dynamic_length or plan.knobs.data_parallel != "zero1":  # stages exchange one size; FSDP has none
        fixed = [1]
    else:
        fixed = [pp for pp in divisors(space.gpus) if pp <= _items(plan)]
    chunks = len(parse_stages(plan.layout.stages)) if plan.layout.stages else 0
    return [pp for pp in fixed if space.gpus % pp == 0 and (not chunks or chunks % pp == 0)]


def _chunk_counts(space: Space, pp: int) -> list[int]:
    """Chunks a rank: one, or so many that chunks hold 1, 2, 3, ... layers each."""
    plan = space.base
    if plan.layout.stages:
        return [len(parse_stages(plan.layout.stages)) // pp]
    if not space.free("layout.vpp"):
        return [plan.layout.vpp]
    if pp == 1:
        return [1]
    layers, items = plan.model.num_layers, _items(plan)
    even = {-(-layers // (pp * size)) for size in (1, 2, 3, 4, 6, 8)}
    counts = {1} | {vpp for vpp in even if pp * vpp <= items and vpp <= MOST_CHUNKS}
    if plan.layout.schedule is None:
        return sorted(counts)
    wanted = {"1f1b": {1}, "zero-bubble": {1}, "dualpipev": {2}}.get(plan.layout.schedule, counts - {1})
    return sorted(wanted)


def _expert_degrees(space: Space, stage: int) -> Iterator[tuple[int, int]]:
    """EP that divides the experts; ETP only past the largest of them, and only where asked for."""
    plan = space.base
    moe = plan.model.moe
    if moe is None:
        yield plan.layout.ep, plan.layout.etp
        return
    eps = divisors(moe.num_experts) if space.free("layout.ep") else [plan.layout.ep]
    eps = [ep for ep in eps if stage % ep == 0]
    for ep in eps:
        etps = [plan.layout.etp]
        if space.free("layout.etp") and space.relaxed > 1 and ep == eps[-1]:  # etp-only-when-ep-insufficient
            etps = _powers(plan.cluster.domain_ranks)
        for etp in etps:
            if stage % (ep * etp) == 0 and moe.expert_dim % etp == 0:
                yield ep, etp
