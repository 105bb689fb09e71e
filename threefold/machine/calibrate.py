"""Calibrates the estimate on this machine: its speeds, steps of small plans, and the rates that predict them.

`threefold calibrate` calls `calibrate`. Each rate shows in at least one of `calibration_plans`. The result is a chip
file, which later commands use by themselves, with the measured steps beside it.
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
from threefold.machine.own_chip_file import own_chip_path
from threefold.plan.parse import parse
from threefold.plan.plan import Plan
from threefold.safe_files import write_aside
from threefold.spec.chip_description import chip_named
from threefold.spec.chips import ChipSpec

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


Fields = dict[str, Any]

_GPU = {"target": "threefold", "cluster.gpus": 1, "job.data": "synthetic", "knobs.expert_fusion": True}
_QWEN = {"model": "qwen3-30b-a3b", "model.num_layers": 4, "job.seq_len": 4096}
_DEEPSEEK = {
    "model": "deepseek-v3",
    "model.num_layers": 2,
    "model.num_experts": 32,
    "model.num_dense_layers": 1,
    "job.seq_len": 4096,
    "job.mtp": 0,
    "knobs.optimizer_dtype": "bf16",
}
_FP8 = {"knobs.precision": "fp8-blockwise"}
_SIXTEEN = {"knobs.optimizer_dtype": "bf16", "knobs.grad_dtype": "bf16", "knobs.master_weights": False}

_SHORT = {**_QWEN, "model.num_layers": 6, "model.num_experts": 16, "job.seq_len": 1024}
_SINKS = {"model": "gpt-oss-20b", "model.num_layers": 4, **_SIXTEEN}

_ON_ONE_GPU: dict[str, Fields] = {
    "16K tokens": {**_QWEN, "job.micro_batch": 4},
    "host-bound": _SHORT,
    "host-bound, no fusion": {**_SHORT, "knobs.expert_fusion": False},
    "host-bound, graphs": {**_SHORT, "knobs.graphs": ["attn"]},
    "host-bound, fp8": {**_SHORT, **_FP8},
    "no fusion": {**_QWEN, "job.micro_batch": 4, "knobs.expert_fusion": False},
    "4 microbatches": {**_QWEN, "job.global_batch": 4},
    "long": {**_QWEN, "job.seq_len": 32768, "model.num_layers": 2},
    "fp8": {**_QWEN, **_FP8, "job.micro_batch": 4},
    "latent attention": {**_DEEPSEEK, "job.micro_batch": 2},
    "latent attention, long, fp8": {**_DEEPSEEK, **_FP8, "job.seq_len": 16384},
    "dense": {"model": "llama3-8b", "model.num_layers": 4, "job.seq_len": 8192, **_SIXTEEN},
    "large experts": {"model": "mixtral-8x7b", "model.num_layers": 2, "job.seq_len": 4096, **_SIXTEEN},
    "sinks": {**_SINKS, "job.seq_len": 4096, "job.micro_batch": 2},
    "sinks, long": {**_SINKS, "job.seq_len": 16384},
    "delta rule": {
        "model": "qwen3-next-80b-a3b",
        "model.num_layers": 4,
        "model.num_experts": 64,
        "job.seq_len": 4096,
        **_SIXTEEN,
    },
}
_WITH_FP8 = ("fp8", "latent attention, long, fp8", "host-bound, fp8")

_CPU = {"target": "threefold", "cluster.chip": "cpu", "job.data": "synthetic", "knobs.precision": "fp32"}
_TINY = {"model": "tiny-qwen3-moe", "job.seq_len": 256, "job.global_batch": 4}
_ON_ONE_CPU: dict[str, Fields] = {
    "short": {**_TINY, "job.seq_len": 32, "job.global_batch": 1},
    "256 tokens": {**_TINY, "job.global_batch": 1},
    "1K tokens": {**_TINY, "job.micro_batch": 4},
    "4 microbatches": _TINY,
    "long": {**_TINY, "job.seq_len": 2048, "job.global_batch": 1},
    "demo": {"model": "demo-qwen3-moe", "job.seq_len": 256, "job.micro_batch": 8, "job.global_batch": 8},
    "latent attention": {**_TINY, "model": "tiny-deepseek-v3", "job.micro_batch": 2},
    "delta rule": {**_TINY, "model": "tiny-qwen3-next", "job.micro_batch": 2},
    "sinks": {**_TINY, "model": "tiny-gpt-oss", "job.micro_batch": 2},
}
_ON_TWO_CPUS: dict[str, Fields] = {
    "dp": {**_TINY, "job.micro_batch": 2},
    "ep": {**_TINY, "job.micro_batch": 2, "layout.ep": 2},
    "ep, 4 microbatches": {**_TINY, "job.global_batch": 8, "layout.ep": 2},
    "tp": {**_TINY, "job.micro_batch": 4, "layout.tp": 2},
    "cp": {**_TINY, "job.micro_batch": 4, "layout.cp": 2},
    "pp": {**_TINY, "layout.pp": 2},
    "dp, long": {**_TINY, "job.seq_len": 1024, "job.global_batch": 2},
    "ep, long": {**_TINY, "job.seq_len": 1024, "job.global_batch": 2, "layout.ep": 2},
    "tp, long": {**_TINY, "job.seq_len": 1024, "job.global_batch": 1, "layout.tp": 2},
}


def calibration_plans(chip: str, ranks: int, has_fp8: bool = True) -> dict[str, Fields]:
    """The fields of the plans for one rank of a chip, or for two processes of a CPU, by name."""
    if chip == "cpu":
        return {
            name: {**_CPU, "cluster.gpus": ranks, **fields}
            for name, fields in (_ON_ONE_CPU if ranks == 1 else _ON_TWO_CPUS).items()
        }
    plans = {name: fields for name, fields in _ON_ONE_GPU.items() if has_fp8 or name not in _WITH_FP8}
    return {
        name: {**_GPU, "cluster.chip": chip, "job.global_batch": fields.get("job.micro_batch", 1), **fields}
        for name, fields in plans.items()
    }
