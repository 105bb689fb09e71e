"""A diagnosis: the files of a job sorted by kind, each kind read by its reader. The verb `diagnose` calls `diagnose`.

`READERS` is the one place where a kind of file gets its reader; `report/diagnosis/` has the text of each kind.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from threefold.diagnose.files import Kind, kind_of
from threefold.diagnose.hangs.hang import read_dumps
from threefold.diagnose.logs.job_logs import JobLogs, read_logs
from threefold.diagnose.part import Context, Part, Reader, unreadable
from threefold.diagnose.run_health import RunPart, logs_of, read_runs
from threefold.diagnose.snapshots.snapshot_part import read_snapshots
from threefold.diagnose.trace_part import read_traces
from threefold.findings import Finding
from threefold.notebook import ShownAsTable

READERS: dict[Kind, Reader] = {  # in this order: a run's folder has the plan that its logs and dumps are held against
    "run folder": read_runs,
    "log": read_logs,
    "flight recorder": read_dumps,
    "snapshot": read_snapshots,
    "trace": read_traces,
}


@dataclass(repr=False)
class Diagnosis(ShownAsTable):
    """What happened, by kind of file."""

    parts: list[Part] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)  # of the parts, and about files that cannot be read

    @property
    def _logs(self) -> JobLogs | None:
        return next((part for part in self.parts if isinstance(part, JobLogs)), None)

    @property
    def has_steps(self) -> bool:
        """Whether the logs show that the job took a step."""
        return self._logs is not None and self._logs.health.last is not None

    @property
    def death(self) -> str | None:
        """What the logs say that the job died of; None where they say no death."""
        return self._logs.verdict.slug or None if self._logs else None

    def summary(self) -> str:
        died = f"died of {self.death}" if self.death else "no death in logs"
        return f"{died}; {', '.join(part.kind for part in self.parts) or 'nothing'} read"

    def table(self) -> tuple[list[str], list[list[str]]]:
        """What each kind of file says, line by line."""
        return ["files", ""], [[part.kind, line] for part in self.parts for line in part.lines]

    def to_json(self) -> dict[str, Any]:
        parts = {part.kind.replace(" ", "_"): part.to_json() for part in self.parts}
        return {"parts": parts, "findings": [finding.to_json() for finding in self.findings]}


def diagnose(paths: Sequence[str | Path], context: Context | None = None) -> Diagnosis:
    """Read what a job left behind, and say what happened. A file that cannot be read becomes a finding."""
    context = context or Context()
    by_kind: dict[Kind, list[Path]] = {}
    found = Diagnosis()
    for path in map(Path, paths):
        try:
            kind = kind_of(path)
        except (OSError, ValueError) as error:
            found.findings.append(unreadable(path, error))
            continue
        by_kind.setdefault(kind, []).append(path)
        if kind == "run folder" and (logs := logs_of(path)):
            by_kind.setdefault("log", []).extend(logs)
    for kind in (kind for kind in READERS if kind in by_kind):
        part = READERS[kind](by_kind[kind], context)
        if isinstance(part, RunPart) and part.runs and context.plan is None:
            context = replace(context, plan=part.runs[0].plan, plan_source="the run's folder")
        found.parts.append(part)
        found.findings += part.findings
    return found
