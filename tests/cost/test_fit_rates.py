"""Rates fitted to steps: known ones are found again, and what no step shows stays as it was."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from threefold.cost.fit_rates import (
    RATES_OF_ONE_RANK,
    MeasuredStep,
    errors,
    fit_rates,
    held_out_errors,
    least_squares,
)
from threefold.cost.rates import Rates, calibration
from threefold.cost.time.step import step_time
from threefold.machine.calibrate import calibration_plans
from threefold.plan.parse import parse
from threefold.plan.plan import Plan

SHIPPED = calibration("threefold").rates


def plans() -> list[Plan]:
    found = [parse(fields).plan for fields in calibration_plans("h200", 1).values()]
    assert all(found)
    return [plan for plan in found if plan]


def steps_with(rates: Rates) -> list[MeasuredStep]:
    return [MeasuredStep(plan, step_time(plan, rates).step_seconds) for plan in plans()]


def test_a_parabola_has_its_least_square() -> None:
    found = least_squares(lambda x: np.array([x[0] - 3.0, 2 * (x[1] + 1.0), x[0] * x[1] * 0.0]), np.zeros(2))
    assert found == pytest.approx([3.0, -1.0], abs=1e-4)


@pytest.mark.parametrize(("name", "factor"), [("gemm", 0.8), ("attention", 1.3), ("host_moe_seconds", 1.6)])
def test_a_changed_machine_is_found(name: str, factor: float) -> None:
    truth = replace(SHIPPED, **{name: getattr(SHIPPED, name) * factor})
    steps = steps_with(truth)
    assert max(map(abs, errors(steps, SHIPPED))) > 0.03
    fitted = fit_rates(steps, SHIPPED)
    assert max(map(abs, errors(steps, fitted))) < 0.01
    assert getattr(fitted, name) == pytest.approx(getattr(truth, name), rel=0.12)


def test_rates_that_no_step_shows_stay() -> None:
    fitted = fit_rates(steps_with(replace(SHIPPED, gemm=SHIPPED.gemm * 0.8)), SHIPPED)
    for name in ("alltoall", "collective", "latency_seconds", "hidden"):
        assert getattr(fitted, name) == getattr(SHIPPED, name)


def test_the_shipped_rates_predict_the_engines_own_steps() -> None:
    """What docs/log/estimate.md says of them. Older steps are of an engine that was slower."""
    rows = json.loads((Path(__file__).parents[2] / "data" / "threefold_runs.json").read_text())
    found = [(parse(row["fields"]).plan, row["seconds"]) for row in rows if row["date"] == "2026-11-18"]
    sizes = np.abs(errors([MeasuredStep(plan, seconds) for plan, seconds in found if plan], SHIPPED))
    assert len(sizes) == len(found) == 29
    assert sizes.mean() < 0.0225
    assert np.quantile(sizes, 0.9) < 0.0375
    assert sizes.max() < 0.064


def test_errors_of_steps_left_out_are_larger_than_those_of_the_fit() -> None:
    draw = np.random.default_rng(0)
    noisy = [replace(step, seconds=step.seconds * float(np.exp(draw.normal(0, 0.05)))) for step in steps_with(SHIPPED)]
    fitted = fit_rates(noisy, SHIPPED)
    inside, outside = errors(noisy, fitted), held_out_errors(noisy, SHIPPED, RATES_OF_ONE_RANK, fitted)
    assert np.abs(outside).mean() > np.abs(inside).mean()
    assert np.abs(outside).max() < 0.5
