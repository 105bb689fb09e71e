"""A tuning: every change with its measured gain and interval beside the predicted one, and every trial in order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from threefold.report.html.markup import Markup, tag
from threefold.report.html.svg import (
    CHARACTER,
    WIDTH,
    drawing,
    figure,
    legend,
    line,
    mark,
    nice_ticks,
    numbers_table,
    text,
    x_axis,
    y_axis,
)
from threefold.units import format_many

MOST_CHANGES, MOST_TRIALS = 60, 400
_LEFT, _RIGHT = 330.0, 120.0
_KEPT = ("better", "confirmed")


@dataclass(frozen=True, slots=True)
class Tuning:
    """What the ledger of a tuning holds, as `tune/ledger.py` gives it."""

    contract: Mapping[str, Any]
    verdicts: Sequence[Mapping[str, Any]]
    trials: Sequence[Mapping[str, Any]]
    result: Mapping[str, Any] | None = None  # result.json, where there is a winner


def tuning_figures(found: Tuning) -> list[Markup]:
    figures = [changes_figure(found)] if found.verdicts else []
    return [*figures, *([trials_figure(found)] if found.trials else [])]


def changes_figure(found: Tuning) -> Markup:
    """Gains with their intervals, one row a change; a ring is what the estimate predicted."""
    measured = [one for one in found.verdicts if _values(one)]
    shown = measured[:MOST_CHANGES]
    numbers = [value for one in shown for value in _values(one)]
    low, high = min([-0.02, *numbers]), max([0.02, *numbers])
    pad = 0.05 * (high - low)
    bottom = 12 + 24.0 * len(shown)

    def x_of(gain: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * (gain - low + pad) / (high - low + 2 * pad)

    ticks = nice_ticks(100 * low, 100 * high)
    parts = [x_axis(lambda tick: x_of(tick / 100), ticks, 4, bottom, "percent more throughput")]
    parts.append(line(x_of(0), 2, x_of(0), bottom, "rule"))
    for number, one in enumerate(shown):
        parts += _change_row(one, 8 + 24.0 * number, x_of)
    left_out = f" The first {MOST_CHANGES} of {len(measured)} are drawn." if len(measured) > len(shown) else ""
    if refused := len(found.verdicts) - len(measured):
        left_out += f" {format_many(refused, 'change')} without a measurement: the numbers below say why."
    rows = [
        [
            str(one.get("change") or "-"),
            str(one.get("stage", "")),
            _percent(one.get("predicted_gain")),
            _percent(one.get("gain")),
            _interval(one.get("interval")),
            str(one.get("verdict", "")),
            str(one.get("reason") or one.get("why") or ""),
        ]
        for one in found.verdicts
    ]
    return figure(
        "Changes that were tried",
        f"Measured against the plan before each, one variable at a time; the line is the interval.{left_out}",
        drawing(
            bottom + 60,
            f"gains of {len(shown)} changes",
            *parts,
            legend([("hue-green", "kept"), ("hue-gray", "not kept"), ("ring", "predicted")], _LEFT, bottom + 54),
        ),
        numbers=numbers_table(["change", "stage", "predicted", "measured", "interval", "verdict", "reason"], rows),
    )


def _change_row(one: Mapping[str, Any], y: float, x_of: Any) -> list[Markup]:
    change, verdict = str(one.get("change") or "-"), str(one.get("verdict", ""))
    gain, predicted = real_number(one.get("gain")), real_number(one.get("predicted_gain"))
    interval = number_pair(one.get("interval"))
    most = int((_LEFT - 20) / CHARACTER)
    name = change if len(change) <= most else change[: most - 1] + "…"
    says = f"{change}: {verdict}; measured {_percent(gain)}, interval {_interval(interval)}, "
    says += f"predicted {_percent(predicted)}. {one.get('reason') or one.get('why') or ''}"
    hue = "hue-green" if verdict in _KEPT else "hue-gray"
    shapes = []
    if interval:
        shapes.append(line(x_of(interval[0]), y + 10, x_of(interval[1]), y + 10, f"interval {hue}"))
    if predicted is not None:
        shapes.append(tag("circle", cx=float(x_of(predicted)), cy=y + 10, r=4.5, class_="ring"))
    if gain is not None:
        shapes.append(tag("circle", cx=float(x_of(gain)), cy=y + 10, r=5.0, class_=hue))
    named = text(_LEFT - 10, y + 14, name, "label", "end")
    last = text(WIDTH - _RIGHT + 12, y + 14, verdict, "strong" if verdict in _KEPT else "tick")
    return [mark(Markup("".join([named, *shapes, last])), says)]


def trials_figure(found: Tuning) -> Markup:
    """Step time of every trial in the order in which they ran."""
    shown = [one for one in found.trials[:MOST_TRIALS] if real_number(one.get("step_seconds"))]
    failed = [one for one in found.trials if not real_number(one.get("step_seconds"))]
    times = [1e3 * float(one["step_seconds"]) for one in shown]
    low, high = 0.98 * min(times, default=0.0), 1.02 * max(times, default=1.0)
    top, bottom, left = 30.0, 220.0, 76.0
    last = max([int(one.get("trial", 0)) for one in found.trials[:MOST_TRIALS]] or [1])

    def x_of(trial: float) -> float:
        return left + (WIDTH - left - 16) * (trial - 0.5) / (last or 1)

    def y_of(value: float) -> float:
        return bottom - (bottom - top) * (value - low) / ((high - low) or 1)

    parts = [y_axis(y_of, nice_ticks(low, high, 5), left, WIDTH - 12, "ms a step")]
    whole = [tick for tick in nice_ticks(1, max(2, last), 10) if tick == int(tick)]
    parts.append(x_axis(x_of, whole, bottom, bottom, "trial"))
    for one, value in zip(shown, times, strict=True):
        is_base = one.get("role") == "baseline"
        says = f"trial {one.get('trial')}, {one.get('stage')}, {one.get('role')}: {value:.2f} ms a step"
        x, y = float(x_of(int(one.get("trial", 0)))), float(y_of(value))
        parts.append(mark(tag("circle", cx=x, cy=y, r=4.5, class_="hue-blue" if is_base else "hue-orange"), says))
    said = "" if not failed else f" {len(failed)} trials have no time: they failed or were refused."
    if len(found.trials) > MOST_TRIALS:
        said += f" The first {MOST_TRIALS} of {len(found.trials)} are drawn."
    rows = [
        [
            str(one.get("trial")),
            str(one.get("stage")),
            str(one.get("role")),
            _milliseconds(one),
            str(one.get("error") or "ok"),
        ]
        for one in found.trials[:MOST_TRIALS]
    ]
    return figure(
        "Every trial",
        f"Measured: the median step of each, in the order in which they ran.{said}",
        drawing(
            bottom + 60,
            f"step times of {len(shown)} trials",
            *parts,
            legend([("hue-blue", "plan to compare with"), ("hue-orange", "change")], left, bottom + 54),
        ),
        numbers=numbers_table(["trial", "stage", "role", "ms a step", "result"], rows),
    )


def _milliseconds(one: Mapping[str, Any]) -> str:
    seconds = real_number(one.get("step_seconds"))
    return "-" if seconds is None else f"{1e3 * seconds:.2f}"


def _values(one: Mapping[str, Any]) -> list[float]:
    found = [
        real_number(one.get("gain")),
        real_number(one.get("predicted_gain")),
        *(number_pair(one.get("interval")) or ()),
    ]
    return [max(-1.0, min(value, 10.0)) for value in found if value is not None]


def real_number(value: Any) -> float | None:
    """A number of a ledger, which may come from a stranger."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e12
    return float(value) if good else None


def number_pair(value: Any) -> tuple[float, float] | None:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        return None
    low, high = real_number(value[0]), real_number(value[1])
    return None if low is None or high is None else (low, high)


def _percent(value: Any) -> str:
    number = real_number(value)
    return "-" if number is None else f"{number:+.1%}"


def _interval(value: Any) -> str:
    pair = number_pair(value)
    return "-" if pair is None else f"{pair[0]:+.1%} to {pair[1]:+.1%}"
