"""Measures trials of a plan for Megatron Bridge by jobs that somebody else runs, and by the logs that they leave.

`api/tunings.py` makes a `LogMeasurer` where the plan's target is Megatron Bridge. A trial without a log is written as a
job in a folder of its own: the exported files, and the contract that its log has to keep. The jobs of a batch are in
`run-batch.sh`, in the order in which they are to run, because the plan that they are compared with runs between them.
The same command then reads the logs and continues.
"""

import hashlib
import re
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from threefold.compare.contract import Contract, Difference, differences, undeclared
from threefold.compare.read_contract import contract_of_logs, contract_of_plan, job_logs, write_contract_file
from threefold.diagnose.logs.job_logs import JobLogs
from threefold.findings import Finding, FindingsError, shown
from threefold.interop.megatron.bridge_files import export_files
from threefold.interop.megatron.export_plan import BRIDGE, export_plan
from threefold.launch.slurm import Options
from threefold.plan.plan import Plan
from threefold.plan.same_run import listed
from threefold.safe_files import write_aside
from threefold.tune.measurement import AwaitingLogs, Measurement, Trial, Window

JOBS, BATCH, LOG = "jobs", "run-batch.sh", "job.log"
_STATED = ("software.", "hardware.", "environment.", "settings.")  # what plans do not say, and jobs must share
_OF_A_PLAN = ("environment.CUDA_DEVICE_MAX_CONNECTIONS",)


@dataclass
class LogMeasurer:
    """Jobs and logs below `folder`; `submit` is the name that the plan was given by."""

    folder: Path
    submit: str
    options: Options
    session: str = "jobs in the order of their batches"
    has_traces: bool = False

    def __post_init__(self) -> None:
        self._seconds = 0.0  # on the clock of the jobs, which run one after another
        self._shared: Contract | None = None  # what the log of the first job states besides its plan

    def prepare(self, trials: Sequence[Trial]) -> None:
        """Write the jobs that have no log, if the first of them has none, in the order in which they are to run."""
        missing = [trial for trial in trials if not self._logs(trial.window)]
        if not missing or missing[0] is not trials[0]:
            return
        for trial in missing:
            self._write_job(trial.plan, trial.window)
        folders = [self._job(trial.window) for trial in missing]
        lines = [
            f"sbatch --wait --output={shlex.quote(f'{job}/{LOG}')} {shlex.quote(f'{job}/job.sbatch')}"
            for job in folders
        ]
        text = "#!/bin/bash\n# One after another: the plan that the others are compared with runs between them.\n"
        write_aside(self.folder / BATCH, (text + "\n".join(lines) + "\n").encode())
        raise AwaitingLogs(len(missing), str(self.folder / BATCH))

    def measure(self, plan: Plan, window: Window) -> Measurement:
        if not self._logs(window):
            self.prepare([Trial(plan, window)])
        try:
            logs = job_logs([str(path) for path in self._logs(window)], None)
            problem = self._breach(plan, logs)
        except FindingsError as error:
            return Measurement(error=str(error.findings[0].problem))
        if _is_under_way(logs, window):
            raise AwaitingLogs(1, f"{self._job(window)}/job.sbatch", is_under_way=True)
        found = _measured(logs, window)
        self._seconds += sum(found.steps) or 1.0
        if problem and not found.error:
            return Measurement(error=problem)
        if logs.notices and not found.error:
            fell_back = listed([f"{slug}: {text}" for slug, text in logs.notices.items()])
            return Measurement(error=f"a setting fell back: {fell_back}")
        return found

    def now(self) -> float:
        return self._seconds

    def close(self) -> None:
        pass

    def _job(self, window: Window) -> Path:
        """The folder of a trial's job: its name, and a digest, because names are cut and long changes begin alike."""
        name = re.sub(r"[^A-Za-z0-9.,=+-]+", "_", window.name)[:100]
        return self.folder / JOBS / f"{name}-{hashlib.sha256(window.name.encode()).hexdigest()[:8]}"

    def _logs(self, window: Window) -> list[Path]:
        """The logs that a job left; one file, or one a rank."""
        folder = self._job(window)
        return sorted(path for path in folder.glob("*.log*") if path.is_file() and path.stat().st_size)

    def _write_job(self, plan: Plan, window: Window) -> None:
        export = export_plan(plan, BRIDGE)
        settings = {
            "train.train_iters": window.warmup + window.steps,
            "logger.log_interval": 1,
            "checkpoint.save": None,
            "checkpoint.load": None,
        }
        if plan.job.lr_schedule != "constant":
            settings["scheduler.lr_decay_iters"] = plan.job.steps
        timed = replace(export, settings={**export.settings, **settings})
        folder = self._job(window)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in export_files(timed, self.submit, self.options, str(folder)).items():
                (folder / name).write_text(text, encoding="utf-8")
            write_contract_file(contract_of_plan(plan, str(folder)), folder / "contract.json")
        except OSError as error:
            problem, advice = (
                f"cannot be written: {error.strerror or error}",
                "free space, or choose another --out folder",
            )
            raise FindingsError(
                [Finding(rule="run-writable", at=str(folder), problem=problem, advice=advice)]
            ) from None

    def _breach(self, plan: Plan, logs: JobLogs) -> str:
        """Why the log is not that of this trial, or not on the software and hardware of the first; empty if it is."""
        try:
            contract = contract_of_logs(logs, ["job"])
        except FindingsError:
            return "the log prints no configuration: nothing shows which job it is of"
        more = undeclared(
            differences(contract_of_plan(plan, "plan"), contract), ("run", "job.steps", "timing", "stack")
        )
        more = [each for each in more if each.field != "optimizer.decay_steps"]
        if plan.knobs.dispatcher in ("deepep", "hybridep") and "knobs.dispatcher" not in contract.facts:
            return f"the log does not show that {plan.knobs.dispatcher} was on"
        if self._shared is None:
            self._shared = contract
        elif not more:
            found = differences(self._shared, contract)
            more = [each for each in found if each.field.startswith(_STATED) and each.field not in _OF_A_PLAN]
        return f"the log breaks the contract: {listed([_told(each) for each in more])}" if more else ""


def _told(each: Difference) -> str:
    return f"{each.field} ({each.kind}) {shown(each.a)}, in the log {shown(each.b)}"


def _is_under_way(logs: JobLogs, window: Window) -> bool:
    """Whether the log ends before its last step and without a death: its job runs, or was killed without a word."""
    ended = logs.verdict.status in ("died", "finished")
    return not ended and logs.steps.last < window.warmup + window.steps


def _measured(logs: JobLogs, window: Window) -> Measurement:
    """Steps, losses and failure of a job."""
    columns = {name: np.asarray(column, dtype=float) for name, column in logs.steps.columns.items()}
    seconds = columns["seconds"][window.warmup : window.warmup + window.steps]
    steps = tuple(float(value) for value in seconds if np.isfinite(value) and value > 0)
    if logs.verdict.status == "died":
        slug = logs.verdict.slug or "unknown"
        first = logs.verdict.evidence.text[:200] if logs.verdict.evidence else ""
        return Measurement(error=f"{'out of memory' if 'memory' in slug or 'oom' in slug else slug}: {first}")
    if len(steps) < max(1, window.steps // 2):
        return Measurement(error=f"the log has {len(steps)} of {window.steps} timed steps")
    peaks = [size for values in logs.printed.memory_bytes.values() for size in values.values()]
    plan = logs.configuration.plan
    return Measurement(
        steps=steps,
        losses=tuple(float(value) for value in columns["loss"]),
        skipped=logs.steps.num_skipped,
        peak_bytes=int(max(peaks)) if peaks else None,
        useful_tokens=float(plan.tokens_per_step) if plan else None,
        flops=_flops(logs, statistics.median(steps)),
    )


def _flops(logs: JobLogs, seconds: float) -> float | None:
    plan, tflops = logs.configuration.plan, logs.health.tflops
    return tflops * 1e12 * seconds * plan.cluster.gpus if plan and tflops else None
