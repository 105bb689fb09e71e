"""Reads the folder of a run that has ended or still goes on: plan, contract and metrics, without torch.

`compare`, `diagnose` and `report` call `read_run`; the engine writes the files (`engine/run/folder.py`,
docs/reference/run-folder.md). The folder may come from a stranger: only regular files inside it are read, and of
bounded size. A line of metrics that a kill cut off is left out; so are damaged lines, and a warning says how many.
"""

import json
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from threefold.findings import Finding, FindingsError
from threefold.notebook import ShownAsTable
from threefold.plan.file import read_plan
from threefold.plan.plan import Plan
from threefold.plan.same_run import listed, model_differences
from threefold.safe_files import UnsafeFileError, open_regular, read_json, read_json_object
from threefold.units import format_many, format_number

PLAN, CONTRACT, METRICS, LOADS = "plan.toml", "contract.json", "metrics.jsonl", "loads.json"
MAX_LINE_BYTES = 2**20
MAX_LINES = 3_000_000
MAX_VALIDATION_SETS = 16
WARMUP_STEPS = 6  # left out at the start of a run whose contract has no steady window, as the engine does

# The columns that are kept of a line of metrics; a number that is absent or not finite is NaN.
COLUMNS = (
    "step",
    "loss",
    "grad_norm",
    "seconds",
    "tokens_per_second",
    "useful_tokens_per_second",
    "tflops",
    "tflops_per_gpu",
    "mfu",
    "memory_bytes",
    "data_seconds",
    "skipped_steps",
    "overflow_steps",
    "router/dropped",
    "router/entropy",
    "router/idle_experts",
    "router/load_max",
    "router/rank_load_max",
    "images",
    "vision_tflops",
    "encoder_seconds",
    "projector_seconds",
    "decoder_seconds",
)
Column = NDArray[np.float64]


@dataclass(frozen=True, slots=True, repr=False)
class RunRecord(ShownAsTable):
    """What a run's folder says."""

    folder: Path
    plan: Plan
    contract: dict[str, Any]  # empty where there is none
    columns: dict[str, Column]  # by name in `COLUMNS`, one value a logged step, in order of steps
    loads: list[list[float]]  # tokens of each expert in the last step, one list a layer; empty where unknown
    findings: list[Finding]  # warnings about what was left out
    validation: dict[str, dict[float, float]] = field(default_factory=dict)  # by set and step, the loss

    def summary(self) -> str:
        loss, done = self.last("loss"), self.last("step")
        said = f"{self.folder}: step {done or 0:.0f} of {self.plan.job.steps}"
        return said if loss is None else f"{said}, loss {loss:.4f}"

    def table(self) -> tuple[list[str], list[list[str]]]:
        """The last value of each metric."""
        known = [(name, self.last(name)) for name in COLUMNS]
        return ["metric", "last"], [[name, format_number(value)] for name, value in known if value is not None]

    @property
    def num_steps(self) -> int:
        """Steps that were logged."""
        return len(self.columns["step"])

    @property
    def useful_tokens(self) -> Column:
        """Useful tokens of each logged step; those of the plan where a line does not say."""
        counted = self.columns["useful_tokens_per_second"] * self.columns["seconds"]
        return np.where(np.isfinite(counted), counted, float(self.plan.tokens_per_step))

    @property
    def is_image_free(self) -> bool:
        """A vision-language model saw no image in any logged step. A run that does not count images is not."""
        counted = self.columns["images"][np.isfinite(self.columns["images"])]
        return self.plan.is_vlm and len(counted) > 0 and not counted.any()

    @property
    def tokens_seen(self) -> Column:
        """Useful tokens up to each logged step. Steps between two logged ones count like the later one."""
        steps = np.diff(self.columns["step"], prepend=0.0)
        return np.cumsum(self.useful_tokens * steps)

    def last(self, name: str) -> float | None:
        """The last finite value of a column."""
        known = self.columns[name][np.isfinite(self.columns[name])]
        return float(known[-1]) if len(known) else None

    def is_steady(self, window: tuple[int, int] | None = None) -> NDArray[np.bool_]:
        """The logged steps that count for step times: those of the window, else of the contract's windows, else those
        after the warm-up. Steps without a time never do."""
        step, timed = self.columns["step"], self.columns["seconds"] > 0
        windows = [window] if window else self._contract_windows()
        if windows:
            inside = np.zeros(len(step), dtype=bool)
            for first, last in windows:
                inside |= (step >= first) & (step <= last)
        else:
            inside = np.arange(len(step)) >= min(WARMUP_STEPS, len(step) // 2)
        return np.asarray(inside & timed)

    def _contract_windows(self) -> list[tuple[float, float]]:
        timing = self.contract.get("timing")
        found = (
            [each.get("steady_steps") for each in timing if isinstance(each, dict)] if isinstance(timing, list) else []
        )
        pairs = [tuple(map(_number, each)) for each in found if isinstance(each, list) and len(each) == 2]
        return [(first, last) for first, last in pairs if math.isfinite(first) and math.isfinite(last)]


def is_run_folder(path: Path) -> bool:
    return path.is_dir() and any((path / name).exists() for name in (PLAN, METRICS))


def read_run(folder: Path) -> RunRecord:
    """Read the folder. Raises findings where it holds no run, or one whose files cannot be read."""
    plan = _read_plan(folder)
    contract = _read_contract(folder)
    if differences := model_differences(contract.get("model"), plan):
        problem = f"the model is another one than the run was started with: {listed(differences)}"
        advice = "give the model as it was when the run was started"
        raise FindingsError([Finding(rule="run-is-this-plan", at=str(folder), problem=problem, advice=advice)])
    columns, validation, findings = _read_metrics(folder)
    return RunRecord(folder, plan, contract, columns, _read_loads(folder), findings, validation)


def _unreadable(path: Path, problem: str, advice: str) -> FindingsError:
    return FindingsError([Finding(rule="run-readable", at=str(path), problem=problem, advice=advice)])


def _read_plan(folder: Path) -> Plan:
    path = folder / PLAN
    try:
        open_regular(path, within=folder).close()
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
        raise _unreadable(path, problem, "give the folder of a run, in which plan.toml is") from None
    parsed = read_plan(str(path))
    if parsed.plan is None:
        raise FindingsError(parsed.findings)
    return parsed.plan


def _read_contract(folder: Path) -> dict[str, Any]:
    try:
        return read_json_object(folder / CONTRACT, within=folder)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        problem = f"cannot be read: {error}"
        raise _unreadable(folder / CONTRACT, problem, "restore it, or delete it: versions are unknown then") from None


def _read_loads(folder: Path) -> list[list[float]]:
    """Expert loads; none where the file is absent or damaged, because nothing but the skew depends on it."""
    try:
        loads = read_json(folder / LOADS, within=folder)
    except (OSError, ValueError):
        return []
    rows = loads if isinstance(loads, list) else []
    sound = all(isinstance(row, list) and row and all(_number(each) >= 0 for each in row) for row in rows)
    return [[_number(each) for each in row] for row in rows] if sound else []


def _read_metrics(folder: Path) -> tuple[dict[str, Column], dict[str, dict[float, float]], list[Finding]]:
    """Columns of the steps, losses of validation sets, and warnings."""
    path = folder / METRICS
    lines: dict[float, array[float]] = {}
    validation: dict[str, dict[float, float]] = {}
    damaged = []
    try:
        with open_regular(path, within=folder) as file:
            for number, (line, is_cut) in enumerate(_lines(file), start=1):
                if number > MAX_LINES:
                    raise UnsafeFileError(f"it has more than {MAX_LINES} lines")
                values = _values(line)
                if values is None and not is_cut:
                    damaged.append(number)
                elif values is not None and "seconds" in values:
                    row = array("d", [_number(values.get(name)) for name in COLUMNS])
                    lines[row[0]] = row  # of two lines of one step the later one counts
                elif values is not None:
                    _add_evaluation(validation, values)
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
        raise _unreadable(path, problem, "give the folder of a run that has trained") from None
    if not lines:
        what = f"it holds no step, but {format_many(len(damaged), 'damaged line')}" if damaged else "it holds no step"
        raise _unreadable(path, what, "let the run take some steps, or restore the file")
    table = np.array([lines[step] for step in sorted(lines)], dtype=np.float64)
    columns = {name: table[:, i] for i, name in enumerate(COLUMNS)}
    return columns, validation, [_damage(path, damaged)] if damaged else []


def _add_evaluation(validation: dict[str, dict[float, float]], values: dict[str, Any]) -> None:
    """Keep the losses of a line that an evaluation wrote, which has no time: one number for each validation set."""
    for key, value in values.items():
        name = key.removeprefix("eval/").removesuffix("/loss")
        is_loss = key == f"eval/{name}/loss" and math.isfinite(_number(value))
        if is_loss and (name in validation or len(validation) < MAX_VALIDATION_SETS):
            validation.setdefault(name, {})[_number(values["step"])] = _number(value)


def _damage(path: Path, damaged: list[int]) -> Finding:
    return Finding(
        rule="run-readable",
        severity="warning",
        at=str(path),
        problem=f"{format_many(len(damaged), 'line')} cannot be read and were left out, the first is line {damaged[0]}",
        advice="restore the file; the comparison goes on without these steps",
    )


def _lines(file: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    """Each line, and whether it ends without a line feed: the last one of a run that was killed."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        if len(line) > MAX_LINE_BYTES:
            raise UnsafeFileError(f"it has a line of more than {MAX_LINE_BYTES} bytes")
        yield line, not line.endswith(b"\n")


def _values(line: bytes) -> dict[str, Any] | None:
    """The object of a line that names its step; None where it is none."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) and math.isfinite(_number(values.get("step"))) else None


def _number(value: Any) -> float:
    if not _is_real(value):
        return math.nan
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def _is_real(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
