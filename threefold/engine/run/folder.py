"""The folder of a run: the plan, the contract (versions, hardware, data), metrics, expert loads and checkpoints.

`engine/train.py` opens and fills it; `sample`, `compare` and `report` read it. The files are plan.toml, contract.json,
metrics.jsonl, loads.json and checkpoints/step-00000100.
"""

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
from threefold.engine.run.lock import RunLock
from threefold.findings import Finding, FindingsError
from threefold.plan.file import dump_plan, read_plan
from threefold.plan.plan import Plan

# The knobs that decide what a checkpoint holds.
_CHECKPOINT_KNOBS = ("knobs.precision", "knobs.optimizer_dtype", "knobs.master_weights")
PLAN, CONTRACT, METRICS, CHECKPOINTS = "plan.toml", "contract.json", "metrics.jsonl", "checkpoints"
LOADS = "loads.json"


def open_run(folder: Path, plan: Plan, lock: RunLock | None = None) -> None:
    """Make the folder, or go on in one that holds a run of the same plan. `lock` keeps other processes out."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if lock:
            lock.acquire()
        plan_file = folder / PLAN
        if plan_file.exists():
            before = read_plan(str(plan_file)).plan
            if before is None or _fixed_fields(before) != _fixed_fields(plan):
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
        raise FindingsError([unwritable_finding(folder, error)]) from None
    _replace(plan_file, dump_plan(plan, complete=True).encode())
    if lock:
        lock.write_holder()


def unwritable_finding(path: Path, error: OSError) -> Finding:
    """The finding about a file or folder of the run that cannot be written."""
    problem = f"cannot be written: {error.strerror or error}"
    return Finding(
        rule="run-writable", at=str(path), problem=problem, advice="free space, or choose another --run folder"
    )


def _fixed_fields(plan: Plan) -> dict[str, Any]:
    """The fields that must stay the same when a run goes on: the model, the job, and the knobs a checkpoint depends on.

    The number of steps, the layout, the cluster and how the run is watched may change.
    """
    return {path: value for path, value in plan.written if path in _CHECKPOINT_KNOBS or _defines_the_model(path)}


def _defines_the_model(path: str) -> bool:
    return path != "job.steps" and path.startswith(("model", "job."))


def read_run_plan(folder: Path) -> Plan:
    """The plan that a run was last started with."""
    parsed = read_plan(str(folder / PLAN))
    if parsed.plan is None:
        raise FindingsError(parsed.findings)
    return parsed.plan


def write_contract(folder: Path, plan: Plan, device: torch.device, data: str, benchmark_only: bool) -> None:
    """Write down what a later reader needs in order to know what ran: plan, versions, hardware, data."""
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
    """Write a file so that a run killed meanwhile leaves either the old contents or the new."""
    aside = path.with_name(path.name + ".partial")
    try:
        aside.write_bytes(text)
        aside.replace(path)
    except OSError as error:
        raise FindingsError([unwritable_finding(path, error)]) from None


def write_expert_loads(folder: Path, load_LE: Tensor | None) -> None:
    """Write the tokens of each expert in the last step, one list per layer: the input of `--loads`."""
    if load_LE is not None:
        _replace(folder / LOADS, json.dumps(load_LE.round().long().tolist()).encode())


def append_timing(folder: Path, seconds: list[float], steps_before: int, skipped: int = 5) -> None:
    """Add a steady window to the contract: the first and last step of this process after its warm-up, numbered from 1,
    and their mean time."""
    path = folder / CONTRACT
    skip = min(skipped, len(seconds) // 2)
    steady = seconds[skip:]
    if not steady or not path.exists():
        return
    contract = json.loads(path.read_text(encoding="utf-8"))
    window = [steps_before + skip + 1, steps_before + len(seconds)]
    mean = sum(steady) / len(steady)
    contract.setdefault("timing", []).append({"steady_steps": window, "mean_step_seconds": mean})
    _replace(path, json.dumps(contract, indent=2).encode())


class Metrics:
    """Writes `metrics.jsonl`, one JSON object per line. Steps are numbered from 1, as in the terminal.

    A run that goes on behind `last_step` drops the lines past it. Earlier versions numbered steps from 0; lines of
    such a file are given the numbers of today.

    A line that cannot be written, as on a full disk, raises nothing: the finding is in `problem`, so that the run can
    save and end.
    """

    def __init__(self, folder: Path, last_step: int) -> None:
        self.path = folder / METRICS
        self.problem: Finding | None = None
        try:
            if self.path.exists():
                found = _numbered_from_one(self.path.read_bytes().splitlines())
                lines = [line for line in found if _step_of(line) <= last_step]
                _replace(self.path, b"".join(line + b"\n" for line in lines))
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise FindingsError([unwritable_finding(self.path, error)]) from None

    def write(self, values: dict[str, Any]) -> None:
        if self.problem:  # half a line was written, and the next line would be lost with it
            return
        finite = {name: value if _is_json(value) else None for name, value in values.items()}
        try:
            self._file.write(json.dumps(finite) + "\n")
            self._file.flush()
        except OSError as error:
            self.problem = unwritable_finding(self.path, error)

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            if not self.problem:
                raise FindingsError([unwritable_finding(self.path, error)]) from None


def _is_json(value: Any) -> bool:
    """Whether JSON can express the value: it has no NaN and no infinities."""
    return not isinstance(value, float) or math.isfinite(value)


def _numbered_from_one(lines: list[bytes]) -> list[bytes]:
    """The lines of a file whose first step has the number 1. Only earlier versions wrote a step 0."""
    if not any(_step_of(line) == 0 for line in lines):
        return lines
    readable = [json.loads(line) for line in lines if _step_of(line) < math.inf]
    return [json.dumps({**values, "step": int(values["step"]) + 1}).encode() for values in readable]


def _step_of(line: bytes) -> float:
    try:
        return int(json.loads(line)["step"])
    except (
        ValueError,
        KeyError,
        TypeError,
        OverflowError,
        RecursionError,
    ):  # a line that a kill cut off, or garbage that a crash left
        return math.inf
