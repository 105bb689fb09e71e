"""The pairs of passes that EP overlap runs together on a pipeline rank, and what is in flight when each pair begins.

EP overlap runs the forward of one microbatch together with the backward of another. `overlap_peak.py` looks at every
pair of a rank.
"""

from dataclasses import dataclass
from functools import lru_cache

from threefold.cost.memory.threefold.schedule import forward_chunk_order
from threefold.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class OverlapPair:
    """One forward and one backward that run together."""

    in_flight: tuple[int, ...]  # microbatches that each chunk of the rank holds before the pair
    forward_chunk: int | None  # the chunk of the forward; None where the backward runs alone
    backward_chunk: int  # the chunk of the backward


@lru_cache(maxsize=4096)
def overlap_pairs(schedule: str, pp: int, vpp: int, stage: int, count: int) -> tuple[OverlapPair, ...]:
    """The distinct pairs of a rank in a step of `count` microbatches. Without a pipeline each forward runs with the
    backward of the microbatch before it."""
    if pp == 1:
        return (OverlapPair((1,), 0 if count > 1 else None, 0),)
    if schedule == "dualpipev":
        down, up = min(count, 2 * pp - stage - 1), min(count, stage + 1)
        most_down = min(count, down + 1)
        second = OverlapPair((most_down, up - 1), 1, 0)
        backward_alone = OverlapPair((most_down, up), None, 1)
        # At the tip of the V the first two passes come one after the other.
        return (OverlapPair((down, up), 0, 1), second, *((backward_alone,) if stage == pp - 1 else ()))
    size, forwards = forward_chunk_order(pp, vpp, count)
    num_warmup = min(len(forwards), 2 * (pp - stage - 1) + (vpp - 1) * size + 1)
    in_flight = [forwards[:num_warmup].count(chunk) for chunk in range(vpp)]
    found: dict[OverlapPair, None] = {}
    for forward, number in zip(forwards[num_warmup : num_warmup + 2 * size * vpp], forwards, strict=False):
        pair = OverlapPair(tuple(in_flight), forward, vpp - 1 - number)
        found[pair] = None
        in_flight[forward] += 1
        in_flight[pair.backward_chunk] -= 1
    return tuple(found)


def stage_overlap_pairs(plan: Plan, stage: int) -> tuple[OverlapPair, ...]:
    """The pairs of a rank of a plan."""
    layout = plan.layout
    return overlap_pairs(layout.pipeline_schedule, layout.pp, layout.vpp, stage, max(1, plan.num_microbatches))
