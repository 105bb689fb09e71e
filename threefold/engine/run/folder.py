"""The folder of a run: the plan, the contract (versions, hardware, data), metrics, expert loads and checkpoints.

`engine/train.py` opens and fills it; `sample`, `compare` and `report` read it. The files are plan.toml, contract.json,
metrics.jsonl, loads.json, effects.json and checkpoints/step-00000100.
"""

import json
import math
import os
import platform
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import threefold
from threefold.engine.run.lock import RunLock
from threefold.findings import Finding, FindingsError
from threefold.launch.output import unwritable_finding
from threefold.plan.file import dump_plan, read_plan
from threefold.plan.plan import Plan
from threefold.plan.same_run import (
    DATA,
    MODEL,
    TOKENIZER,
    data_differences,
    field_differences,
    listed,
    model_differences,
    model_facts,
    tokenizer_differences,
)
from threefold.safe_files import (
    UnsafeFileError,
    open_regular,
    open_to_append,
    read_json_object,
    read_lines,
    unsafe_entries,
    write_aside,
)

PLAN, CONTRACT, METRICS, CHECKPOINTS = "plan.toml", "contract.json", "metrics.jsonl", "checkpoints"
LOADS, EFFECTS = "loads.json", "effects.json"
_VARIABLES = (
    *("NCCL_", "NVTE_", "CUDA_", "TORCH_", "PYTORCH_", "NVSHMEM_", "GLOO_", "OMP_", "MKL_", "TRITON_", "CUBLAS_"),
    *("CUDNN_", "DEEPEP_", "EP_", "UB_", "FLA_"),
)
_OF_A_RANK = ("CUDA_VISIBLE_DEVICES", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "TRITON_CACHE_DIR")
_MOST_VARIABLES = 100
WARM_UP_STEPS = 6  # at the start, before the steady window


def open_run(folder: Path, plan: Plan, lock: RunLock | None = None) -> None:
    """Make the folder, or resume in one that holds a run of the same plan. `lock` keeps other processes out.

    The plan is written by `record_plan`, when data and weights are known to be good, so that a start that fails does
    not bind the next one. A plan in a folder without contract and checkpoints is that of a start that was killed.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_run_folder(folder)
        if lock:
            lock.acquire()
        if (folder / PLAN).exists() and _has_started(folder):
            _check_same_run(folder, _plan_before(folder, plan), plan)
    except OSError as error:
        raise FindingsError([unwritable_finding(folder, error)]) from None
    if lock:
        lock.write_holder()


def record_plan(folder: Path, plan: Plan) -> None:
    """Write the plan that the run continues with: `sample` and `export-hf` read it."""
    replace_file(folder / PLAN, dump_plan(plan, complete=True).encode())


def check_same_data(folder: Path, content: list[dict[str, Any]], tokenizer: dict[str, Any] | None = None) -> None:
    """Raise where data or tokenizer are not what the run was started with, with each fact that differs.

    Paths are no facts.
    """
    contract = _contract_of(folder)
    differences = tokenizer_differences(contract.get(TOKENIZER), tokenizer)
    differences += data_differences(contract.get(DATA), content)
    if differences:
        advice = (
            "give the data as it was, wherever it lies, with run.eval_every on or off as it was; or continue with "
            f"other data in a new run: `threefold train PLAN --from {folder} --run NEW`"
        )
        problem = f"the run was started with other data: {listed(differences)}"
        raise FindingsError([Finding(rule="data-unchanged", at="job.data", problem=problem, advice=advice)])


def _plan_before(folder: Path, plan: Plan) -> Plan | None:
    """The plan in the folder. A model whose content the contract has may be gone from where it lay."""
    by_content = isinstance(_contract_of(folder).get(MODEL), dict)
    overrides = [f"model={json.dumps(plan.model_name)}"] if by_content else []
    return read_plan(str(folder / PLAN), overrides).plan


def _check_same_run(folder: Path, before: Plan | None, plan: Plan) -> None:
    """Raise where the folder holds a run of another model or job, with each field that differs."""
    advice = (
        f"give the plan it was started with, or start a new run from its weights: "
        f"`threefold train PLAN --from {folder} --run NEW`"
    )
    contract = _contract_of(folder)
    differences = ["plan.toml in it cannot be read"] if before is None else field_differences(before, plan, contract)
    if not differences:
        differences = model_differences(contract.get(MODEL), plan)
        advice = "give the model as it was when the run was started, or choose another --run folder"
    if differences:
        problem = f"the folder holds a run of another plan: {listed(differences)}"
        raise FindingsError([Finding(rule="run-is-this-plan", at=str(folder), problem=problem, advice=advice)])


def _has_started(folder: Path) -> bool:
    return (folder / CONTRACT).exists() or any((folder / CHECKPOINTS).glob("step-*"))


def _contract_of(folder: Path) -> dict[str, Any]:
    """The contract that the run was started with; empty where there is none."""
    try:
        return read_json_object(folder / CONTRACT)
    except (OSError, ValueError):  # `check_run_folder` says it
        return {}


def check_run_folder(folder: Path) -> None:
    """Raise where a folder holds what a run must not read or write through, or a contract that is none.

    The folder may be untrusted: a link in it could lead a write of the run to any file of the user.
    """
    for path, reason in unsafe_entries(folder):
        advice = "remove it from the run's folder; for another disk, put the whole run there with --run"
        raise FindingsError([unreadable_finding(path, reason, advice)])
    contract = folder / CONTRACT
    try:
        read_json_object(contract)
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError) as error:
        advice = "restore it, or delete it: the run continues without it"
        raise FindingsError([unreadable_finding(contract, f"cannot be read: {error}", advice)]) from None


def unreadable_finding(path: Path, problem: str, advice: str) -> Finding:
    """The finding about a file of a run's folder that is not read."""
    return Finding(rule="run-readable", at=str(path), problem=problem, advice=advice)


def read_run_plan(folder: Path) -> Plan:
    """The plan that a run was last started with. Raises where its model is another one by now."""
    try:
        open_regular(folder / PLAN, within=folder).close()
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
        advice = "give the folder of a run, in which plan.toml is"
        raise FindingsError([unreadable_finding(folder / PLAN, problem, advice)]) from None
    parsed = read_plan(str(folder / PLAN))
    if parsed.plan is None:
        raise FindingsError(parsed.findings)
    _check_same_run(folder, parsed.plan, parsed.plan)
    return parsed.plan


def write_contract(
    folder: Path,
    plan: Plan,
    device: torch.device,
    data: tuple[str, list[dict[str, Any]]],
    benchmark_only: bool,
    lineage: list[dict[str, Any]] | None = None,
    tokenizer: dict[str, Any] | None = None,
) -> None:
    """Write down what a later reader needs in order to know what ran: plan, versions, hardware, the fingerprint and
    content of the data, the tokenizer that the plan names, and the runs that its weights came from, oldest first."""
    contract = {
        "plan": plan.hash,
        "fields": dict(plan.written),
        MODEL: model_facts(plan),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "threefold": threefold.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu x {os.cpu_count()}",
        "threads": torch.get_num_threads(),
        "environment": _environment(),
        "data": data[0],
        DATA: data[1],
        "benchmark_only": benchmark_only,
        **({TOKENIZER: tokenizer} if tokenizer else {}),
        **({"lineage": lineage} if lineage else {}),
    }
    replace_file(folder / CONTRACT, json.dumps(contract, indent=2).encode())


def _environment() -> dict[str, str]:
    """Variables that change how the libraries of a run compute and communicate; those of a single rank are left out."""
    known = sorted(name for name in os.environ if name.startswith(_VARIABLES) and name not in _OF_A_RANK)
    return {name: os.environ[name][:200] for name in known[:_MOST_VARIABLES]}


def replace_file(path: Path, text: bytes | Iterable[bytes]) -> None:
    """Write a file so that a run killed meanwhile leaves either the old contents or the new."""
    aside = path.with_name(path.name + ".partial")
    try:
        write_aside(aside, text)
        aside.replace(path)
    except OSError as error:
        raise FindingsError([unwritable_finding(path, error)]) from None


def write_expert_loads(folder: Path, load_LE: Tensor | None) -> None:
    """Write the tokens of each expert in the last step, one list per layer: the input of `--loads`."""
    if load_LE is not None:
        replace_file(folder / LOADS, json.dumps(load_LE.round().long().tolist()).encode())


def write_effects(folder: Path, report: dict[str, Any]) -> None:
    """Write what the settings did in this start of the run (`engine/effects/recorder.py`)."""
    replace_file(folder / EFFECTS, json.dumps(report, indent=2, allow_nan=False).encode())


def append_timing(
    folder: Path,
    seconds: list[float],
    steps_before: int,
    profiled: tuple[int, int] | None = None,
) -> None:
    """Add the steps of this start of the run to the contract: the first one, the profiled ones, and the steady window
    with its mean time. Steps are numbered from 1."""
    path = folder / CONTRACT
    skip = min(WARM_UP_STEPS, len(seconds) // 2)
    steady = seconds[skip:]
    if not steady:
        return
    try:
        contract = read_json_object(path)
    except (OSError, ValueError):  # none, or one that was damaged since the run was opened: nothing to add to
        return
    window = [steps_before + skip + 1, steps_before + len(seconds)]
    mean = sum(steady) / len(steady)
    before = contract.get("timing")
    timing: dict[str, Any] = {
        "first_step": steps_before + 1,
        "steady_steps": window,
        "mean_step_seconds": mean,
        **({"profiled_steps": list(profiled)} if profiled else {}),
    }
    contract["timing"] = [*(before if isinstance(before, list) else []), timing]
    replace_file(path, json.dumps(contract, indent=2).encode())


class Metrics:
    """Writes `metrics.jsonl`, one JSON object per line. Steps are numbered from 1, as in the terminal.

    A run that resumes after `last_step` drops the lines past it. Earlier versions numbered steps from 0; lines of
    such a file are given the numbers of today.

    A line that cannot be written, as on a full disk, raises nothing: the finding is in `problem`, so that the run can
    save and end.
    """

    def __init__(self, folder: Path, last_step: int) -> None:
        self.path = folder / METRICS
        self.problem: Finding | None = None
        try:
            if self.path.exists():
                open_regular(self.path).close()  # a fault of the file is none of the folder that is written to
                replace_file(self.path, _lines_until(self.path, last_step))
            self._file = open_to_append(self.path)
        except UnsafeFileError as error:
            advice = "move it away: the run continues with a new file"
            raise FindingsError([unreadable_finding(self.path, str(error), advice)]) from None
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
    """Return whether JSON can express the value: it has no NaN and no infinities."""
    return not isinstance(value, float) or math.isfinite(value)


def _lines_until(path: Path, last_step: int) -> Iterator[bytes]:
    """The lines of steps up to one, numbered from 1. Only earlier versions wrote a step 0."""
    is_from_zero = any(_step_of(line) == 0 for line in read_lines(path))
    for line in read_lines(path):
        step = _step_of(line) + is_from_zero
        if step <= last_step:
            yield (json.dumps({**json.loads(line), "step": int(step)}).encode() if is_from_zero else line) + b"\n"


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
