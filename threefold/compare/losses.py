"""Loss curves of two runs, aligned by the useful tokens that were seen, and whether they differ at their end.

Runs of the same data in the same order see the same tokens at the same step, so that the noise of the batches cancels.
Others are compared by interpolation, and the interval is wider. It covers noise within the two runs, not that between
seeds.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from threefold.compare.statistics import Interval, mean_interval
from threefold.profile.readers.run_record import Column, RunRecord

LAST = 0.2  # the part of the common range of tokens whose losses are compared
LEAST_POINTS = 8  # in that part; it is made longer where there are fewer
# Fields that must be the same for two runs to see the same tokens at the same step.
_SAME_ORDER = (
    *("job.data", "job.tokenizer", "job.val_fraction", "job.seed", "job.seq_len", "job.global_batch"),
    *("job.packing", "job.task", "model"),
)

Verdict = Literal["same to the bit", "no certain difference", "higher", "lower", "too few steps", "not finite"]


@dataclass(frozen=True, slots=True)
class Losses:
    """The difference of two loss curves, B minus A."""

    common_tokens: float  # useful tokens up to which both curves go
    window_tokens: tuple[float, float]  # the range of tokens over which the difference is taken
    num_points: int
    a: float  # mean loss in the window
    b: float
    difference: float
    interval: Interval | None
    noise: float  # standard deviation of the difference from point to point
    is_same_order: bool  # both runs saw the same tokens at the same steps, as far as plans and contracts say
    verdict: Verdict

    def to_json(self) -> dict[str, Any]:
        return {
            "common_tokens": self.common_tokens,
            "window_tokens": list(self.window_tokens),
            "num_points": self.num_points,
            "a": self.a,
            "b": self.b,
            "difference": self.difference,
            "interval": list(self.interval) if self.interval else None,
            "noise": self.noise,
            "same_order_of_data": self.is_same_order,
            "verdict": self.verdict,
        }


def compare_losses(a: RunRecord, b: RunRecord) -> Losses | None:
    """Compare the curves; None where they have no tokens in common or hardly a finite loss."""
    curves = [_curve(run) for run in (a, b)]
    if any(len(tokens) < 2 for tokens, _ in curves):
        return None
    first = max(tokens[0] for tokens, _ in curves)
    last = min(tokens[-1] for tokens, _ in curves)
    if last <= first:
        return None
    grid = _grid(curves, first, last)
    values = [np.interp(grid, tokens, losses) for tokens, losses in curves]
    difference = values[1] - values[0]
    interval = mean_interval(difference)
    mean = float(difference.mean())
    return Losses(
        common_tokens=float(last),
        window_tokens=(float(grid[0]), float(grid[-1])),
        num_points=len(grid),
        a=float(values[0].mean()),
        b=float(values[1].mean()),
        difference=mean,
        interval=interval,
        noise=float(difference.std(ddof=1)) if len(grid) > 1 else 0.0,
        is_same_order=_sees_same_order(a, b),
        verdict=_verdict(a, b, difference, interval),
    )


def _curve(run: RunRecord) -> tuple[Column, Column]:
    """Useful tokens seen and loss at each step with a finite loss."""
    finite = np.isfinite(run.columns["loss"])
    return run.tokens_seen[finite], run.columns["loss"][finite]


def _grid(curves: list[tuple[Column, Column]], first: float, last: float) -> Column:
    """The tokens at which losses are compared: the points of the sparser curve in the last part of the common range."""
    inside = [tokens[(tokens >= first) & (tokens <= last)] for tokens, _ in curves]
    sparse = min(inside, key=len)
    if len(sparse) == 0:
        return np.array([first, last])
    tail = sparse[sparse >= last - LAST * (last - first)]
    return tail if len(tail) >= LEAST_POINTS else sparse[-LEAST_POINTS:]


def _sees_same_order(a: RunRecord, b: RunRecord) -> bool:
    old, new = dict(a.plan.written), dict(b.plan.written)
    return a.contract.get("data") == b.contract.get("data") and all(
        old.get(path) == new.get(path) for path in _SAME_ORDER
    )


def _ends_finite(run: RunRecord) -> bool:
    """Whether no loss of the run's last part is missing; single steps before it may have been skipped."""
    losses = run.columns["loss"]
    return bool(np.isfinite(losses[-max(1, round(LAST * len(losses))) :]).all())


def _verdict(a: RunRecord, b: RunRecord, difference: Column, interval: Interval | None) -> Verdict:
    if not (_ends_finite(a) and _ends_finite(b)):
        return "not finite"
    if a.num_steps == b.num_steps and np.array_equal(a.columns["loss"], b.columns["loss"]):
        return "same to the bit"
    if interval is None:
        return "too few steps"
    if interval[0] > 0:
        return "higher"
    return "lower" if interval[1] < 0 else "no certain difference"
