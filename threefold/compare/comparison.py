"""Two plans, runs or traces compared: contracts, work, speed, losses, walls, and what explains the change.

`threefold compare` calls `compare_sides` and prints the result (`report/compare/`). `Comparison.to_json()` is what
`--json` prints.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from threefold.compare.contract import BENCHMARK, TRAINING, Contract, Difference, differences, refusal
from threefold.compare.explained import Explained, explain_bytes, explain_seconds
from threefold.compare.losses import Losses, compare_losses
from threefold.compare.read_contract import contract_of_facts, contract_of_plan
from threefold.compare.sides import Side, TermRow, estimated_terms, wall_of
from threefold.compare.speed import Speed, compare_speed
from threefold.compare.traced import Traced, compare_traces, trace_remarks
from threefold.compare.work import Unit, Work, unit_of, work_findings, work_of
from threefold.findings import Finding, FindingsError
from threefold.notebook import ShownAsTable
from threefold.plan.plan import Plan
from threefold.profile.readers.run_record import RunRecord
from threefold.remedies.advise import MOST_ADVICE
from threefold.units import format_number

Window = tuple[int, int] | None

# Columns of metrics whose last values are shown: name, unit, column.
_COUNTS = (
    ("skipped steps", "steps", "skipped_steps"),
    ("overflowed steps", "steps", "overflow_steps"),
    ("busiest expert over the mean", "x", "router/load_max"),
)


@dataclass(frozen=True, slots=True)
class Metric:
    """One number of both sides; None where a side does not have it."""

    name: str
    unit: str  # "s", "tokens/s", "images/s", "TFLOP/s", "fraction", "bytes", "steps" or "x"
    a: float | None
    b: float | None

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "unit": self.unit, "a": self.a, "b": self.b}


@dataclass(frozen=True, slots=True, repr=False)
class Comparison(ShownAsTable):
    """What differs between A and B."""

    a: Side
    b: Side
    differences: list[Difference]
    findings: list[Finding]  # warnings; what makes a comparison impossible is raised
    unit: Unit | None  # per what times are compared; None without work
    speed: Speed | None
    losses: Losses | None
    metrics: list[Metric]
    terms: list[TermRow]  # of the estimates
    traced: Traced | None
    seconds: Explained | None
    peak_bytes: Explained | None
    label: str  # whether the faster side could be accepted for training

    def summary(self) -> str:
        sides = f"{self.a.name} against {self.b.name}"
        return f"{sides}: {self.speed.verdict}, B takes {self.speed.ratio:.3f} of A's time" if self.speed else sides

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Each metric of both sides."""
        rows = [[one.name, one.unit, *map(_shown_metric, (one.a, one.b))] for one in self.metrics]
        return ["metric", "unit", "A", "B"], rows

    def to_json(self) -> dict[str, Any]:
        sides = {
            key: {
                "name": side.name,
                "kind": side.kind,
                "wall": wall_of(side),
                "plan": side.plan and side.plan.hash,
                "advice": _advice(side),
            }
            for key, side in (("a", self.a), ("b", self.b))
        }
        return {
            **sides,
            "label": self.label,
            "contract": [each.to_json() for each in self.differences],
            "per": self.unit,
            "speed": self.speed and self.speed.to_json(),
            "losses": self.losses and self.losses.to_json(),
            "metrics": [each.to_json() for each in self.metrics],
            "terms": [each.to_json() for each in self.terms],
            "traced": self.traced and self.traced.to_json(),
            "explained": {
                "step_seconds": self.seconds and self.seconds.to_json(),
                "peak_bytes": self.peak_bytes and self.peak_bytes.to_json(),
            },
            "findings": [each.to_json() for each in self.findings],
        }


def _advice(side: Side) -> list[dict[str, Any]]:
    fixes = side.profile.get("fixes") if side.profile else None
    seen = [each for each in fixes if isinstance(each, dict)] if isinstance(fixes, list) else []
    return seen[:MOST_ADVICE] if side.profile else [piece.to_json() for piece in side.advice]


def _shown_metric(value: float | None) -> str:
    return "-" if value is None else format_number(value)


def compare_sides(
    a: Side,
    b: Side,
    window: Window = None,
    anyway: bool = False,
    dress: Callable[[Plan], Plan] = lambda plan: plan,
    declared: Sequence[str] | None = None,
) -> Comparison:
    """Compare two sides. Raises findings where their work is not comparable, unless `anyway`.

    `window` are the first and last step whose times count; without it the runs' own steady windows do. `dress` gives a
    plan the facts of a chip file. With `declared` fields, any other difference of the contracts is refused.
    """
    findings = [*a.findings, *b.findings, *_pairing_findings(a, b)]
    contracts = [_contract_of(side) for side in (a, b)]
    found = differences(*contracts)
    if declared is not None and (refused := refusal(found, declared)):
        raise FindingsError([refused])
    unequal = work_findings(a, b, "warning" if anyway else "error")
    if unequal and not anyway:
        raise FindingsError(unequal)
    findings += [*unequal, *_run_findings(a, window), *_run_findings(b, window)]
    if a.profile is not None and b.profile is not None:
        findings += trace_remarks(a.profile, b.profile)
    work_a, work_b = work_of(a, window), work_of(b, window)
    speed = unit = None
    if work_a is not None and work_b is not None:
        unit = unit_of(work_a, work_b)
        speed = compare_speed(a, b, work_a, work_b, unit, window)
        findings += _unit_findings(unit, work_a, work_b)
    return Comparison(
        a=a,
        b=b,
        differences=found,
        findings=findings,
        unit=unit,
        speed=speed,
        losses=compare_losses(a.run, b.run) if a.run is not None and b.run is not None else None,
        metrics=[each for each in _metrics(a, b, work_a, work_b, window) if (each.a, each.b) != (None, None)],
        terms=estimated_terms(a, b, _same_work(work_a, work_b, unit)),
        traced=compare_traces(a.profile, b.profile) if a.profile is not None and b.profile is not None else None,
        seconds=explain_seconds(a, b, speed, dress) if speed else None,
        peak_bytes=explain_bytes(a, b, dress),
        label=BENCHMARK if any(each.why_benchmark for each in contracts) else TRAINING,
    )


def _contract_of(side: Side) -> Contract:
    """The contract of a side; a trace states none."""
    if side.plan is None:
        return Contract(side.name, "trace", {})
    return (
        contract_of_facts(side.plan, side.run.contract, side.name)
        if side.run is not None
        else contract_of_plan(side.plan, side.name)
    )


def _pairing_findings(a: Side, b: Side) -> Iterator[Finding]:
    """Raise where the two sides have nothing in common that could be compared."""
    kinds = {a.kind, b.kind}
    if "trace" in kinds and (a.profile is None or b.profile is None):
        lacking = a if a.profile is None else b
        problem = "a trace can be compared with a trace, and this side has none"
        advice = "give the trace of this side too, or the folder of a run that was trained with --profile"
        raise FindingsError([Finding(rule="work-is-comparable", at=lacking.name, problem=problem, advice=advice)])
    if kinds == {"trace"}:
        yield Finding(
            rule="work-is-comparable",
            severity="warning",
            at="span_seconds",
            problem="traces do not say what work they cover: it is taken to be the same",
            advice="give the folders of the runs, whose plans say it",
        )


def _run_findings(side: Side, window: Window) -> Iterator[Finding]:
    """What a run lacks for its step times to mean something."""
    if side.run is None:
        return
    steady = int(side.run.is_steady(window).sum())
    if steady == 0:
        what = f"no step of it is inside {window[0]} to {window[1]}" if window else "no step of it has a time"
        advice = f"its steps are {_steps_text(side.run)}: give --window inside of them, or let it run longer"
        raise FindingsError([Finding(rule="enough-steps", at=side.name, problem=what, advice=advice)])
    if steady < 6:
        yield Finding(
            rule="enough-steps",
            severity="warning",
            at=side.name,
            problem=f"{steady} steady steps are too few to tell a difference from noise",
            advice="let the run take 30 steps or more",
        )


def _steps_text(run: RunRecord) -> str:
    steps = run.columns["step"]
    return f"{steps[0]:.0f} to {steps[-1]:.0f}"


def _unit_findings(unit: Unit, a: Work, b: Work) -> Iterator[Finding]:
    """Say that steps do not do the same work, and what is compared in their place."""
    if unit == "step":
        return
    tokens = f"{a.useful_tokens.mean():,.0f} useful tokens in a step of A, {b.useful_tokens.mean():,.0f} in one of B"
    if a.images is not None and b.images is not None:
        tokens += f"; {a.images.mean():,.4g} and {b.images.mean():,.4g} images"
    flops = f"{a.flops_per_token:.4g} and {b.flops_per_token:.4g} model FLOPs a token"
    yield Finding(
        rule="work-is-comparable",
        severity="warning",
        at="job",
        problem=f"{tokens}; {flops}: times are compared per {unit}",
        advice="give both the same sequence length and batch to compare step with step",
    )


def _same_work(a: Work | None, b: Work | None, unit: Unit | None) -> float:
    """Steps of B that do the work of a step of A."""
    if a is None or b is None or unit is None:
        return 1.0
    return float(a.amount(unit).mean() / b.amount(unit).mean())


def _metrics(a: Side, b: Side, work_a: Work | None, work_b: Work | None, window: Window) -> Iterator[Metric]:
    sides = ((a, work_a), (b, work_b))
    speeds = [_throughput(work) for _, work in sides]
    yield Metric("useful tokens", "tokens/s", speeds[0][0], speeds[1][0])
    yield Metric("useful tokens a GPU", "tokens/s", speeds[0][1], speeds[1][1])
    images = [None if work is None else work.images_per_second for _, work in sides]
    yield Metric("images", "images/s", *images)
    yield Metric("model FLOPs a GPU", "TFLOP/s", speeds[0][2], speeds[1][2])
    yield Metric("MFU", "fraction", *(_mfu(side, window) for side, _ in sides))
    yield Metric("peak memory", "bytes", *(_peak_bytes(side) for side, _ in sides))
    for part in ("encoder", "projector", "decoder"):
        yield Metric(part, "s", *(_median(side, f"{part}_seconds", window) for side, _ in sides))
    for name, unit, column in _COUNTS:
        yield Metric(name, unit, *(side.run.last(column) if side.run is not None else None for side, _ in sides))


def _throughput(work: Work | None) -> tuple[float | None, float | None, float | None]:
    """Useful tokens per second in all and per GPU, and model TFLOP/s per GPU: of the median step, as the step time."""
    if work is None:
        return None, None, None
    tokens, flops = (float(np.median(each / work.seconds)) for each in (work.useful_tokens, work.flops))
    return tokens, tokens / work.gpus, flops / work.gpus / 1e12


def _mfu(side: Side, window: Window) -> float | None:
    if side.run is None:
        return side.guess.mfu if side.guess else None
    return _median(side, "mfu", window)


def _median(side: Side, column: str, window: Window) -> float | None:
    """The median of a column over the steady steps of a run."""
    if side.run is None:
        return None
    values = side.run.columns[column][side.run.is_steady(window)]
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else None


def _peak_bytes(side: Side) -> float | None:
    if side.run is None:
        return side.guess.memory.peak_bytes if side.guess else None
    values = side.run.columns["memory_bytes"]
    known = values[np.isfinite(values)]
    return float(known.max()) if len(known) else None
