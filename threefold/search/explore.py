"""Candidates of a space: a race for the fastest plan, then the layouts that the recommended order prefers.

The race follows choices in the order of what they promise, until no promise can beat the fastest plan that fits. What
the estimate cannot tell from that one is looked at in the recommended order (`rank.py`), until enough layouts fit.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from threefold.cost.fit import state_bytes
from threefold.layout.degrees import Layout
from threefold.layout.stages import balance, format_stages
from threefold.plan.plan import Knobs, Plan
from threefold.search.knobs import context_types, dispatchers, foot, graph_scopes, overlaps, precisions, shardings
from threefold.search.ladder import Choice, Ladder
from threefold.search.legal import faults
from threefold.search.price import Priced, Pricer
from threefold.search.published_layouts import PublishedLayout, nearest_published
from threefold.search.rank import PAIR_ERROR, are_told_apart, fastest_of, is_member, pair_band, resort, structure
from threefold.search.space import Space, layouts, micro_batches

RING_FAVOR = 0.01  # another kind of context parallelism than the plain ring has to be this much faster
GRAPH_GAIN = 0.002  # of a microbatch's seconds that graphs have to save
RACE_EFFORT, WALK_EFFORT = 80.0, 80.0  # estimates of memory: a second or less each
MOST_CLIMBS = 1000
CHUNK_TIE = 0.01  # of throughput: what more chunks a rank have to gain
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
    climbs: int = 0


def layout_key(layout: Layout, knobs: Knobs) -> Key:
    """What makes two candidates different plans, and not two settings of one."""
    return (layout.tp, layout.cp, layout.pp, layout.ep, layout.etp, knobs.data_parallel, knobs.precision)


def explore(pricer: Pricer, top: int, progress: Progress | None = None) -> Found:
    """Find the fastest plan that fits, and the first `top` layouts that the estimate cannot tell from it."""
    found = Found()
    choices = list(_choices(pricer, found))
    if progress:
        progress(f"0 of {len(choices):,} choices")
    _race(pricer, found, choices)
    if progress:
        progress(f"{found.climbs:,} of {len(choices):,} choices, {found.feasible:,} feasible")
    _walk(pricer, found, choices, top)
    if progress:
        progress(f"{found.climbs:,} of {len(choices):,} choices, {found.feasible:,} feasible")
    return found


def _race(pricer: Pricer, found: Found, choices: list[Choice]) -> None:
    """Follow the most promising choices until none promises more than the fastest plan that fits."""
    heap = [(-choice.sure_promise, False, number, choice) for number, choice in enumerate(choices)]
    heapq.heapify(heap)
    floor = 0.0
    while heap and -heap[0][0] > floor and found.climbs < MOST_CLIMBS and pricer.effort < RACE_EFFORT:
        _, priced, number, choice = heapq.heappop(heap)
        if not priced:  # the step itself promises less than its layers do; what is left comes up again in its turn
            if found.ladder and found.ladder.can_fit(choice):
                choice = _with_step(pricer, choice)
                heapq.heappush(heap, (-choice.sure_promise, True, number, choice))
        else:
            _follow(pricer, choice, found, floor * choice.promise / choice.sure_promise)
            floor = max((one.sure for one in found.best.values()), default=0.0)


def _walk(pricer: Pricer, found: Found, choices: list[Choice], top: int) -> None:
    """Follow the choices of layouts in the recommended order until `top` layouts are among the first group; those that
    need full recompute or offload only where none does without."""
    by_layout: dict[Key, list[Choice]] = {}
    for choice in choices:
        by_layout.setdefault(layout_key(choice.layout, choice.knobs), []).append(choice)
    plans = {key: pricer.plan(some[0].layout, 1, some[0].knobs) for key, some in by_layout.items()}
    anchors = nearest_published(next(iter(plans.values()))) if plans else ()
    order = sorted(plans, key=lambda key: [each.value for each in structure(plans[key], anchors)])
    if anchors:  # what was published is priced whatever it needs, so that an answer can be compared with it
        _settle(pricer, found, order[0], _ways(by_layout[order[0]], anchors), 0.0)
    for mild in (True, False):
        most, walked = pricer.effort + WALK_EFFORT, set[Key]()
        for key in order:
            first = fastest_of(found.best.values())
            inside = [
                one for at, one in found.best.items() if at in walked and first and is_member(one, first, anchors)
            ]
            if sum(not (mild and resort(one.plan)) for one in inside) >= top or pricer.effort > most:
                break
            walked.add(key)
            bar = first.tokens_per_second / (1 + pair_band(first.plan)) if first else 0.0
            if not anchors or key != order[0]:
                _settle(pricer, found, key, _ways(by_layout[key], anchors), bar, mild)
        first = fastest_of(found.best.values())
        if first and any(not resort(one.plan) and is_member(one, first, anchors) for one in found.best.values()):
            break


def _settle(pricer: Pricer, found: Found, key: Key, ways: list[Choice], bar: float, mild: bool = False) -> None:
    """Find the best plan of one layout; one that the race found stays only where it is clearly faster."""
    known = found.best.pop(key, None)
    for choice in ways:
        if found.ladder and (found.ladder.mild_fits(choice) if mild else found.ladder.can_fit(choice)):
            _follow(pricer, choice, found, bar, False if mild else None)
    if not bar and key not in found.best:
        for choice in ways:
            _follow(pricer, choice, found, bar, True)
    now = found.best.get(key)
    if known and (now is None or known.tokens_per_second > now.tokens_per_second * (1 + CHUNK_TIE)):
        found.best[key] = known


def _ways(choices: list[Choice], anchors: Sequence[PublishedLayout]) -> list[Choice]:
    """The choices of a layout, the most promising microbatch and mode first. Of each the smallest number of chunks that
    promises nearly as much as the best, before it the one that was published, and after it the fewest, which hold the
    least in flight."""
    first: dict[object, list[Choice]] = {}
    for choice in sorted(choices, key=lambda choice: -choice.promise):
        first.setdefault((choice.micro_batch, choice.knobs), []).append(choice)
    published = {(anchor.pp, anchor.vpp) for anchor in anchors}
    ways: dict[int, Choice] = {}

    def chunks(choice: Choice) -> int:
        return choice.layout.vpp

    for same in first.values():
        known = [one for one in same if (one.layout.pp, one.layout.vpp) in published]
        near = [one for one in same if one.promise >= same[0].promise * (1 - CHUNK_TIE)]
        for one in (*sorted(known, key=chunks)[:1], min(near, key=chunks), min(same, key=chunks)):
            ways.setdefault(id(one), one)
    return list(ways.values())


def _with_step(pricer: Pricer, choice: Choice) -> Choice:
    """The choice with the promise of its whole step at the foot of the ladder; other rungs are slower."""
    plan = pricer.plan(choice.layout, choice.micro_batch, choice.knobs)
    promise = min(choice.promise, pricer.speed(plan) * (1 + BALANCED if choice.layout.pp > 1 else 1.0))
    return replace(choice, promise=promise, sure_promise=promise * choice.sure_promise / choice.promise)


def _follow(pricer: Pricer, choice: Choice, found: Found, bar: float, resorts: bool | None = None) -> None:
    """Climb the ladder of a choice where that can improve its layout past the bar, in tokens/s; `resorts` as there."""
    ladder = found.ladder
    key = layout_key(choice.layout, choice.knobs)
    known = found.best.get(key)
    if ladder is None:
        return
    if known and not (is_last_resort(known.plan) and ladder.mild_fits(choice)):  # nothing milder is to be found
        bar = max(bar, known.tokens_per_second)
    if choice.promise <= bar:
        return
    found.climbs += 1
    plan, short = ladder.climb(choice, bar, resorts)
    if short is not None:
        found.short.append(short)
    if plan is None:
        return
    found.feasible += 1
    one = with_balanced_stages(pricer, pricer.priced(plan))
    if (known is None or _better(one, known)) and not faults(one.plan):
        found.best[key] = one


def is_last_resort(plan: Plan) -> bool:
    """Full recompute or offload: taken only where nothing milder fits the layout."""
    return plan.full_recompute or plan.knobs.optimizer_offload > 0


def _better(one: Priced, known: Priced) -> bool:
    """Whether a plan is the better one of its layout: the milder, where the estimate cannot tell last resorts apart."""
    if is_last_resort(one.plan) != is_last_resort(known.plan) or not is_last_resort(one.plan):
        return (is_last_resort(known.plan), one.tokens_per_second) > (is_last_resort(one.plan), known.tokens_per_second)
    if are_told_apart(one, known) or are_told_apart(known, one):
        return one.tokens_per_second > known.tokens_per_second
    return (-resort(one.plan), one.tokens_per_second) > (-resort(known.plan), known.tokens_per_second)


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
        best = min(kinds, key=lambda one: seconds(one) * (1 + RING_FAVOR * (one.cp_comm != ring)))
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
    """The same plan with stages balanced by seconds, where the estimate is sure that they are faster, and they fit."""
    other = _with_written_stages(pricer, one.plan)
    if other is None:
        return one
    if pricer.speed(other) <= one.tokens_per_second * (1 + PAIR_ERROR) or pricer.need(other) > pricer.limit:
        return one
    return pricer.priced(other)
