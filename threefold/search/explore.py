"""Best first: choices in the order of what they promise, until no promise can change the answer."""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby

from threefold.cost.memory_ladder import state_bytes
from threefold.layout.degrees import Layout
from threefold.layout.stages import balance, format_stages
from threefold.plan.plan import Knobs, Plan
from threefold.search.knobs import context_types, dispatchers, foot, graph_scopes, overlaps, precisions, shardings
from threefold.search.ladder import Choice, Ladder
from threefold.search.legal import faults
from threefold.search.price import Priced, Pricer
from threefold.search.space import Space, layouts, micro_batches

MIN_STAGE_GAIN = 0.005  # a predicted gain from which a written pipeline layout is worth its line

WINDOW = 0.03  # below the last one that is asked for, how far promises are still followed: finishing may add as much
RING_FAVOUR = 0.01  # another kind of context parallelism than the plain ring has to be this much faster
GRAPH_GAIN = 0.002  # of a microbatch's seconds that graphs have to save
MOST_CLIMBS, MOST_EFFORT = 2000, 550.0  # climbs, and estimates of memory in them: a few seconds
REPORT_EVERY = 50
BALANCED = 0.03  # that stages balanced by seconds may gain

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
    floor: float = 0.0  # tokens/s at the slow end of the band below which promises change nothing
    climbs: int = 0


def layout_key(layout: Layout, knobs: Knobs) -> Key:
    """What makes two candidates different plans, and not two settings of one."""
    return (layout.tp, layout.cp, layout.pp, layout.ep, layout.etp, knobs.data_parallel, knobs.precision)


def explore(pricer: Pricer, top: int, progress: Progress | None = None) -> Found:
    """Find the fastest fitting plan of each layout that can be among the first `top`."""
    found = Found()
    heap = [(-choice.sure_promise, False, number, choice) for number, choice in enumerate(_choices(pricer, found))]
    heapq.heapify(heap)
    total = len(heap)
    while heap and -heap[0][0] >= found.floor and found.climbs < MOST_CLIMBS and pricer.effort < MOST_EFFORT:
        _, priced, number, choice = heapq.heappop(heap)
        if not priced:  # the step itself promises less than its layers do; what is left comes up again in its turn
            if found.ladder and found.ladder.can_fit(choice):
                choice = _with_step(pricer, choice)
                heapq.heappush(heap, (-choice.sure_promise, True, number, choice))
        elif found.ladder and _follow(pricer, found.ladder, choice, found):
            if progress and found.climbs % REPORT_EVERY == 0:
                progress(f"{total - len(heap):,} of {total:,} choices, {found.feasible:,} feasible")
            found.climbs += 1
            found.floor = _floor(found, top)
    if progress:
        progress(f"{total:,} of {total:,} choices, {found.feasible:,} feasible")
    return found


def _with_step(pricer: Pricer, choice: Choice) -> Choice:
    """The choice with the promise of its whole step at the foot of the ladder; other rungs are slower."""
    plan = pricer.plan(choice.layout, choice.micro_batch, choice.knobs)
    promise = min(choice.promise, pricer.speed(plan) * (1 + BALANCED if choice.layout.pp > 1 else 1.0))
    return replace(choice, promise=promise, sure_promise=promise * choice.sure_promise / choice.promise)


def _floor(found: Found, top: int) -> float:
    """Promises below this do not come among the first `top`."""
    if len(found.best) < top:
        return 0.0
    return (1 - WINDOW) * heapq.nlargest(top, (one.sure for one in found.best.values()))[-1]


def _follow(pricer: Pricer, ladder: Ladder, choice: Choice, found: Found) -> bool:
    """Climb the ladder of a choice where that can improve its layout; whether it was climbed."""
    key = layout_key(choice.layout, choice.knobs)
    known = found.best.get(key)
    bar = found.floor * choice.promise / choice.sure_promise
    if known and not (is_last_resort(known.plan) and ladder.mild_fits(choice)):  # nothing milder is to be found
        bar = max(bar, known.tokens_per_second)
    if choice.promise <= bar:
        return False
    plan, short = ladder.climb(choice, bar)
    if short is not None:
        found.short.append(short)
    if plan is None:
        return True
    found.feasible += 1
    one = with_balanced_stages(pricer, pricer.priced(plan))
    if (known is None or _better(one, known)) and not faults(one.plan):
        found.best[key] = one
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
    known: dict[object, list[tuple[Knobs, float]]] = {}
    formats = precisions(space)
    for _, group in groupby(layouts(space), key=lambda one: (one.pp, one.tp, one.cp, one.ep, one.etp)):
        same = list(group)
        kept = {name: _states_fit(space, same[0], name) for name in shardings(space, same[0])}
        feet = [foot(space, same[0], precision) for precision in formats]
        num_ways = len(formats) * len(dispatchers(space, same[0])) * len(context_types(space, same[0]))
        for layout in same:
            allowed = overlaps(space, layout)
            for size in micro_batches(space, layout):
                if found.ladder is None:
                    found.ladder = Ladder(pricer, Choice(layout, size, feet[0]))
                key = (layout.tp, layout.cp, layout.ep, layout.etp, size, tuple(allowed))
                if key not in known:
                    modes = (mode for knobs in feet for mode in _modes(pricer, layout, size, knobs, allowed))
                    known[key] = [(mode, pricer.microbatch_seconds(layout, size, mode)) for mode in modes]
                found.searched += len(kept) * num_ways * 2 * len(allowed) * len(found.ladder)
                for knobs, seconds in known[key]:
                    promise = pricer.promise_of(layout, size, seconds)
                    for sharding in (name for name, fits in kept.items() if fits):
                        if knobs.graphs and sharding != "zero1" and space.base.target == "threefold":
                            continue  # our engine records no graph of weights that move (engine-has-graphs)
                        mode = replace(knobs, data_parallel=sharding) if sharding != knobs.data_parallel else knobs
                        yield Choice(layout, size, mode, promise, promise / pricer.slow_end(layout, mode))


def _states_fit(space: Space, layout: Layout, sharding: str) -> bool:
    """The cheap lower bound: weights, gradients and optimizer states, as much as can be on the host."""
    base = space.base
    knobs = replace(base.knobs, data_parallel=sharding, precision=precisions(space)[-1])
    if space.free("knobs.optimizer_offload") and base.chip.architecture != "cpu":
        knobs = replace(knobs, optimizer_offload=1.0)
    return state_bytes(replace(base, layout=layout, knobs=knobs)) <= base.chip.memory_bytes


def _modes(pricer: Pricer, layout: Layout, size: int, knobs: Knobs, allowed: list[bool]) -> Iterator[Knobs]:
    """With and without overlap and graphs, the fastest transport for a precision; graphs only where they save time."""
    space = pricer.space

    def seconds(knobs: Knobs) -> float:
        return pricer.microbatch_seconds(layout, size, knobs)

    ring, key = knobs.cp_comm, (layout.tp, layout.cp, knobs.precision)
    if key not in pricer.cp_comms:
        kinds = [replace(knobs, cp_comm=kind) for kind in context_types(space, layout)]
        best = min(kinds, key=lambda one: seconds(one) * (1 + RING_FAVOUR * (one.cp_comm != ring)))
        pricer.cp_comms[key] = best.cp_comm
    knobs = replace(knobs, cp_comm=pricer.cp_comms[key])
    for overlap in allowed:
        plain = replace(knobs, ep_overlap=overlap)
        ways = [replace(plain, dispatcher=name) for name in dispatchers(space, layout)]
        mode = min(ways, key=lambda way: seconds(way) * pricer.slow_end(layout, way))
        fastest = seconds(mode)
        for graphs in graph_scopes(space, layout, mode):
            graphed = replace(mode, graphs=graphs)
            saves = seconds(graphed) < fastest * (1 - GRAPH_GAIN)
            fastest = min(fastest, seconds(graphed))
            if graphed == mode or not space.free("knobs.graphs") or saves:
                yield graphed


def _with_written_stages(pricer: Pricer, plan: Plan) -> Plan | None:
    """The plan with stages balanced by seconds, where that gives other stages than those by number of layers."""
    layout = plan.layout
    if layout.pp == 1 or layout.stages is not None or not pricer.space.free("layout.stages"):
        return None
    layers, mtp, loss = pricer.parts(plan)
    weights = [layers[kind] for kind in plan.model.layers]
    chunks = balance(len(weights), layout.chunks, plan.mtp, weights, 0.0, mtp, loss)
    if chunks == plan.chunks or any(not str(chunk) for chunk in chunks):
        return None
    return replace(plan, layout=replace(layout, stages=format_stages(chunks)))


def with_balanced_stages(pricer: Pricer, one: Priced) -> Priced:
    """The same plan with stages balanced by seconds, where that is clearly faster and fits."""
    other = _with_written_stages(pricer, one.plan)
    if other is None:
        return one
    if pricer.speed(other) <= one.tokens_per_second * (1 + MIN_STAGE_GAIN) or pricer.need(other) > pricer.limit:
        return one
    return pricer.priced(other)
