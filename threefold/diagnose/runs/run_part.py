"""What folders of runs of the threefold engine say: their health. `diagnosis.py` reads the logs in them as logs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from threefold.diagnose.files import Kind
from threefold.diagnose.part import Context
from threefold.diagnose.runs.run_health import judge_run, run_lines, run_steps, slow_ranks_of
from threefold.findings import Finding, FindingsError
from threefold.profile.readers.run_record import RunRecord, read_run
from threefold.safe_files import check_inside

LOGS, PROFILE = "logs", "profile"
_MOST_LOGS = 4096


@dataclass
class RunPart:
    """The runs of a diagnosis."""

    runs: list[RunRecord] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def kind(self) -> Kind:
        return "run folder"

    def to_json(self) -> dict[str, Any]:
        return {"runs": [run_steps(run).to_json() for run in self.runs], "lines": self.lines}


def read_runs(paths: Sequence[Path], context: Context) -> RunPart:
    """Read what runs logged about their steps. A run that ended before its first step has no health."""
    part = RunPart()
    for path in paths:
        context.say(f"reading the run {path.name}")
        try:
            run = read_run(path)
        except FindingsError as error:
            part.lines += [context.redact(f"{one.at}: {one.problem}") for one in error.findings]
            continue
        part.runs.append(run)
        part.lines += run_lines(run, context.redact)
        if (path / PROFILE).is_dir():
            part.lines.append("it was profiled: `threefold profile RUN` reads its traces, `diagnose` its snapshots")
        part.findings += [*run.findings, *judge_run(run, slow_ranks_of(path), context.redact)]
    return part


def logs_of(folder: Path) -> list[Path]:
    """The logs of ranks that a run's folder holds. Links that lead out of it are left out."""
    found = []
    for path in sorted((folder / LOGS).glob("*.log"))[:_MOST_LOGS]:
        try:
            check_inside(path, folder)
        except OSError:
            continue
        found.append(path)
    return found
