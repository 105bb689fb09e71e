"""A run is a folder: the plan, the contract it was run under, metrics, checkpoints."""

import json
import math
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import threefold
from threefold.engine.lock import RunLock
from threefold.findings import Finding, FindingsError
from threefold.plan.file import dump_plan, read_plan
from threefold.plan.plan import Plan

# Of knobs, those that decide what a checkpoint holds.
_KEPT = ("knobs.precision", "knobs.optimizer_dtype", "knobs.master_weights")
PLAN, CONTRACT, METRICS, CHECKPOINTS = "plan.toml", "contract.json", "metrics.jsonl", "checkpoints"
LOADS = "loads.json"


def open_run(folder: Path, plan: Plan, lock: RunLock | None = None) -> None:
    """Make the folder, or go on in one that holds the same plan, and nobody else's."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if lock:
            lock.take()
        kept = folder / PLAN
        if kept.exists():
            before = read_plan(str(kept)).plan
            if before is None or _what_is_trained(before) != _what_is_trained(plan):
                raise FindingsError(
                    [
                        Finding(
                            rule="run-is-this-plan",
                            at=str(folder),
                            problem="the folder holds a run of another plan",
                            advice="choose another --run folder, or give the plan it was started with",
                        )
                    ]
                )
    except OSError as error:
        raise FindingsError([unwritable(folder, error)]) from None
    _replace(kept, dump_plan(plan, complete=True).encode())
    if lock:
        lock.sign()


def unwritable(path: Path, error: OSError) -> Finding:
    problem = f"cannot be written: {error.strerror or error}"
    return Finding(
        rule="run-writable", at=str(path), problem=problem, advice="free space, or choose another --run folder"
    )


def _what_is_trained(plan: Plan) -> dict[str, Any]:
    """The fields that a run may not change on its way.

    It may be watched otherwise, go on for longer, and on other ranks: where and how it is computed is not what.
    """
    return {path: value for path, value in plan.written if path in _KEPT or _is_of_the_model(path)}


def _is_of_the_model(path: str) -> bool:
    return path != "job.steps" and path.startswith(("model", "job."))


def plan_of_run(folder: Path) -> Plan:
    parsed = read_plan(str(folder / PLAN))
    if parsed.plan is None:
        raise FindingsError(parsed.findings)
    return parsed.plan


def write_contract(folder: Path, plan: Plan, device: torch.device, data: str, benchmark_only: bool) -> None:
    """What a later reader needs to know what happened: versions, hardware, data."""
    contract = {
        "plan": plan.hash,
        "fields": dict(plan.written),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "threefold": threefold.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu x {os.cpu_count()}",
        "threads": torch.get_num_threads(),
        "data": data,
        "benchmark_only": benchmark_only,
    }
    _replace(folder / CONTRACT, json.dumps(contract, indent=2).encode())


def _replace(path: Path, text: bytes) -> None:
    """A run killed in the middle finds the file as it was, or whole."""
    aside = path.with_name(path.name + ".partial")
    try:
        aside.write_bytes(text)
        aside.replace(path)
    except OSError as error:
        raise FindingsError([unwritable(path, error)]) from None


def note_loads(folder: Path, load_LE: Tensor | None) -> None:
    """Tokens of each expert in the last step, a list a layer: what `dry-run --loads` and `estimate --loads` read."""
    if load_LE is not None:
        _replace(folder / LOADS, json.dumps(load_LE.round().long().tolist()).encode())


def note_timing(folder: Path, seconds: list[float], first_step: int, skipped: int = 5) -> None:
    """Add the steady window to the contract: the steps of this stretch behind its warm-up, and their mean."""
    path = folder / CONTRACT
    skip = min(skipped, len(seconds) // 2)
    steady = seconds[skip:]
    if not steady or not path.exists():
        return
    contract = json.loads(path.read_text(encoding="utf-8"))
    window = [first_step + skip, first_step + len(seconds) - 1]
    mean = sum(steady) / len(steady)
    contract.setdefault("timing", []).append({"steady_steps": window, "mean_step_seconds": mean})
    _replace(path, json.dumps(contract, indent=2).encode())


class Metrics:
    """`metrics.jsonl`: one object a line; a resumed run drops lines past the step it goes on from.

    A line that cannot be written, as on a full disk, raises nothing: it is in `problem`, for the run to save and end.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        self.path = folder / METRICS
        self.problem: Finding | None = None
        try:
            if self.path.exists():
                kept = [line for line in self.path.read_bytes().splitlines() if _step_of(line) < first_step]
                _replace(self.path, b"".join(line + b"\n" for line in kept))
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise FindingsError([unwritable(self.path, error)]) from None

    def write(self, values: dict[str, Any]) -> None:
        if self.problem:  # a line behind half a line would be lost with it
            return
        finite = {name: value if _is_json(value) else None for name, value in values.items()}
        try:
            self._file.write(json.dumps(finite) + "\n")
            self._file.flush()
        except OSError as error:
            self.problem = unwritable(self.path, error)

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            if not self.problem:
                raise FindingsError([unwritable(self.path, error)]) from None


def _is_json(value: Any) -> bool:
    """NaN and infinities are none."""
    return not isinstance(value, float) or math.isfinite(value)


def _step_of(line: bytes) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):  # a line cut off by a kill, or what a crash left in its place
        return float("inf")
