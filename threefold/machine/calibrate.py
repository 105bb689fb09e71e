"""Calibrates the estimate on this machine: its speeds, steps of small plans, and the rates that predict them.

`threefold calibrate` calls `calibrate`. The result is a chip file, which later commands use by themselves, with the
measured steps beside it.
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from threefold.cost.chip_file import chip_file_text
from threefold.cost.fit_rates import (
    RATES_OF_ONE_RANK,
    RATES_OF_RANKS,
    MeasuredStep,
    errors,
    fit_rates,
    held_out_errors,
)
from threefold.cost.rates import Rates, calibration, rates_to
from threefold.findings import Finding, FindingsError
from threefold.launch.plan_session import PlanSession, Speed
from threefold.machine.calibration_plans import calibration_plans
from threefold.machine.own_chip_file import own_chip_path
from threefold.plan.parse import parse
from threefold.plan.plan import Plan
from threefold.safe_files import write_aside
from threefold.spec.chips import ChipSpec
from threefold.spec.clusters.chip_description import chip_named

WINDOW = {"warmup": 4, "steps": 24, "seconds": 4.0}  # short steps vary most; the seconds cut the long ones
LIMIT_SECONDS = 120.0
BAND = 0.9  # quantile of the held-out errors that is the error of the fit


@dataclass(frozen=True, slots=True)
class StepResult:
    """A plan that was measured, or why it could not be."""

    name: str
    plan: Plan
    seconds: float | None
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What was measured and fitted."""

    spec: ChipSpec
    speeds: tuple[Speed, ...]
    steps: tuple[StepResult, ...]
    before: tuple[float, ...]  # errors of the measured steps with the rates as they were
    after: tuple[float, ...]  # and with the fitted ones
    fitted: "FittedRates"

    @property
    def chip(self) -> str:
        return self.spec.name

    @property
    def measured(self) -> list[StepResult]:
        return [step for step in self.steps if step.seconds is not None]

    def to_json(self) -> dict[str, Any]:
        steps = [
            {"name": step.name, "fields": dict(step.plan.written), "seconds": step.seconds, "error": error}
            for step, error in zip(self.measured, self.after, strict=True)
        ]
        return {
            "level": "measured",
            "chip": self.chip,
            "error": self.fitted.error,
            "speeds": [asdict(speed) for speed in self.speeds],
            "steps": steps,
            "failed": {step.name: step.trouble for step in self.steps if step.seconds is None},
            "rates": rates_to(self.fitted.rates),
        }


def calibrate(
    chip: str,
    plan: Plan | None,
    folder: Path,
    budget_seconds: float,
    say: Callable[[str], None],
    two_ranks: bool = False,
) -> Calibrated:
    """Measure and fit. `plan` is measured besides the small plans; `two_ranks` measures exchanges on a CPU."""
    began = time.monotonic()
    spec, speeds, steps = _with_cores(chip_named(chip)), list[Speed](), list[StepResult]()
    jobs = [(1, calibration_plans(chip, 1, "fp8" in spec.peak_flops))]
    if two_ranks:
        jobs.append((2, calibration_plans(chip, 2)))
    if plan is not None:
        jobs.insert(0, (plan.cluster.gpus, {"the plan": {**dict(plan.written), "job.data": "synthetic"}}))
    for ranks, plans in jobs:
        with PlanSession(folder, ranks, {}) as session:
            if not speeds or ranks > 1:
                say("speeds of the machine" + (f" with {ranks} ranks" if ranks > 1 else ""))
                speeds += session.speeds(next(iter(plans.values())), LIMIT_SECONDS)
            for name, fields in plans.items():
                if time.monotonic() - began > budget_seconds:
                    break
                result = session.measure(fields, WINDOW, LIMIT_SECONDS)
                taken = median(result["steps"]) if result.get("steps") else None
                steps.append(StepResult(name, _plan(fields).on_chip(spec), taken, result.get("error", "")))
                say(f"{name}: " + (steps[-1].trouble if taken is None else f"{1e3 * taken:.1f} ms a step"))
    return _calibrated(spec, speeds, steps)


def _with_cores(spec: ChipSpec) -> ChipSpec:
    """A CPU with the cores of this machine."""
    if spec.architecture != "cpu":
        return spec
    from threefold.launch.cpu_cores import num_cores

    return replace(spec, cores=num_cores())


@dataclass(frozen=True, slots=True)
class FittedRates:
    """Rates that were fitted to steps of a machine."""

    rates: Rates
    error: float  # of a step that the fit has not seen, in nine of ten cases
    gpus: int  # the most ranks of a step
    precisions: tuple[str, ...]  # of the steps


def fit_machine(steps: Sequence[MeasuredStep], assumed: Rates) -> FittedRates:
    """Fit the rates that steps of so many ranks show."""
    gpus = max((step.plan.layout.gpus for step in steps), default=1)
    candidates = (*RATES_OF_ONE_RANK, *(RATES_OF_RANKS if gpus > 1 else ()))
    names = [name for name in candidates if getattr(assumed, name) > 0]
    rates = fit_rates(steps, assumed, names)
    held_out = sorted(abs(error) for error in held_out_errors(steps, assumed, names, rates))
    error = held_out[math.ceil(BAND * len(held_out)) - 1] if held_out else 1.0
    return FittedRates(rates, error, gpus, tuple(sorted({step.plan.knobs.precision for step in steps})))


def _calibrated(spec: ChipSpec, speeds: Sequence[Speed], steps: Sequence[StepResult]) -> Calibrated:
    shipped = calibration("threefold").rates
    measured = [MeasuredStep(step.plan, step.seconds) for step in steps if step.seconds is not None]
    fitted = fit_machine(measured, assumed_rates(shipped, spec, speeds))
    before, after = errors(measured, shipped), errors(measured, fitted.rates)
    return Calibrated(spec, tuple(speeds), tuple(steps), tuple(before), tuple(after), fitted)


def assumed_rates(shipped: Rates, spec: ChipSpec, speeds: Sequence[Speed]) -> Rates:
    """The rates that the machine's speeds suggest, from which the fit to whole steps begins."""
    by_size = {what: {s.size: s.rate for s in speeds if s.what == what} for what in {s.what for s in speeds}}
    format_ = "fp32" if spec.architecture == "cpu" else "bf16"
    found: dict[str, Any] = {}
    if gemm := by_size.get(f"gemm {format_}"):
        found["gemm"] = max(gemm.values()) / spec.peak_flops[format_]
    if attention := by_size.get("attention"):
        short, long = min(attention), max(attention)
        found["attention"] = attention[long] / spec.peak_flops["bf16"]
        found["attention_tokens"] = max(1.0, short * (attention[long] / attention[short] - 1))
    if host := by_size.get("copy from the host"):
        found["host_copy"] = max(host.values()) / spec.host_bandwidth
    exchanges = {what: sizes for what, sizes in by_size.items() if what.startswith("all-")}
    for name, kind in (("alltoall", "all-to-all"), ("collective", "all-reduce")):
        rates = [max(sizes.values()) for what, sizes in exchanges.items() if what.startswith(kind)]
        if rates:
            found[name] = min(rates) / spec.domain_bandwidth
    latencies = [min(sizes) / sizes[min(sizes)] for what, sizes in exchanges.items() if what.startswith("all-to-all")]
    if latencies:
        found["latency_seconds"] = min(latencies)
    return replace(shipped, **found)


def write_chip_file(found: Calibrated, versions: Mapping[str, str | None], path: Path | None = None) -> Path:
    """Write the chip file of this machine, or another, and the measured steps beside it."""
    path = path or own_chip_path(found.spec.plan_name)
    torch = versions.get("torch") or "unknown"
    measured = f"{len(found.measured)} steps measured on this machine, {date.today()}, torch {torch}"
    rows = [{"name": s.name, "fields": dict(s.plan.written), "seconds": s.seconds} for s in found.measured]
    said = {"machine": dict(versions), "date": str(date.today()), "steps": rows}
    save_chip_file(path, found.spec, measured, found.fitted, said)
    return path


def save_chip_file(path: Path, spec: ChipSpec, measured: str, fitted: FittedRates, steps: Mapping[str, Any]) -> None:
    """Write a chip file and the steps behind it. A file that cannot be written is a finding."""
    text = chip_file_text(spec, measured, fitted.precisions, fitted.rates, fitted.error, fitted.gpus)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_aside(path, text.encode())
        write_aside(path.with_suffix(".steps.json"), (json.dumps(steps, indent=1) + "\n").encode())
    except OSError as error:
        problem = f"cannot be written: {error.strerror or error}"
        finding = Finding(rule="file-writable", at=str(path), problem=problem, advice="give another file with --out")
        raise FindingsError([finding]) from None


def _plan(fields: Mapping[str, Any]) -> Plan:
    parsed = parse(fields)
    assert parsed.plan is not None, parsed.findings
    return parsed.plan
