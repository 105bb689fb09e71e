"""Which forward and backward EP overlap puts beside each other on a rank, and what is in flight when they begin."""

from dataclasses import dataclass
from functools import lru_cache

from threefold.cost.turns import chunk_order
from threefold.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Pair:
    """Microbatches that each chunk of a rank holds before a forward and a backward, and through which chunks they go.
    No forward: the backward is alone."""

    held: tuple[int, ...]
    forward: int | None
    backward: int


@lru_cache(maxsize=4096)
def pairs(schedule: str, pp: int, vpp: int, stage: int, count: int) -> tuple[Pair, ...]:
    """Distinct ones of a rank. Without a pipeline each forward has the backward of the one before beside it."""
    if pp == 1:
        return (Pair((1,), 0 if count > 1 else None, 0),)
    if schedule == "dualpipev":
        ahead, behind = min(count, 2 * pp - stage - 1), min(count, stage + 1)
        back, one_more = Pair((min(count, ahead + 1), behind - 1), 1, 0), Pair((min(count, ahead + 1), behind), None, 1)
        # At the tip of the V the first two passes come one after the other.
        return (Pair((ahead, behind), 0, 1), back, *((one_more,) if stage == pp - 1 else ()))
    turn, chunks = chunk_order(pp, vpp, count)
    warm = min(len(chunks), 2 * (pp - stage - 1) + (vpp - 1) * turn + 1)
    held = [chunks[:warm].count(chunk) for chunk in range(vpp)]
    found: dict[Pair, None] = {}
    for forward, behind in zip(chunks[warm : warm + 2 * turn * vpp], chunks, strict=False):
        pair = Pair(tuple(held), forward, vpp - 1 - behind)
        found[pair] = None
        held[forward] += 1
        held[pair.backward] -= 1
    return tuple(found)


def pairs_of(plan: Plan, stage: int) -> tuple[Pair, ...]:
    """None for a single microbatch with sharded weights, whose gatherings and reductions are as without overlap."""
    layout = plan.layout
    if layout.pp == 1 and plan.num_microbatches <= 1 and plan.knobs.data_parallel != "zero1":
        return ()
    return pairs(layout.pipeline_schedule, layout.pp, layout.vpp, stage, max(1, plan.num_microbatches))
