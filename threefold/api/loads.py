"""Loads of experts in the library: what a run recorded, with the findings about its routers."""

from pathlib import Path

from threefold.diagnose.run_health import judge_run
from threefold.findings import Finding
from threefold.profile.expert_loads import LoadSummary, summarize_load
from threefold.profile.readers.run_record import is_run_folder, read_run

_ABOUT_ROUTERS = ("router-collapsed", "experts-idle")


def load_of_run(subject: str | Path, ep: int | None = None) -> tuple[LoadSummary, list[Finding]]:
    """The load that the folder of a run, or a file, holds. With a run its plan prices it. Raises findings."""
    run = read_run(Path(subject)) if is_run_folder(Path(subject)) else None
    findings = [finding for finding in judge_run(run) if finding.rule in _ABOUT_ROUTERS] if run else []
    return summarize_load(subject, run.plan if run else None, ep), findings
