"""Order: predicted throughput, at the slow end of its band where bands differ; near ties go by simplicity."""

from collections.abc import Sequence

from threefold.plan.plan import Plan
from threefold.search.price import Priced

TIE = 0.01  # of throughput: candidates closer than this are not told apart


def complexity(plan: Plan) -> int:
    """Axes in use and knobs set: what there is to get wrong and to tune."""
    layout, knobs = plan.layout, plan.knobs
    axes = sum(layout.degree(axis) > 1 for axis in ("tp", "cp", "pp", "ep", "etp")) + (layout.vpp > 1)
    switches = (
        knobs.optimizer_offload > 0,
        knobs.ep_overlap,
        knobs.delay_wgrad,
        bool(knobs.graphs),
        knobs.cp_comm != "p2p",
        knobs.data_parallel != "zero1",
        knobs.dispatcher not in ("alltoall", "local"),
        layout.stages is not None,
    )
    return axes + len(knobs.recompute) + sum(switches)


def ranked(found: Sequence[Priced]) -> list[Priced]:
    """Fastest first; a group that is nearly as fast as its fastest by simplicity, then by memory left."""
    left = sorted(found, key=lambda one: -one.sure)
    out: list[Priced] = []
    while left:
        group = [one for one in left if one.sure >= left[0].sure * (1 - TIE)]
        out += sorted(group, key=_preference)
        left = left[len(group) :]
    return out


def _preference(one: Priced) -> tuple[float, ...]:
    """Simplest, then most data parallel, then hot axes in the fewest domains, then roomiest."""
    layout = one.plan.layout
    domains = sum(link.degree / max(1, link.in_domain) for link in map(one.plan.link, ("tp", "ep")))
    return (complexity(one.plan), layout.tp * layout.cp * layout.pp, domains, -one.headroom)


def pareto(found: Sequence[Priced]) -> set[int]:
    """Places of those that no other beats in throughput, memory left and simplicity at once."""
    points = [(one.sure, one.headroom, -complexity(one.plan)) for one in found]

    def beaten(mine: tuple[float, ...]) -> bool:
        return any(other != mine and all(a >= b for a, b in zip(other, mine, strict=True)) for other in points)

    return {place for place, point in enumerate(points) if not beaten(point)}
