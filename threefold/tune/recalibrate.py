"""Adds the measured trials of a tuning to the steps behind this machine's chip file, and fits its rates anew.

`api/tunings.py` calls `recalibrate` at the end. Without a chip file nothing is fitted: the steps of one model alone
would say little about other plans, and `threefold calibrate` measures those too.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from threefold.cost.chip_file import read_chip_file
from threefold.cost.fit_rates import MeasuredStep
from threefold.cost.rates import calibration
from threefold.findings import FindingsError
from threefold.machine.calibrate import fit_machine, save_chip_file
from threefold.machine.own_chip_file import own_chip_path
from threefold.plan.parse import parse
from threefold.plan.plan import Plan
from threefold.safe_files import read_json_object
from threefold.tune.ledger import Ledger

MOST_PLANS = 12  # of one tuning: more of them would outweigh the machine's other steps


def measured_plans(ledger: Ledger) -> dict[str, tuple[dict[str, Any], float]]:
    """Fields and typical step of each plan that ran, by its hash; those with most trials first."""
    times: dict[str, list[float]] = {}
    for row in ledger.trials():
        if row.measurement.steps:
            times.setdefault(row.plan, []).append(row.measurement.seconds)
    ordered = sorted(times, key=lambda plan: -len(times[plan]))[:MOST_PLANS]
    return {plan: (ledger.fields_of(plan), statistics.median(times[plan])) for plan in ordered}


def recalibrate(
    chip: str, measured: Mapping[str, tuple[Mapping[str, Any], float]], path: Path | None = None
) -> str | None:
    """Fit the rates of the chip file to its own steps and these; what was done, in words. None without a chip file."""
    path = path or own_chip_path(chip)
    steps_path = path.with_suffix(".steps.json")
    if not path.exists() or not steps_path.exists():
        return None
    found, findings = read_chip_file(str(path))
    try:
        kept = read_json_object(steps_path)
        rows = [row for row in kept.get("steps", []) if not str(row["name"]).startswith("tune ")]
        old = [MeasuredStep(_plan(row["fields"]), float(row["seconds"])) for row in rows]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, FindingsError) as error:
        return f"{steps_path} cannot be used: {error}"
    if found is None or findings:
        return f"{path} cannot be used: {findings[0].problem}"
    new = [MeasuredStep(_plan(fields), seconds) for fields, seconds in measured.values()]
    steps = [replace(step, plan=step.plan.on_chip(found.spec)) for step in (*old, *new)]
    fitted = fit_machine(steps, found.rates_over(calibration("threefold").rates))
    said = f"{len(steps)} steps measured on this machine, {len(new)} of them by tune, {date.today()}"
    save_chip_file(path, found.spec, said, fitted, {**kept, "steps": [*rows, *_rows(measured)]})
    return f"{path}: rates fitted to {said}; error {fitted.error:.0%}"


def _rows(measured: Mapping[str, tuple[Mapping[str, Any], float]]) -> Sequence[dict[str, Any]]:
    return [
        {"name": f"tune {plan}", "fields": dict(fields), "seconds": seconds}
        for plan, (fields, seconds) in measured.items()
    ]


def _plan(fields: Mapping[str, Any]) -> Plan:
    parsed = parse(fields)
    if parsed.plan is None:
        raise FindingsError(parsed.findings)
    return parsed.plan
