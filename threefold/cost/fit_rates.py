"""Fits the rates of a stack to steps that were measured, around rates that are assumed.

`machine/calibrate.py` fits the steps of the user's machine, `tools/fit_rates.py` those of the shipped rates of the
threefold engine. Rates are fitted as logarithms. A rate that no step says anything about stays where it was, because
moving it costs as much as an error of the fit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from threefold.cost.rates import Rates
from threefold.cost.time.step import step_time
from threefold.plan.plan import Plan

Vector = NDArray[np.float64]

# What a step of the threefold engine says something about, on one rank.
RATES_OF_ONE_RANK = (
    "gemm",
    "gemm_fp8",
    "gemm_rows",
    "grouped",
    "grouped_rows",
    "attention",
    "attention_tokens",
    "attention_latent",
    "attention_sinks",
    "attention_window",
    "passes",
    "latent_passes",
    "expert_passes",
    "fusion",
    "quant_passes",
    "expert_quant",
    "scan",
    "chunk_seconds",
    "fla_chunk_seconds",
    "host_mixer_seconds",
    "host_moe_seconds",
    "host_unfused",
    "host_fp8",
    "host_graphed",
    "step_seconds",
    "optimizer",
)
RATES_OF_RANKS = (
    "alltoall",
    "collective",
    "latency_seconds",
    "cpu_sharing",
    "host_ring",
)  # what steps of several ranks say besides
RATE_SPREAD = 0.5  # of the logarithm of a rate around the assumed one
STEP_SPREAD = 0.03  # relative error of a step that the fit takes for granted
MOST_ITERATIONS, SMALLEST_GAIN = 60, 1e-4
FOLDS = 10


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A plan and how long one of its steps takes."""

    plan: Plan
    seconds: float


def fit_rates(
    steps: Sequence[MeasuredStep],
    assumed: Rates,
    names: Sequence[str] = RATES_OF_ONE_RANK,
    start: Rates | None = None,
) -> Rates:
    """The rates that predict the steps best and stay near the assumed ones; looked for from `start` on."""
    goal = np.log([step.seconds for step in steps])

    def rates(x: Vector) -> Rates:
        return replace(assumed, **{n: getattr(assumed, n) * float(np.exp(v)) for n, v in zip(names, x, strict=True)})

    def residuals(x: Vector) -> Vector:
        used = rates(x)
        predicted = np.log([step_time(step.plan, used).step_seconds for step in steps])
        return np.concatenate([(predicted - goal) / STEP_SPREAD, x / RATE_SPREAD])

    first = start or assumed
    return rates(least_squares(residuals, np.log([getattr(first, n) / getattr(assumed, n) for n in names])))


def errors(steps: Sequence[MeasuredStep], rates: Rates) -> list[float]:
    """The relative error of each predicted step."""
    return [step_time(step.plan, rates).step_seconds / step.seconds - 1 for step in steps]


def held_out_errors(
    steps: Sequence[MeasuredStep], assumed: Rates, names: Sequence[str], start: Rates | None = None
) -> list[float]:
    """The error of each step with rates that were fitted without it, a tenth of the steps at a time."""
    found, folds = [0.0] * len(steps), min(FOLDS, len(steps))
    for fold in range(folds):
        out = range(fold, len(steps), folds)
        others = [step for index, step in enumerate(steps) if index not in out]
        rates = fit_rates(others, assumed, names, start)
        for index in out:
            (found[index],) = errors([steps[index]], rates)
    return found


def least_squares(residuals: Callable[[Vector], Vector], start: Vector) -> Vector:
    """The vector with the smallest sum of squared residuals, by the method of Levenberg and Marquardt."""
    x, damping = start, 1e-2
    here = residuals(x)
    for _ in range(MOST_ITERATIONS):
        jacobian = _jacobian(residuals, x, here)
        normal, gradient = jacobian.T @ jacobian, jacobian.T @ here
        while damping < 1e8:
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -gradient)
            there = residuals(x + step)
            if there @ there < here @ here:
                break
            damping *= 4
        else:
            return x
        gain = 1 - (there @ there) / (here @ here)
        x, here, damping = x + step, there, damping / 4
        if gain < SMALLEST_GAIN:
            return x
    return x


def _jacobian(residuals: Callable[[Vector], Vector], x: Vector, here: Vector) -> Vector:
    width = 1e-4
    columns = []
    for index in range(len(x)):
        moved = x.copy()
        moved[index] += width
        columns.append((residuals(moved) - here) / width)
    return np.stack(columns, axis=1)
