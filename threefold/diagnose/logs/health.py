"""Steps of a run judged as numbers: the steady ones, outliers, spikes of loss and gradient, drift."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from threefold.diagnose.logs.steps import NUMBERS, Steps
from threefold.units import format_many

Column = NDArray[np.float64]
_OUTLIER = 1.5  # times the median
_DRIFT = 0.05
_BLOCK = 32  # steps whose median a step is held against
_LEAST_STEPS = 5
_LEAST_SPIKE = 0.3  # of a loss above its median, in nats
_NORM_SPIKE = 10.0  # times the median
_COLLAPSED = 2.0  # of the load-balancing loss, which is 1 where all experts get the same
_MOST_SHOWN = 5


@dataclass
class Health:
    """What the steps of the last start of a job say; a number that the log lacks is None."""

    first: int | None = None
    last: int | None = None
    num_steps: int = 0
    step_seconds: float | None = None  # median of the steady steps
    spread: tuple[float, float] | None = None  # 10th and 90th percentile
    outliers: list[tuple[int, float]] = field(default_factory=list)  # step, seconds; the slowest ones
    num_outliers: int = 0
    drift: float | None = None  # of the last quarter's median against that of the first
    tflops: float | None = None
    tokens_per_second: float | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    loss_spikes: list[int] = field(default_factory=list)
    norm_spikes: list[int] = field(default_factory=list)
    balance: float | None = None  # the load-balancing loss at the end
    memory_percent: float | None = None

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self)) | {"outliers": [list(one) for one in self.outliers]}


def judge_steps(steps: Steps) -> Health:
    """The steps of the last start of a log."""
    return judge_columns(last_start(steps))


def last_start(steps: Steps) -> dict[str, Column]:
    """The columns of a log since its job was last started."""
    start = steps.attempt_starts[-1] if steps.attempt_starts else 0
    return {name: np.asarray(column[start:], dtype=float) for name, column in steps.columns.items()}


def judge_columns(given: Mapping[str, Column]) -> Health:
    """Steps as columns of equal length; one that is absent is unknown."""
    number = given["step"]
    columns = {name: given.get(name, np.full(len(number), np.nan)) for name in NUMBERS}
    if not len(number):
        return Health()
    health = Health(int(number[0]), int(number[-1]), len(number))
    steady = slice(min(max(2, len(number) // 20), max(0, len(number) - _LEAST_STEPS)), None)
    _times(health, number[steady], columns["seconds"][steady])
    health.tflops = _median(columns["tflops"][steady])
    health.tokens_per_second = _median(columns["tokens_per_second"][steady])
    loss = columns["loss"]
    finite = loss[np.isfinite(loss)]
    if len(finite):
        health.first_loss, health.last_loss = float(finite[0]), float(finite[-1])
    health.loss_spikes = _spikes(number, loss, lambda middle, spread: middle + np.maximum(6 * spread, _LEAST_SPIKE))
    health.norm_spikes = _spikes(number, columns["grad_norm"], lambda middle, spread: middle * _NORM_SPIKE + 1e-6)
    health.balance = _median(columns["balance"][-_BLOCK:])
    percent = columns["memory_percent"]
    health.memory_percent = float(np.nanmax(percent)) if np.isfinite(percent).any() else None
    return health


def _median(values: Column) -> float | None:
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else None


def _times(health: Health, number: Column, seconds: Column) -> None:
    known = np.isfinite(seconds)
    number, seconds = number[known], seconds[known]
    if not len(seconds):
        return
    middle = float(np.median(seconds))
    health.step_seconds = middle
    if len(seconds) >= _LEAST_STEPS:
        health.spread = (float(np.percentile(seconds, 10)), float(np.percentile(seconds, 90)))
        slow = np.flatnonzero(seconds > _OUTLIER * middle)
        health.num_outliers = len(slow)
        worst = slow[np.argsort(-seconds[slow])][:_MOST_SHOWN]
        health.outliers = [(int(number[place]), float(seconds[place])) for place in sorted(worst)]
    quarter = len(seconds) // 4
    if quarter >= _LEAST_STEPS:
        first = float(np.median(seconds[:quarter]))
        change = float(np.median(seconds[-quarter:])) / first - 1 if first > 0 else 0.0
        health.drift = change if abs(change) > _DRIFT else None


def _spikes(number: Column, values: Column, limit: Any) -> list[int]:
    """Steps whose value is far above the median of the block of steps before theirs."""
    known = np.isfinite(values)
    number, values = number[known], values[known]
    blocks = len(values) // _BLOCK
    if not blocks:
        return []
    grid = values[: blocks * _BLOCK].reshape(blocks, _BLOCK)
    middle = np.median(grid, axis=1)
    spread = np.median(np.abs(grid - middle[:, None]), axis=1)
    bounds = np.repeat(limit(middle, spread), _BLOCK)[: len(values) - _BLOCK]
    found = np.flatnonzero(values[_BLOCK:] > bounds) + _BLOCK
    return [int(number[place]) for place in found]


def health_warnings(health: Health, steps: Steps) -> list[str]:
    """What is not as it should be, in words."""
    said = []
    if steps.num_nan:
        many = format_many(steps.num_nan, "step")
        said.append(f"{many} with a loss or gradient norm that is not finite, from step {steps.first_nan}")
    if steps.num_skipped:
        said.append(f"{format_many(steps.num_skipped, 'step')} skipped")
    if health.loss_spikes:
        said.append(f"loss spikes at steps {_shown(health.loss_spikes)}")
    if health.norm_spikes:
        said.append(f"gradient norm above {_NORM_SPIKE:g} x its median at steps {_shown(health.norm_spikes)}")
    if health.balance is not None and health.balance > _COLLAPSED:
        said.append(f"load-balancing loss {health.balance:.3g} (1 is level): few experts get most tokens")
    said += uneven_times(health)
    if health.memory_percent is not None and health.memory_percent > 95:
        said.append(f"{health.memory_percent:.1f} % of the device's memory reserved at the peak")
    return said


def uneven_times(health: Health) -> list[str]:
    """Slow steps, and steps that became slower."""
    said = []
    if health.num_outliers:
        slowest = ", ".join(f"{step} ({seconds:.3g} s)" for step, seconds in health.outliers)
        said.append(f"{format_many(health.num_outliers, 'step')} took more than {_OUTLIER:g} x the median: {slowest}")
    if health.drift is not None:
        word = "slower" if health.drift > 0 else "faster"
        said.append(f"the last quarter of the steps is {abs(health.drift):.0%} {word} than the first")
    return said


def _shown(numbers: list[int]) -> str:
    more = f" and {len(numbers) - _MOST_SHOWN} more" if len(numbers) > _MOST_SHOWN else ""
    return ", ".join(map(str, numbers[:_MOST_SHOWN])) + more
