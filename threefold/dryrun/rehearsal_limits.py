"""Refuses rehearsals that would not end. `rehearse_plan` calls `refuse_endless` before it rehearses a rank.

A rehearsal runs each operator of a step once. Their number grows with the microbatches of a step and with the pieces in
which layers and the loss work on the tokens of a rank, each of at most 2 GiB.
"""

import math
from collections.abc import Iterable

from threefold.cost.memory.threefold.local_sizes import LocalSizes
from threefold.cost.memory.threefold.transients import num_loss_chunks
from threefold.dryrun.representatives import reduce_microbatches
from threefold.engine.shard.order import chunks_on_rank
from threefold.findings import Finding, FindingsError
from threefold.plan.plan import Plan

MAX_MICROBATCHES = 2**15  # of a step: each of them is loaded, and a pipeline's schedule has several passes of each
MAX_PASSES = 20_000  # of a layer or the loss over a piece of its tokens; each takes about 20 ms


def refuse_endless(plan: Plan, stages: Iterable[int]) -> None:
    """Raise one finding with the size that makes a rehearsal of these stages too long."""
    if plan.num_microbatches > MAX_MICROBATCHES:
        problem = f"a step has {plan.num_microbatches:,} microbatches; a rehearsal runs at most {MAX_MICROBATCHES:,}"
        raise FindingsError([_finding("job.global_batch", problem, "rehearse a smaller job.global_batch")])
    most = max(num_passes(plan, stage) for stage in stages)
    if most > MAX_PASSES:
        tokens = round(LocalSizes(plan).gathered_tokens)
        problem = (
            f"a rank has {tokens:,} tokens of each microbatch, in {most:,} passes of layers and the loss over pieces "
            f"of them; a rehearsal runs at most {MAX_PASSES:,}"
        )
        shorter = 2 ** int(math.log2(plan.job.seq_len * MAX_PASSES / most))
        advice = f"rehearse it with job.seq_len={shorter}, or with more CP"
        raise FindingsError([_finding("job.seq_len", problem, advice)])


def num_passes(plan: Plan, stage: int) -> int:
    """Forwards of a layer or the loss over one piece of its tokens, on the first rank of a stage."""
    local, chunks = LocalSizes(plan), [plan.chunks[number] for number in chunks_on_rank(plan, stage)]
    pieces = round(1 / min(local.expert_chunk_fraction, local.mlp_chunk_fraction))
    in_loss = sum(chunk.loss + chunk.mtp for chunk in chunks) * num_loss_chunks(local)
    num_microbatches = reduce_microbatches(plan, stage).num_microbatches
    return num_microbatches * (sum(len(chunk.layers) + chunk.mtp for chunk in chunks) * pieces + in_loss)


def _finding(at: str, problem: str, advice: str) -> Finding:
    return Finding(rule="rehearsal-ends", at=at, problem=problem, advice=advice)
