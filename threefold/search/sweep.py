"""One field of a plan varied: what each value needs and reaches, and what stops being right on the way."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from threefold.cost.cp_exchange import resolve_exchange
from threefold.cost.estimate import Estimate, estimate
from threefold.fields import MAX_RANKS
from threefold.findings import Finding, FindingsError
from threefold.notebook import ShownAsTable
from threefold.plan.parse import change
from threefold.plan.plan import Plan
from threefold.remedies.advise import Advice
from threefold.rules.all import advice, blockers, check, errors, judge
from threefold.rules.layout.batch import batch_step
from threefold.rules.layout.context import SHARD_TOKENS, target_cp
from threefold.search.recompute import resolve_recompute

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Point:
    """The plan at one value, with what had to move along."""

    value: Any
    plan: Plan
    moved: Fields
    findings: tuple[Finding, ...]
    estimate: Estimate | None  # absent where the rules refuse the plan
    more_gpus: bool  # the count of the plan gave out; this is the smallest that works

    @property
    def is_right(self) -> bool:
        """Whether the rules accept the plan and it fits."""
        return self.estimate is not None and self.estimate.fits

    @property
    def lacks_memory(self) -> bool | None:
        """None where the plan is refused for another reason, so that its memory is not known."""
        if self.estimate is None:
            return True if any(finding.rule == "states-fit-memory" for finding in self.findings) else None
        return not self.estimate.fits

    @property
    def advice(self) -> tuple[Advice, ...]:
        """What could help the plan there."""
        return advice(self.plan) if self.estimate else ()

    @property
    def verdict(self) -> str:
        parts = [f"needs {self.plan.layout.gpus} GPUs"] if self.more_gpus else []
        if self.estimate is None:
            parts.append("refused: " + ", ".join(dict.fromkeys(f.rule for f in blockers(self.findings))))
        elif self.estimate.headroom_bytes < 0:
            parts.append("does not fit")
        elif self.estimate.device_bytes_band[1] > self.plan.chip.memory_bytes:
            parts.append("fits, but not at the top of the band")
        else:
            parts.append("fits")
        return ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        layout = self.plan.layout
        return {
            "value": self.value,
            "gpus": layout.gpus,
            "degrees": {axis: layout.degree(axis) for axis in ("tp", "cp", "pp", "dp", "ep", "edp")},
            "global_batch": self.plan.job.global_batch,
            "moved": self.moved,
            "needs_more_gpus": self.more_gpus,
            "verdict": self.verdict,
            "findings": [finding.to_json() for finding in self.findings],
            "estimate": self.estimate.to_json() if self.estimate else None,
            "advice": [piece.to_json() for piece in self.advice],
        }


@dataclass(frozen=True, slots=True)
class Outgrown:
    """A setting of the first point that is right, where it is wrong at another value."""

    value: Any
    finding: Finding
    moved_along: bool  # the sweep itself set it right

    def to_json(self) -> dict[str, Any]:
        return {"value": self.value, "moved_along": self.moved_along, **self.finding.to_json()}


@dataclass(frozen=True, slots=True, repr=False)
class Sweep(ShownAsTable):
    path: str
    points: tuple[Point, ...]
    outgrown: tuple[Outgrown, ...]

    def summary(self) -> str:
        return f"{self.path} at {len(self.points)} values, {sum(point.is_right for point in self.points)} fit"

    def table(self) -> tuple[list[str], list[list[str]]]:
        rows = [
            [str(point.value), f"{point.estimate.model_tflops_per_gpu:.0f}" if point.estimate else "-", point.verdict]
            for point in self.points
        ]
        return [self.path, "TFLOP/s a GPU", "verdict"], rows

    @property
    def right(self) -> Point | None:
        """The first point that the rules accept and that fits."""
        return next((point for point in self.points if point.is_right), None)

    @property
    def dp_gone(self) -> Point | None:
        """Where DP goes to 1 for good, where it began above."""
        began = self.points[0].plan.layout.dp
        return _gone([(point, began > 1 and point.plan.layout.dp == 1) for point in self.points])

    @property
    def gpus_gone(self) -> Point | None:
        return _gone([(point, point.more_gpus) for point in self.points])

    @property
    def memory_gone(self) -> Point | None:
        return _gone([(point, point.lacks_memory) for point in self.points])

    @property
    def short_of_memory(self) -> tuple[Point, ...]:
        """The points that lack memory although a later one does not."""
        known = [point for point in self.points if point.lacks_memory is not None]
        enough = [place for place, point in enumerate(known) if not point.lacks_memory]
        return tuple(point for point in known[: enough[-1]] if point.lacks_memory) if enough else ()

    def to_json(self) -> dict[str, Any]:
        gone = {"dp": self.dp_gone, "gpus": self.gpus_gone, "memory": self.memory_gone}
        return {
            "over": self.path,
            "right_at": self.right.value if self.right else None,
            "points": [point.to_json() for point in self.points],
            "outgrown": [one.to_json() for one in self.outgrown],
            "gives_out": {what: point.value if point else None for what, point in gone.items()},
        }


def _gone(points: Sequence[tuple[Point, bool | None]]) -> Point | None:
    """The first of the last points that lack something, None where the last one does not. Unknown ones are passed."""
    known = [(point, lacks) for point, lacks in points if lacks is not None]
    lacking = list(takewhile(lambda pair: pair[1], reversed(known)))
    return lacking[-1][0] if lacking else None


def sweep(plan: Plan, settings: Sequence[Mapping[str, Any]]) -> Sweep:
    """Estimate the plan with each setting in turn; the first field of a setting is the one swept.

    Raises findings where a value makes no plan at all.
    """
    points = tuple(_point(plan, dict(fields)) for fields in settings)
    return Sweep(next(iter(settings[0])), points, tuple(_outgrown(points, settings)))


def _point(plan: Plan, fields: Fields) -> Point:
    value = next(iter(fields.values()))
    if change(plan, fields).job.seq_len == plan.job.seq_len or "layout.cp" in fields:
        return _settled(plan, value, fields, {})
    tried = [_settled(plan, value, fields, {"layout.cp": cp}) for cp in _context_degrees(change(plan, fields))]
    alike = [point for point in tried if point.more_gpus == tried[0].more_gpus]
    return next((point for point in alike if point.estimate and point.estimate.fits), tried[0])


def _settled(plan: Plan, value: Any, fields: Fields, along: Fields) -> Point:
    """The plan at a value, with whatever must follow: stage layout, GPU count, global batch, what meets a budget."""
    here = change(plan, {**fields, **along})
    moved = {path: new for path, new in along.items() if new != dict(plan.written).get(path, 1)}

    def move(now: Plan, more: Fields) -> Plan:
        moved.update(more)
        return change(now, more)

    if here.layout.chunks != plan.layout.chunks and here.layout.stages and "layout.stages" not in fields:
        here = move(here, {"layout.stages": None})
    floor = here.layout.min_gpus
    ranks = -(-here.layout.gpus // floor) * floor
    more_gpus = "cluster.gpus" not in fields and not here.layout.fits_ranks and ranks <= MAX_RANKS
    if more_gpus:
        here = move(here, {"cluster.gpus": ranks})
    if "job.global_batch" not in fields and (batch := _batch(plan, here)) != here.job.global_batch:
        here = move(here, {"job.global_batch": batch})
    try:
        here, chosen = resolve_recompute(resolve_exchange(here))
    except FindingsError as error:
        return Point(value, here, moved, tuple(error.findings), None, more_gpus)
    if chosen:
        moved["knobs.recompute"] = here.knobs.recompute
    found = (*chosen, *check(here, notes=False))
    guess = None if blockers(found) else estimate(here)
    return Point(value, here, moved, found, guess, more_gpus)


def _context_degrees(plan: Plan) -> list[int]:
    """CP for the 4K shard target beside TP, then larger ones down to 2K shards, where memory asks for it."""
    seq, tp = plan.job.seq_len, plan.layout.tp
    allowed = [2**i for i in range(20) if seq % ((2 * 2**i if i else 1) * tp) == 0]
    wanted = max((cp for cp in allowed if cp <= max(1, target_cp(seq) // tp)), default=1)
    return [wanted, *(cp for cp in allowed if cp > wanted and 2 * seq >= cp * SHARD_TOKENS)]


def _batch(before: Plan, now: Plan) -> int:
    """The global batch that keeps the tokens of a step, as near as whole microbatches allow."""
    step = batch_step(now)
    if now.job.seq_len != before.job.seq_len:
        return max(1, round(before.tokens_per_step / now.job.seq_len / step)) * step
    uneven = any(finding.at == "job.global_batch" for finding in errors(judge(now)))
    return max(1, round(now.job.global_batch / step)) * step if uneven else now.job.global_batch


def _outgrown(points: Sequence[Point], settings: Sequence[Mapping[str, Any]]) -> Iterator[Outgrown]:
    """Findings about the first right plan at another value, or about that value's own plan, each once.

    Where no plan is right, the errors of all of them.
    """
    right = next((point for point in points if point.is_right), None)
    seen = {(finding.rule, finding.at) for finding in right.findings} if right else set()
    seen.add(("recompute-chosen", "knobs.recompute"))
    for point, fields in zip(points, settings, strict=True):
        if point is right:
            continue
        own = {(finding.rule, finding.at) for finding in point.findings}
        named = {path: point.moved.get(path, value) for path, value in fields.items()}  # in place of a budget
        carried = check(change(right.plan, named), notes=False) if right else []
        for finding in [*carried, *(point.findings if right else errors(point.findings))]:
            key = (finding.rule, finding.at)
            if key not in seen:
                seen.add(key)
                yield Outgrown(point.value, finding, key not in own)
