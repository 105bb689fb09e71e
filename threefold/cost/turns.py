"""The order in which a pipeline rank of our own engine takes up and gives up microbatches, where it holds most."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from threefold.cost.waiting import splits_backward
from threefold.plan.plan import Plan


@dataclass(frozen=True)
class Turn:
    """Microbatches that each chunk holds, with the one whose forward through `forward` has just ended and the one whose
    backward through `backward` begins (None: any; -1: none). `back`: microbatches whose backward is over. `waiting`:
    those of them whose weights wait for theirs, which those of chunk `weights` now get."""

    held: tuple[int, ...]
    forward: int | None
    backward: int | None
    back: tuple[int, ...]
    waiting: tuple[int, ...]
    weights: int = -1

    @cached_property
    def met(self) -> list[tuple[int, str]]:
        """Chunks, and the way through them."""
        ways = (("forward", self.forward), ("backward", self.backward), ("weights", self.weights))
        every = range(len(self.held))
        return [(chunk, way) for way, met in ways for chunk in (every if met is None else (met,)) if chunk >= 0]


def turns(plan: Plan, stage: int, flights: Sequence[int]) -> tuple[Turn, ...]:
    """`flights` is what a rank holds at most, for schedules that are not followed step by step."""
    layout, count = plan.layout, max(1, plan.num_microbatches)
    zero_bubble = layout.pipeline_schedule == "zero-bubble"
    if layout.pp == 1 or zero_bubble or layout.pipeline_schedule in ("1f1b", "interleaved"):
        return _in_turn(layout.pp, layout.vpp, stage, count, zero_bubble, splits_backward(plan))
    back = (max(0, count - max(flights)),) * len(flights)
    return (Turn(tuple(flights), None, None, back, (0,) * len(flights)),)


def chunk_order(pp: int, vpp: int, count: int) -> tuple[int, list[int]]:
    """Microbatches that a chunk takes before the next one's turn, and whose turn it is, forward after forward."""
    size = count // max(1, count // pp)
    return size, [number % (size * vpp) // size for number in range(count * vpp)]


@lru_cache(maxsize=4096)
def _in_turn(pp: int, vpp: int, stage: int, count: int, zero_bubble: bool, split: bool) -> tuple[Turn, ...]:
    """From the last forward before any backward, until every chunk has had some, and as many wait as ever do."""
    size, ahead = chunk_order(pp, vpp, count)
    apart = 1 if zero_bubble else 2
    warm = apart * (pp - stage - 1) + (vpp - 1) * size + 1 if vpp > 1 else pp - stage
    warm = min(len(ahead), warm)
    held, back, waiting = [ahead[:warm].count(chunk) for chunk in range(vpp)], [0] * vpp, [0] * vpp
    found = []
    forward = ahead[warm - 1]
    # Without chunks the second backward is like all that follow.
    for number in range(min(len(ahead), (2 * size * vpp if vpp > 1 else 2) + (stage + 1 if split else 0))):
        backward = vpp - 1 - ahead[number]
        found.append(Turn(tuple(held), forward, backward, tuple(back), tuple(waiting)))
        back[backward] += 1
        held[backward] -= 1
        if split:
            waiting[backward] += 1
            if number >= stage:
                weights = vpp - 1 - ahead[number - stage]
                found.append(Turn(tuple(held), -1, -1, tuple(back), tuple(waiting), weights))
                waiting[weights] -= 1
        if warm + number < len(ahead):
            forward = ahead[warm + number]
            held[forward] += 1
        else:
            forward = -1
    if any(waiting) and sum(back) == len(ahead):
        weights = vpp - 1 - ahead[len(ahead) - sum(waiting)]
        found.append(Turn(tuple(held), -1, -1, tuple(back), tuple(waiting), weights))
    return tuple(found)
