"""Megatron's wheels as judges of exports: one process for each release, which imports Megatron once.

`MEGATRON_HOME` is the folder that `make test-megatron` sets up: an interpreter, and `wheels/RELEASE` for each release.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

from threefold.interop.megatron.bridge_files import export_files
from threefold.interop.megatron.export_plan import BRIDGE, export_plan
from threefold.interop.megatron.judge.verdict import Verdict
from threefold.interop.megatron.releases import known_releases
from threefold.interop.megatron.validation import job_of
from threefold.launch.slurm import Options
from threefold.plan.parse import change
from threefold.plan.plan import Plan
from threefold.rules.all import check, errors

RELEASES = tuple(release.bridge for release in known_releases())
WITH_LM = tuple(release.bridge for release in known_releases() if release.arguments)
NEEDS_WHEELS = pytest.mark.skipif(
    "MEGATRON_HOME" not in os.environ,
    reason="runs Megatron's wheels in an environment of their own: make test-megatron",
)


def home() -> Path:
    return Path(os.environ["MEGATRON_HOME"])


def wheels(release: str) -> Path:
    return home() / "wheels" / release


def python() -> str:
    return str(home() / "bin" / "python")


def write_export(plan: Plan, to: str, release: str, folder: Path) -> dict[str, Any]:
    """Write an export to a folder; returns the job that judges it."""
    export = export_plan(plan, to, release)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in export_files(export, "plan.toml", Options(), str(folder)).items():
        (folder / name).write_text(text)
    return job_of(export)


class Judge:
    """The process of one release."""

    def __init__(self, release: str, folder: Path) -> None:
        self.release = release
        words = [python(), str(ROOT / "tests" / "megatron" / "worker.py"), str(folder / "validate.py")]
        self.process = subprocess.Popen(
            [*words, str(wheels(release))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def judge(self, job: dict[str, Any], folder: Path, ranks: tuple[int, ...] = ()) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"job": job, "folder": str(folder), "ranks": ranks}) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, f"the worker of {self.release} ended with {self.process.wait()}"
        found: dict[str, Any] = json.loads(answer)
        return found


_JUDGES: dict[tuple[str, str], Judge] = {}


def verdict(plan: Plan, to: str, release: str, folder: Path, ranks: tuple[int, ...] = ()) -> dict[str, Any]:
    """Megatron's verdict on a plan, by its first and last rank; the first one of a release starts its process."""
    job = write_export(plan, to, release, folder)
    if (to, release) not in _JUDGES:
        _JUDGES[to, release] = Judge(release, folder)
    return _JUDGES[to, release].judge(job, folder, ranks)


def refusals(found: dict[str, Any]) -> list[str]:
    """What kept a plan from being accepted, one line a rank."""
    return [Verdict(**rank).line()[:500] for rank in found["ranks"] if rank["kind"] != "accepted"]


def findings(plan: Plan, release: str) -> tuple[Plan, list[Any], set[str]]:
    """The plan as one for Bridge of a release, its errors, and the fields that a warning speaks of."""
    judged = change(plan, {"target": BRIDGE, "stack.release": release})
    found = check(judged, notes=False)
    return judged, errors(found), {finding.at for finding in found}


def disagreements(plan: Plan, release: str, folder: Path, to: str = BRIDGE, ranks: tuple[int, ...] = ()) -> list[str]:
    """What Megatron refuses or changes of a plan that we accept, beyond what a warning or the export's table says."""
    judged, blocking, named = findings(plan, release)
    if blocking:
        return []
    found = verdict(judged, to, release, folder, ranks)
    named |= {item.field for item in export_plan(judged, to, release).inexpressible}
    differs = {name: pair for name, pair in found["differs"].items() if name not in named}
    return [*refusals(found), *(f"{name}: plan {mine}, Megatron {theirs}" for name, (mine, theirs) in differs.items())]
