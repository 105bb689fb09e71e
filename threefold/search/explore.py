"""Best first: choices in the order of what they promise, until no promise can change the answer."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby, product

from threefold.layout.degrees import Layout
from threefold.layout.stages import balance, format_stages
from threefold.plan.plan import Knobs, Plan
from threefold.rules.memory import state_bytes
from threefold.search.knobs import graph_scopes, overlaps, precisions, shardings, transports
from threefold.search.ladder import Choice, Ladder
from threefold.search.legal import faults
from threefold.search.price import Priced, Pricer
from threefold.search.space import Space, layouts, micro_batches

MIN_STAGE_GAIN = 0.005  # a predicted gain from which a written pipeline layout is worth its line

WINDOW = 0.12  # below the best, how far promises are still followed: about one error band
DEFAULT_FAVOUR = 0.01  # another transport than the platform's has to be this much faster
MOST_CLIMBS = 4000  # keeps the largest spaces within seconds
REPORT_EVERY = 250

Progress = Callable[[str], None]
Key = tuple[int, int, int, int, int, str, str]


@dataclass
class Found:
    """What exploring a space gave."""

    best: dict[Key, Priced] = field(default_factory=dict)  # of each layout the fastest that fits
    short: list[Plan] = field(default_factory=list)  # the next rung down of each: faster, and does not fit
    ladder: Ladder | None = None
    searched: int = 0
    feasible: int = 0
    fastest: float = 0.0  # tokens/s at the slow end of the band
    climbs: int = 0


def layout_key(layout: Layout, knobs: Knobs) -> Key:
    """What makes two candidates different plans, and not two settings of one."""
    return (layout.tp, layout.cp, layout.pp, layout.ep, layout.etp, knobs.data_parallel, knobs.precision)


def explore(pricer: Pricer, top: int, progress: Progress | None = None) -> Found:
    """Find the fastest fitting plan of each layout that can be among the first `top`."""
    found = Found()
    choices = sorted(_choices(pricer, found), key=lambda choice: -choice.sure_promise)
    for done, choice in enumerate(choices):
        if progress and done % REPORT_EVERY == 0:
            progress(f"{done:,} of {len(choices):,} choices, {found.feasible:,} feasible")
        floor = _floor(found, top)
        if found.climbs >= MOST_CLIMBS or choice.sure_promise < floor:
            break
        key = layout_key(choice.layout, choice.knobs)
        if found.ladder:
            found.climbs += _follow(pricer, found.ladder, choice, key, floor, found)
    if progress:
        progress(f"{len(choices):,} of {len(choices):,} choices, {found.feasible:,} feasible")
    return found


def _floor(found: Found, top: int) -> float:
    """Promises below this change neither the first candidates nor their neighbours."""
    return (1 - WINDOW) * found.fastest if len(found.best) >= top else 0.0


def _follow(pricer: Pricer, ladder: Ladder, choice: Choice, key: Key, floor: float, found: Found) -> bool:
    """Climb the ladder of a choice where that can improve its layout; whether it was climbed."""
    known = found.best.get(key)
    bar = floor * choice.promise / choice.sure_promise
    if known and not is_last_resort(known.plan):
        bar = max(bar, known.tokens_per_second)
    if choice.promise <= bar:
        return False
    plan, short = ladder.climb(choice, bar)
    if short is not None:
        found.short.append(short)
    if plan is None or faults(plan):
        return True
    found.feasible += 1
    one = with_balanced_stages(pricer, pricer.priced(plan))
    if known is None or _better(one, known):
        found.best[key] = one
        found.fastest = max(found.fastest, one.sure)
    return True


def is_last_resort(plan: Plan) -> bool:
    """Full recompute or offload: taken only where nothing milder fits the layout."""
    return plan.full_recompute or plan.knobs.optimizer_offload > 0


def _better(one: Priced, known: Priced) -> bool:
    mild, was_mild = not is_last_resort(one.plan), not is_last_resort(known.plan)
    return mild > was_mild or (mild == was_mild and one.tokens_per_second > known.tokens_per_second)


def _choices(pricer: Pricer, found: Found) -> Iterator[Choice]:
    """Legal choices whose states alone fit, each with its promise."""
    space = pricer.space
    known: dict[object, list[Knobs]] = {}
    for _, group in groupby(layouts(space), key=lambda one: (one.pp, one.tp, one.cp, one.ep, one.etp)):
        same = list(group)
        kept = {name: _states_fit(space, same[0], name) for name in shardings(space, same[0])}
        ways = list(transports(space, same[0]))
        for layout in same:
            allowed = overlaps(space, layout)
            for size in micro_batches(space, layout):
                if found.ladder is None:
                    found.ladder = Ladder(pricer, Choice(layout, size, ways[0]))
                found.searched += len(kept) * len(ways) * len(allowed) * len(graph_scopes(space)) * len(found.ladder)
                key = (layout.tp, layout.cp, layout.ep, layout.etp, size, tuple(allowed))
                if key not in known:
                    known[key] = _modes(pricer, layout, size, ways, allowed)
                for knobs in known[key]:
                    promise = pricer.promise(layout, size, knobs)
                    for sharding in (name for name, fits in kept.items() if fits):
                        mode = replace(knobs, data_parallel=sharding) if sharding != knobs.data_parallel else knobs
                        yield Choice(layout, size, mode, promise, promise / pricer.slow_end(layout, mode))


def _states_fit(space: Space, layout: Layout, sharding: str) -> bool:
    """The cheap lower bound: weights, gradients and optimizer states, as much as can be on the host."""
    base = space.base
    knobs = replace(base.knobs, data_parallel=sharding, precision=precisions(space)[-1])
    if space.free("knobs.optimizer_offload") and base.chip.architecture != "cpu":
        knobs = replace(knobs, optimizer_offload=1.0)
    return state_bytes(replace(base, layout=layout, knobs=knobs)) <= base.chip.memory_bytes


def _modes(pricer: Pricer, layout: Layout, size: int, ways: list[Knobs], allowed: list[bool]) -> list[Knobs]:
    """For each precision, with and without overlap and graphs, the fastest transport."""
    chosen = []
    for precision, overlap in product(precisions(pricer.space), allowed):
        options = [replace(knobs, ep_overlap=overlap) for knobs in ways if knobs.precision == precision]
        first = options[0]

        def dearness(knobs: Knobs, first: Knobs = first) -> float:
            others = (knobs.dispatcher != first.dispatcher) + (knobs.cp_comm != first.cp_comm)
            return pricer.microbatch_seconds(layout, size, knobs) * (1 + DEFAULT_FAVOUR * others)

        best = min(options, key=dearness)
        chosen += [replace(best, graphs=graphs) for graphs in graph_scopes(pricer.space)]
    return chosen


def with_balanced_stages(pricer: Pricer, one: Priced) -> Priced:
    """The same plan with stages balanced by seconds, where that is clearly faster and fits."""
    plan = one.plan
    layout = plan.layout
    if layout.pp == 1 or layout.stages is not None or not pricer.space.free("layout.stages"):
        return one
    layers, mtp, loss = pricer.parts(plan)
    weights = [layers[kind] for kind in plan.model.layers]
    chunks = balance(len(weights), layout.chunks, plan.mtp, weights, 0.0, mtp, loss)
    if chunks == plan.chunks or any(not str(chunk) for chunk in chunks):
        return one
    other = pricer.priced(replace(plan, layout=replace(layout, stages=format_stages(chunks))))
    better = other.tokens_per_second > one.tokens_per_second * (1 + MIN_STAGE_GAIN)
    return other if better and other.device_bytes <= pricer.limit else one
