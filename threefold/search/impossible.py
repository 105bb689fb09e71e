"""Where no plan exists: one finding that says why, with the nearest change under which one does."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

from threefold.cost.fit import state_bytes
from threefold.fields import MAX_RANKS
from threefold.findings import Finding, FindingsError, as_overrides
from threefold.plan.plan import Plan
from threefold.search.knobs import foot, precisions, shardings
from threefold.search.ladder import Choice, Ladder
from threefold.search.legal import UNTRAINED, faults, untrained
from threefold.search.price import Pricer
from threefold.search.space import MOST_RELAXED, Space, layouts, micro_batches, read_draft
from threefold.spec.chips import CHIPS
from threefold.spec.stacks import TARGETS
from threefold.units import format_bytes, format_tokens

SLUG = "plan-exists"
MOST_TRIED = 40  # layouts of one space, those with the least states first
MOST_DOUBLINGS = 10
MOST_WAYS = 6  # of one fault that are looked at
MEMORY_KNOBS = ("knobs.recompute", "knobs.optimizer_offload")  # freed first
BATCH = ("job.global_batch", "job.micro_batch")


@dataclass(frozen=True, slots=True)
class Leanest:
    """The plan of a space that needs the least memory."""

    plan: Plan
    need: float

    @property
    def fits(self) -> bool:
        return self.need <= self.plan.chip.memory_bytes


def leanest(space: Space) -> Leanest | None:
    """The plan that needs the least memory, or the first that fits; None where no layout is legal."""
    pricer = Pricer(space)
    ladder: Ladder | None = None
    found: Leanest | None = None
    for choice in sorted(_smallest(space), key=lambda one: state_bytes(_plan(pricer, one)))[:MOST_TRIED]:
        ladder = ladder or Ladder(pricer, choice)
        for plan in ladder.lightest(choice):
            if faults(plan):  # asked first: an estimate of memory takes longer
                continue
            one = Leanest(plan, pricer.need(plan))
            if found is None or one.need < found.need:
                found = one
                if one.fits:
                    return one
    return found


def _smallest(space: Space) -> Iterator[Choice]:
    """Every layout without chunks, at its smallest microbatch, with each way to shard."""
    for layout in layouts(space):
        sizes = micro_batches(space, layout)
        if not sizes or (layout.vpp > 1 and space.free("layout.vpp")):
            continue
        knobs = foot(space, layout, precisions(space)[0])
        for sharding in shardings(space, layout):
            yield Choice(layout, sizes[0], replace(knobs, data_parallel=sharding))


def _plan(pricer: Pricer, choice: Choice) -> Plan:
    return pricer.plan(choice.layout, choice.micro_batch, choice.knobs)


def finding(space: Space, refused: Sequence[Finding] = ()) -> Finding:
    """Why no plan exists, and the nearest change. `refused`: what refused the last candidates, where that is known."""
    space = replace(space, relaxed=MOST_RELAXED)
    best = None if refused else leanest(space)
    bad = list(refused)
    if best is None and not bad:
        bad = _of_the_draft(space, faults(_spread(space)))
    fix, advice = _nearest(space, list(_offered(space, bad)))
    if refused:
        problem = f"no plan for {space.base.model.name}: {bad[0].problem} ({bad[0].rule})"
        advice = advice if fix else bad[0].advice
    elif best is not None:
        plan = best.plan
        need, have = format_bytes(best.need), format_bytes(plan.chip.memory_bytes)
        where = f"{plan.layout.gpus} x {plan.chip.name}"
        problem = (
            f"no plan for {plan.model.name} at {format_tokens(plan.job.seq_len)} tokens fits {where}: "
            f"the leanest ({_words(plan)}) needs {need} of {have} a GPU"
        )
    elif bad:
        problem = f"no layout keeps what the draft fixes: {bad[0].problem} ({bad[0].rule})"
    else:
        problem = f"no layout of {space.gpus} GPUs divides the model and the batch of {space.base.job.global_batch}"
    at = next(iter(fix)) if fix else bad[0].at if bad else "cluster.gpus"
    return Finding(rule=SLUG, at=at, problem=problem, fix=fix, advice=advice)


def _spread(space: Space) -> Plan:
    """The base of a space, with experts spread where that is free: EP 1 is not the draft's wish."""
    plan, experts = space.base, space.base.model.num_experts
    if not experts or not space.free("layout.ep"):
        return plan
    return replace(plan, layout=replace(plan.layout, gpus=plan.layout.pp * experts, ep=experts))


def _of_the_draft(space: Space, bad: list[Finding]) -> list[Finding]:
    """Faults of what the draft fixes first. A fault that a free field cures is the search's own affair: it comes
    last."""

    def is_own_affair(one: Finding) -> bool:
        ways = islice(chain([one.fix or {}], one.fixes), MOST_WAYS)
        return one.at in ("cluster.gpus", *BATCH) or any(way and all(map(space.free, way)) for way in ways)

    return sorted(bad, key=lambda one: (is_own_affair(one), one.at not in space.given))


def _offered(space: Space, bad: Iterable[Finding]) -> Iterator[dict[str, Any]]:
    """Changes that the rules offer; where the target does not train the model, another target."""
    for one in bad:
        if one.rule not in UNTRAINED:
            yield one.fix_data or {}
            continue
        for target in TARGETS:
            if target != space.base.target:
                yield {"target": target}
                yield from ({"target": target, **more} for more in _more_gpus(space))


def _words(plan: Plan) -> str:
    layout, knobs = plan.layout, plan.knobs
    axes = [
        f"{axis.upper()} {layout.degree(axis)}" for axis in ("tp", "cp", "pp", "ep", "etp") if layout.degree(axis) > 1
    ]
    recompute = ["recompute of " + ", ".join(knobs.recompute)] if knobs.recompute else []
    offload = ["optimizer on the host"] if knobs.optimizer_offload else []
    sharding = [knobs.data_parallel] if knobs.data_parallel != "zero1" else []
    return ", ".join([*axes, *sharding, *recompute, *offload]) or "no parallelism"


def _nearest(space: Space, offered: list[dict[str, Any]]) -> tuple[dict[str, Any] | None, str]:
    """The first change that gives a plan is the fix, one of another kind advice.

    In order: free one fixed field, what a rule offers, more GPUs, a larger chip, free all fields, that and more GPUs.
    """
    fixed = [path for path in space.given if path.startswith(("layout.", "knobs.")) or path in BATCH]
    fixed = [path for path in fixed if path != "knobs.precision"]  # what it buys is accuracy, not room
    everything: dict[str, Any] = dict.fromkeys(fixed)
    near = [
        ({path: None} for path in sorted(fixed, key=lambda path: (path not in MEMORY_KNOBS, path))),
        offered,
        _more_gpus(space),
        _larger_chips(space),
    ]
    tried = [_first(space, changes) for changes in near]
    found = [fix for place, fix in enumerate(tried) if fix and fix not in tried[:place]]
    if not found and fixed:
        more = ({**everything, **changes} for changes in _more_gpus(space))
        found = [fix for fix in [_first(space, [everything, *more])] if fix]
    if not found:
        return None, "use a smaller model or a shorter sequence"
    return found[0], " ".join(f"or {as_overrides(fix)}" for fix in found[1:])


def _first(space: Space, changes: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    return next((dict(change) for change in changes if change and _exists(space, {**space.given, **change})), None)


def _exists(before: Space, given: Mapping[str, Any]) -> bool:
    fields = {path: value for path, value in given.items() if value is not None}
    try:
        space = read_draft(fields, before.base.cluster.measured)
    except FindingsError:
        return False
    if untrained(space.base):
        return False
    found = leanest(replace(space, relaxed=MOST_RELAXED))
    return found is not None and found.fits


def _more_gpus(space: Space) -> Iterator[dict[str, Any]]:
    counts = (space.gpus * 2**i for i in range(1, MOST_DOUBLINGS + 1))
    yield from ({"cluster.gpus": gpus} for gpus in counts if gpus <= MAX_RANKS)


def _larger_chips(space: Space) -> Iterator[dict[str, Any]]:
    """Chips with more memory, the smallest first."""
    have = space.base.chip.memory_bytes
    larger = [chip for chip in CHIPS.values() if chip.memory_bytes > have]
    yield from ({"cluster.chip": chip.name} for chip in sorted(larger, key=lambda chip: (chip.memory_bytes, chip.name)))
