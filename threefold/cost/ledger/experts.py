"""What our engine's all-to-all dispatcher sends for one layer and one microbatch, forward and backward."""

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache

from threefold.cost.ledger.calls import LONG, Call, Sizes, all_gather, all_to_all
from threefold.plan.plan import Plan
from threefold.spec.model import MoeSpec


def expert_calls(plan: Plan, moe: MoeSpec, sizes: Sizes, skew: float) -> Counter[Call]:
    """Of all ranks of an ep x etp group together. Balanced, or `skew` times as many rows arrive as are sent."""
    found: Counter[Call] = Counter()
    layout = plan.layout
    for (own, came, group), ranks in arrivals(sizes.tokens * moe.top_k, moe.num_experts, layout.ep, layout.etp).items():
        calls = [*_exchange(plan, moe, sizes, own, came, skew), *_slices(plan, moe, sizes, came, group, skew)]
        for call, number in Counter(calls).items():
            found[call] += number * ranks
    return found


def capacity_calls(plan: Plan, moe: MoeSpec, sizes: Sizes) -> Iterator[Call]:
    """Who shares a microbatch looks at all choices and weights in it before any is dropped."""
    job, size = plan.job, plan.layout.cp * plan.layout.tp
    if job.capacity_factor is not None and job.capacity_scope == "expert":
        for width in (LONG, sizes.wide):
            yield from all_gather("cp x tp", size, sizes.tokens * moe.top_k * width)


def _exchange(plan: Plan, moe: MoeSpec, sizes: Sizes, own: int, came: int, skew: float) -> Iterator[Call]:
    ep = plan.layout.ep
    if ep == 1:
        return
    yield from all_to_all("ep", ep, moe.num_experts * LONG)
    row = plan.model.dim * sizes.width
    there, back = sizes.tokens * moe.top_k - own, round((came - own) * skew)
    # One byte a number, and one for the scale of each 128.
    sent = plan.model.dim + plan.model.dim // 128 if plan.knobs.fp8_dispatch else row
    # Rows and weights there, their gradients back; results back, their gradients there.
    for rows, width in ((there, sent), (there, sizes.wide), (back, row), (back, sizes.wide), (back, row), (there, row)):
        yield "ep", "all_to_all", rows * width


def _slices(plan: Plan, moe: MoeSpec, sizes: Sizes, came: int, group: int, skew: float) -> Iterator[Call]:
    """Every slice of an expert sees the rows of all (`group`) and sums what all make of them."""
    etp = plan.layout.etp
    if etp == 1:
        return
    yield from all_gather("etp", etp, moe.num_experts * LONG)
    row = plan.model.dim * sizes.width
    out, back = round(came * skew) * (etp - 1), round((group - came) * skew)
    for rows, width in ((out, row), (back, row), (out, sizes.wide), (back, sizes.wide), (back, row), (out, row)):
        yield "etp", "all_to_all", rows * width


@lru_cache(maxsize=256)
def arrivals(rows: int, num_experts: int, ep: int, etp: int) -> Counter[tuple[int, int, int]]:
    """Ranks of an ep x etp group by: rows that stay, rows that come, rows that come to all its slices.

    Experts are taken in turn, and each rank goes on where the one before it ended.
    """
    if rows % num_experts == 0:
        return Counter({(rows // ep, rows, rows * etp): ep * etp})
    held = num_experts // ep
    came = [
        [sum(_between((x * etp + y) * rows, rows, num_experts, to * held, held) for x in range(ep)) for y in range(etp)]
        for to in range(ep)
    ]
    own = [[_between((x * etp + y) * rows, rows, num_experts, x * held, held) for y in range(etp)] for x in range(ep)]
    return Counter((own[x][y], came[x][y], sum(came[x])) for x in range(ep) for y in range(etp))


def _between(start: int, rows: int, num_experts: int, first: int, held: int) -> int:
    """Of rows start.. that go to experts 0, 1, 2, ... in turn, those that meet `held` experts from `first` on."""

    def until(end: int) -> int:
        laps, rest = divmod(end, num_experts)
        return laps * held + min(max(rest - first, 0), held)

    return until(start + rows) - until(start)
