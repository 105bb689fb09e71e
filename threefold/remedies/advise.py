"""Advice about a plan: remedies of the catalogue that hold on it, the same for every verb.

`advise` tries remedies one by one: those for what was seen in a run, then for the bottleneck that binds, then for the
others, for a change that gains is worth a trial whatever binds. A remedy is advised where it brings no finding and, for
memory, makes enough room, or else gains more than `WORTH`. Of the ways of one remedy the mildest that makes room, or
the one that gains most, is named. The judge is passed in (`rules/fixes.py`), and so is the evidence.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol

from threefold.cost.estimate import MEMORY_BOUND, wall_scores
from threefold.cost.fit import fits, surely_fits
from threefold.cost.memory.by_stack import memory
from threefold.cost.rates import rates_of
from threefold.cost.time.step import step_time
from threefold.findings import Changes, Finding, as_overrides
from threefold.plan.plan import Plan
from threefold.remedies.catalogue import CATALOGUE, TIME_WALLS, Remedy
from threefold.remedies.evidence import NOTHING_SEEN, Evidence
from threefold.remedies.for_memory import can_ever_fit, whole
from threefold.remedies.trial import LITTLE, Trial

WORTH = 0.002  # predicted gain of throughput from which a change is advised, by every verb
MOST_ADVICE = 3  # pieces that are shown
_MOST_JUDGED = 6  # ways of one remedy for memory that make room, of which rules are asked
_MOST_LOOKED_AT = 60  # ways of a further remedy, once one was found


class Trier(Protocol):
    """Tries changes of a plan; `rules.fixes.Trials` is one."""

    def trial(self, changes: Mapping[str, Any]) -> Trial | None:
        """The change tried, with what it brings; None where too many were tried already."""

    def settled(self, changes: Mapping[str, Any]) -> Trial | None:
        """The change with the fields that must move along, where they make it hold."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A remedy, the fields that it sets on this plan, and what the estimate says of them."""

    remedy: Remedy
    wall: str  # the bottleneck that it answers here
    trial: Trial | None = None  # None for what no field does, or where there is no plan
    gain: float | None = None  # of throughput; where time was measured never more than that time allows

    @property
    def changes(self) -> Changes:
        return dict(self.trial.changes) if self.trial else {}

    @property
    def effect(self) -> str:
        """Bytes and time that it changes, with their bands."""
        if self.trial is None:
            return ""
        if self.gain is None:
            return "not priced: measure it"
        if self.wall == "memory":
            return self.trial.price
        gain = f"{self.gain:+.0%}" if self.gain >= LITTLE else f"less than +{LITTLE:.0%}"
        return f"predicted {gain} +- {self.trial.time_band:.0%}"

    def __str__(self) -> str:
        if self.trial is None:
            return self.remedy.what
        return f"{as_overrides(self.changes)} ({self.effect}): {self.remedy.what}"

    def to_json(self) -> dict[str, Any]:
        priced = self.trial if self.gain is not None else None
        return {
            "remedy": self.remedy.name,
            "wall": self.wall,
            "set": self.changes,
            "why": self.remedy.what,
            "numbers": self.remedy.numbers,
            "predicted_gain": self.gain,
            "time_band": priced.time_band if priced else None,
            "freed_bytes": round(priced.freed_bytes) if priced else None,
            "freed_band": [round(end) for end in priced.freed_band] if priced else None,
        }


def advise(plan: Plan, trier: Trier, evidence: Evidence = NOTHING_SEEN) -> Iterator[Advice]:
    """Advice about a plan that can be priced, the first first. Of changes to the same fields the first is kept."""
    known: set[frozenset[str]] = set()
    for advice in _every(plan, trier, evidence):
        fields = frozenset(advice.changes)
        if not fields or fields not in known:
            known.add(fields)
            yield advice


def advise_without_plan(evidence: Evidence) -> Iterator[Advice]:
    """Remedies in words, for the bottlenecks that were seen."""
    for wall in (*evidence.seen, evidence.wall):
        for remedy in _remedies(wall, evidence, evidence.is_cpu is True):
            if not remedy.is_ours and evidence.most_gain(wall, remedy.axes) > WORTH:
                yield Advice(remedy, wall)


def carried(finding: Finding, pieces: Sequence[Advice], note: str = "") -> Finding:
    """A finding with the pieces that set fields: the first as its fix, the others as its alternatives. `note` is more
    to say of the first."""
    fields = [piece for piece in pieces if piece.changes]
    if not fields:
        return finding
    first, *rest = fields
    text = "; ".join(filter(None, [first.effect, note, finding.advice]))
    others = tuple((piece.changes, piece.effect) for piece in rest)
    return replace(finding, fix=first.changes, kind="suggestion", advice=text, alternatives=others, otherwise=None)


def _every(plan: Plan, trier: Trier, evidence: Evidence) -> Iterator[Advice]:
    is_cpu = plan.chip.architecture == "cpu" if evidence.is_cpu is None else evidence.is_cpu
    for wall in evidence.seen:
        yield from (Advice(remedy, wall) for remedy in _remedies(wall, evidence, is_cpu))
    yield from _room(plan, trier, evidence, is_cpu)
    if not evidence.wall and (is_cpu or not fits(plan)):
        return  # nothing is known of a CPU's time, and a plan that does not fit takes none
    seen = [evidence.wall] if evidence.wall in TIME_WALLS else []
    walls = list(dict.fromkeys([*seen, *wall_scores(step_time(plan, rates_of(plan)))]))
    for wall in walls:
        for remedy in _remedies(wall, evidence, is_cpu):
            if remedy.is_priced or wall == walls[0]:
                yield from _faster(plan, trier, evidence, remedy, wall)


def _remedies(wall: str, evidence: Evidence, is_cpu: bool) -> Iterator[Remedy]:
    """Those of the catalogue that answer a bottleneck and are not in use."""
    for remedy in CATALOGUE:
        is_known = wall in remedy.answers and (remedy.on_cpu or not is_cpu)
        if is_known and evidence.kernels.isdisjoint(remedy.kernels) and evidence.may_use(remedy.frees):
            yield remedy


def _faster(plan: Plan, trier: Trier, evidence: Evidence, remedy: Remedy, wall: str) -> Iterator[Advice]:
    """The way that gains most; of those without a price the first."""
    found: Trial | None = None
    most = evidence.most_gain(wall, remedy.axes)
    for way in remedy.ways(plan) if remedy.ways and most > WORTH else ():
        trial = trier.trial(way)
        if trial is None or not trial.is_legal:
            continue
        if not remedy.is_priced:
            yield Advice(remedy, wall, trial)
            return
        if trial.gain > max(WORTH, found.gain if found else 0.0) and _still_fits(plan, trial):
            found = trial
    if found:
        yield Advice(remedy, wall, found, min(found.gain, most))


def _still_fits(plan: Plan, trial: Trial) -> bool:
    return trial.plan is not None and (surely_fits(trial.plan) or not surely_fits(plan))


def _room(plan: Plan, trier: Trier, evidence: Evidence, is_cpu: bool) -> Iterator[Advice]:
    """Remedies that make enough room: for the plan to fit at all, or for a reserve where it nearly fills the memory."""
    have, predicted, has_run = plan.chip.memory_bytes, memory(plan).worst.device_bytes, bool(evidence.wall)
    need = predicted if evidence.device_bytes is None else evidence.device_bytes
    by_estimate = evidence.device_bytes is None and not has_run
    lacks = not surely_fits(plan) if by_estimate else need > have and not has_run
    if not lacks and (evidence.wall != "memory" if has_run else is_cpu or need <= MEMORY_BOUND * have):
        return
    if lacks and by_estimate and not can_ever_fit(plan):
        return

    def is_enough(way: Changes) -> bool:
        changed = whole(plan, way)
        if changed is None or (lacks and by_estimate):
            return changed is not None and surely_fits(changed)
        left = memory(changed).worst.device_bytes - predicted + need
        return left < need and left <= (have if lacks else MEMORY_BOUND * have)

    enough: list[tuple[Remedy, Changes]] = []
    found: list[Changes] = []
    for remedy in _remedies("memory", evidence, is_cpu):
        if remedy.ways is None or not (lacks or remedy.is_mild):
            continue
        ways = (way for way in remedy.ways(plan) if lacks or not any(path.startswith("layout") for path in way))
        ways = (way for way in ways if not any(_includes(way, other) for other in found))
        for way in islice(filter(is_enough, islice(ways, _MOST_LOOKED_AT if found else None)), _MOST_JUDGED):
            enough.append((remedy, way))
            trial = trier.trial(way)
            if trial is not None and trial.is_legal:
                found.append(dict(trial.changes))
                yield Advice(remedy, "memory", trial, trial.gain)
                break
    for remedy, way in [] if found else enough[:_MOST_JUDGED]:
        settled = trier.settled(way)
        if settled is not None and settled.is_legal and is_enough(dict(settled.changes)):
            yield Advice(remedy, "memory", settled, settled.gain)
            return


def _includes(way: Changes, other: Changes) -> bool:
    """Whether a way is another one and more."""
    return all(path in way and way[path] == value for path, value in other.items())
