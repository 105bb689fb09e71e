"""Measured trials of a tuning in the chip file of the machine."""

import json
from pathlib import Path

import pytest

from tests.support.fake_measurer import FakeMeasurer
from tests.support.plans import build
from tests.support.tuned_plans import tuned
from threefold.cost.chip_file import chip_file_text, read_chip_file
from threefold.cost.rates import calibration, rates_of
from threefold.cost.time.step import step_time
from threefold.machine.calibrate import calibration_plans
from threefold.spec.chips import CHIPS
from threefold.tune.ledger import open_ledger
from threefold.tune.recalibrate import measured_plans, recalibrate

SLOWER = 1.5


def test_a_machine_that_became_slower_is_predicted_slower(tmp_path: Path) -> None:
    """The chip file was fitted to steps at the shipped rates; the tuning measures steps half as long again."""
    shipped = calibration("threefold").rates
    plans = {name: build(fields) for name, fields in list(calibration_plans("cpu", 1).items())[:4]}
    path = tmp_path / "cpu.toml"
    path.write_text(chip_file_text(CHIPS["cpu"], "a test", ["fp32"], shipped, 0.1, 1))
    rows = [
        {"name": name, "fields": dict(plan.written), "seconds": step_time(plan, rates_of(plan)).step_seconds}
        for name, plan in plans.items()
    ]
    steps_path = path.with_suffix(".steps.json")
    steps_path.write_text(json.dumps({"steps": rows}))
    machine = FakeMeasurer(noise=0.0, step_noise=0.0)
    machine.factor = lambda plan: SLOWER * step_time(plan, shipped).step_seconds / machine.step_seconds
    tuned(machine, tmp_path / "out", most_trials=3)
    with open_ledger(tmp_path / "out") as ledger:
        measured = measured_plans(ledger)
    said = recalibrate("cpu", measured, path)
    assert said is not None
    found, findings = read_chip_file(str(path))
    assert found is not None
    assert not findings
    rates = found.rates_over(shipped)
    for fields, seconds in measured.values():
        # Half of the way from the old steps to the new ones, which contradict each other.
        before = seconds / SLOWER
        assert step_time(build(fields), rates).step_seconds > before * 1.15
    kept = json.loads(steps_path.read_text())["steps"]
    assert len(kept) == len(rows) + len(measured)
    recalibrate("cpu", measured, path)
    assert len(json.loads(steps_path.read_text())["steps"]) == len(kept), "steps of a tuning are added once"


def test_without_a_chip_file_nothing_is_written(tmp_path: Path) -> None:
    assert recalibrate("cpu", {}, tmp_path / "cpu.toml") is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "[]", '{"steps": [{}]}', '{"steps": 3}'])
def test_a_damaged_file_of_steps_is_said(text: str, tmp_path: Path) -> None:
    path = tmp_path / "cpu.toml"
    path.write_text(chip_file_text(CHIPS["cpu"], "a test", ["fp32"], calibration("threefold").rates, 0.1, 1))
    path.with_suffix(".steps.json").write_text(text)
    assert "cannot be used" in (recalibrate("cpu", {}, path) or "")
