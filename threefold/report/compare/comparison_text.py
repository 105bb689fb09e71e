"""A comparison as text: verdict, contract, numbers, walls and terms, and what explains the change."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from threefold.compare.comparison import Comparison, Metric
from threefold.compare.contract import Difference
from threefold.compare.explained import Explained, Part
from threefold.compare.losses import Losses
from threefold.compare.sides import Side, TermRow, wall_of
from threefold.compare.speed import Speed, StepSeconds
from threefold.compare.statistics import Interval
from threefold.compare.traced import Traced
from threefold.findings import shown
from threefold.plan.same_run import listed
from threefold.report.terminal import advice_text, table
from threefold.units import format_bytes, format_many, format_number

MOST_ROWS = 14
MOST_FACTS = 40  # rows of differing facts
NOTHING = 1e-12  # seconds, below which a difference is that of rounding
LEAST_SHARE = 0.001  # of the whole, below which a term is not printed


def comparison_text(found: Comparison) -> str:
    parts = [_head(found), _verdict(found), _contract(found), _numbers(found)]
    if found.losses:
        parts.append(_losses(found.losses))
    if found.seconds:
        parts.append(_explained("step", found.seconds, seconds_text))
    if found.peak_bytes and found.peak_bytes.parts:
        parts.append(_explained("peak memory, estimated", found.peak_bytes, format_bytes))
    if found.traced:
        parts += _traced(found.traced)
    if any(row.a != row.b for row in found.terms):
        parts.append(_terms("estimated, seconds for a step of A", found.terms))
    if found.findings:
        parts.append("\n".join(map(str, found.findings)))
    if pieces := advice_text(found.b.advice):
        parts.append(f"for B, {pieces}")
    return "\n\n".join(part for part in parts if part)


def _head(found: Comparison) -> str:
    return "\n".join(f"{letter}: {_described(side)}" for letter, side in (("A", found.a), ("B", found.b)))


def _described(side: Side) -> str:
    wall = wall_of(side)
    words = [f"{side.name} ({side.kind}"]
    if side.plan is not None:
        words.append(f", {side.plan.model_name}, {side.plan.layout.gpus} x {side.plan.chip.name}")
    if side.run is not None:
        words.append(f", {format_many(side.run.num_steps, 'logged step')}")
    return "".join([*words, f"; wall: {wall})" if wall else ")"])


def _verdict(found: Comparison) -> str:
    speed = found.speed
    if speed is None:
        return ""
    pairs = (("A", speed.a, found.a), ("B", speed.b, found.b))
    lines = [f"{name}: {_step_text(step, side)}" for name, step, side in pairs]
    return "\n".join([*lines, verdict_text(speed)])


def verdict_text(speed: Speed) -> str:
    """The verdict in one sentence."""
    per = "" if speed.unit == "step" else f" per {speed.unit}"
    change = f"{_percent(speed.ratio - 1)} time{per}"
    band = f" ({_percent(speed.interval[0] - 1)} to {_percent(speed.interval[1] - 1)})" if speed.interval else ""
    if speed.verdict == "too few steps":
        return f"B against A: {change}, but there are too few steps to tell that from noise"
    if speed.verdict == "no certain difference":
        return f"no certain difference: B against A {change}{band}"
    if speed.is_predicted:
        return f"B is predicted to be {speed.verdict}: {change}"
    if "estimated" in (speed.a.level, speed.b.level):
        return f"B is {speed.verdict}, by more than the band of the estimate: {change}{band}"
    return f"B is certainly {speed.verdict}: {change}{band}"


def _step_text(step: StepSeconds, side: Side) -> str:
    if step.level == "estimated":
        how = "calibrated" if side.guess and side.guess.calibrated else "uncalibrated"
        return f"{seconds_text(step.median)} a step, estimated, {how}{_interval(step.interval)}"
    window = f"steps {step.window[0]} to {step.window[1]}" if step.window else ""
    return (
        f"{seconds_text(step.median)} a step, median of {step.num_steps} measured{_interval(step.interval)}, {window}"
    )


def _interval(interval: Interval | None) -> str:
    return f" ({seconds_text(interval[0])} to {seconds_text(interval[1])})" if interval else ""


def _contract(found: Comparison) -> str:
    if not found.differences:
        alike = found.a.plan is not None and found.b.plan is not None
        return f"contract: no difference; {found.label}" if alike else ""
    return f"{differences_text(found.differences)}\n{found.label}"


def differences_text(found: Sequence[Difference], names: tuple[str, str] = ("A", "B")) -> str:
    """Differences of two contracts as a table, and what they mean together."""
    rows = [[each.part, each.kind, each.field, value_text(each.a), value_text(each.b)] for each in found[:MOST_FACTS]]
    lines = [table(["contract", "class", "field", *names], rows)]
    if len(found) > MOST_FACTS:
        lines.append(f"and {len(found) - MOST_FACTS} more (--json has all)")
    new = [each.field for each in found if each.kind == "convergence"]
    if new:
        lines.append(f"a new experiment: {format_many(len(new), 'convergence field')} differs: {listed(new)}")
    return "\n".join(lines)


def _numbers(found: Comparison) -> str:
    rows = [
        [each.name, each.unit, _number(each, each.a), _number(each, each.b), _change(each)] for each in found.metrics
    ]
    levels = [("estimated" if side.kind == "plan" else "measured") for side in (found.a, found.b)]
    header = ["", "unit", f"A, {levels[0]}", f"B, {levels[1]}", "change"]
    return table(header, rows) if rows else ""


def _number(metric: Metric, value: float | None) -> str:
    if value is None:
        return "-"
    if metric.unit == "fraction":
        return f"{value:.1%}"
    return format_bytes(value) if metric.unit == "bytes" else format_number(value)


def _change(metric: Metric) -> str:
    if metric.a is None or metric.b is None:
        return ""
    if metric.unit == "steps" or metric.a == 0:
        return f"{metric.b - metric.a:+g}"
    return _percent(metric.b / metric.a - 1)


def _losses(losses: Losses) -> str:
    low, high = losses.window_tokens
    order = "the same tokens at the same steps" if losses.is_same_order else "other data or another order of it"
    where = f"between {low:,.0f} and {high:,.0f} useful tokens ({format_many(losses.num_points, 'point')})"
    interval = f" ({losses.interval[0]:+.4f} to {losses.interval[1]:+.4f})" if losses.interval else ""
    numbers = f"A {losses.a:.4f}, B {losses.b:.4f}, B - A {losses.difference:+.4f}{interval}"
    said = f"B is {losses.verdict}" if losses.verdict in ("higher", "lower") else losses.verdict
    return f"loss {where}: {numbers}: {said}; noise of a point {losses.noise:.4f}; {order}"


def _explained(name: str, found: Explained, amount: Callable[[float], str]) -> str:
    change = found.change
    rows = [[_fields(part), _signed(part.amount, amount), _share(part.amount, found.before), _top(part, amount)]
            for part in found.parts[:MOST_ROWS]]  # fmt: skip
    if found.unexplained is not None:
        rows.append(["unexplained", _signed(found.unexplained, amount), _share(found.unexplained, found.before), ""])
    rows.append(
        [
            "= change",
            _signed(change, amount),
            _share(change, found.before),
            f"{amount(found.before)} to {amount(found.after)}",
        ]
    )
    notes = []
    if found.unexplained is not None and found.scale != 1:
        notes.append("shares of fields are the cost model's, scaled to A's measured step")
    if not found.is_exact:
        notes.append("more fields than all orders could be priced for: orders were drawn, with a fixed seed")
    header = [f"what explains the {name}", "amount", "of A", "terms"]
    return "\n".join([table(header, rows), *notes])


def _fields(part: Part) -> str:
    return ", ".join(f"{path} {value_text(old)} -> {value_text(new)}" for path, (old, new) in part.fields.items())


def _top(part: Part, amount: Callable[[float], str]) -> str:
    largest = sorted(part.terms.items(), key=lambda item: -abs(item[1]))[:3]
    whole = sum(abs(value) for value in part.terms.values())
    return ", ".join(f"{name} {_signed(value, amount)}" for name, value in largest if abs(value) > 0.01 * whole)


def _traced(found: Traced) -> list[str]:
    steps = " and ".join("unknown" if count is None else str(count) for count in found.num_steps)
    rows = [*(row for row in found.parts if max(row.a, row.b) > NOTHING), replace(found.span, name="= span")]
    cells = [
        [row.name, row.wall, seconds_text(row.a), seconds_text(row.b), _signed(row.b - row.a, seconds_text),
         _share(row.b - row.a, found.span.a)]
        for row in rows
    ]  # fmt: skip
    head = table([f"traces, seconds a {found.per}", "wall", "A", "B", "change", "of A"], cells)
    parts = [f"{head}\nsteps in the traces: {steps}"]
    return [*parts, _terms(f"inside, seconds a {found.per}", found.details)] if found.details else parts


def _terms(title: str, rows: Sequence[TermRow]) -> str:
    whole = max(sum(row.a for row in rows), sum(row.b for row in rows))
    kept = [row for row in rows if max(row.a, row.b) > LEAST_SHARE * whole]
    cells = [
        [row.name, row.wall, seconds_text(row.a), seconds_text(row.b), _signed(row.b - row.a, seconds_text)]
        for row in kept
    ]
    return table([title, "wall", "A", "B", "change"], cells)


def value_text(value: Any) -> str:
    """A value as a plan file would say it; a default that is nothing is a dash."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return "+".join(map(str, value)) if value else "none"
    return value if isinstance(value, str) and len(value) <= 40 and value.isprintable() else shown(value)


def seconds_text(value: float) -> str:
    if abs(value) < NOTHING:
        return "0 s"
    for bound, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(value) >= bound:
            return f"{format_number(value / bound)} {unit}"
    return f"{value:.3g} s"


def _signed(value: float, amount: Callable[[float], str]) -> str:
    return f"{'-' if value < 0 else '+'}{amount(abs(value))}" if abs(value) > NOTHING else "0"


def _share(part: float, whole: float) -> str:
    return _percent(part / whole if abs(part) > NOTHING else 0.0) if whole else "-"


def _percent(fraction: float) -> str:
    return f"{fraction:+.1%}"
