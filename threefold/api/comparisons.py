"""Traces and runs looked at, and two of anything compared. No torch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from threefold.api.plans import on_measured_chip
from threefold.compare.comparison import Comparison, compare_sides
from threefold.compare.sides import open_side
from threefold.cost.chip_file import read_chip_file
from threefold.diagnose.diagnosis import Diagnosis, diagnose
from threefold.diagnose.part import Context
from threefold.diagnose.redact import Redactor
from threefold.findings import FindingsError
from threefold.machine.own_chip_file import NO_CHIP_FILE
from threefold.plan.plan import Plan
from threefold.profile.analyse import Profile, profile_traces
from threefold.spec.chips import ChipSpec


def profile_run(
    *paths: str | Path,
    plan: Plan | None = None,
    step_range: str | None = None,
    unprofiled_seconds: float | None = None,
) -> Profile:
    """Read PyTorch traces, exports of Nsight Systems or folders of runs; say which wall holds them back, and what would
    cure it. With the plan that ran, cures are changes of its fields; a run's folder has its own. `step_range` names the
    range around a step, `unprofiled_seconds` is the length of a step without a profiler."""
    return profile_traces([Path(path) for path in paths], plan, step_range, unprofiled_seconds)


def diagnose_job(
    *paths: str | Path, plan: Plan | None = None, raw: bool = False, say: Callable[[str], None] | None = None
) -> Diagnosis:
    """Read what a dead, slow or full job left behind (logs, flight recorder dumps, memory snapshots, traces, the folder
    of a run), and say what happened, how sure that is, and what to do. `plan` is the plan that ran, where the files do
    not say it; `raw` shows paths, hosts and tokens as they are. `say` gets lines of
    progress. A file that cannot be read becomes a finding."""
    return diagnose(paths, Context(plan=plan, redact=Redactor(raw), say=say or (lambda text: None)))


def compare_runs(
    a: str | Path,
    b: str | Path,
    window: tuple[int, int] | None = None,
    anyway: bool = False,
    chip_file: str | None = None,
) -> Comparison:
    """Set two plan files, folders of runs or traces side by side, and say which difference explains how much.

    `window` are the steps whose times count, by default the steady ones. `anyway` compares also where the work is not
    comparable. Raises where there is nothing to compare.
    """
    dress = _dress(chip_file)
    sides = [open_side(str(name), read_trace=_read_trace, dress=dress) for name in (a, b)]
    return compare_sides(sides[0], sides[1], window, anyway, dress)


def _dress(chip_file: str | None) -> Callable[[Plan], Plan]:
    """Gives plans the facts of a chip file that is about their chip, or what was measured on this machine."""
    if chip_file not in (None, NO_CHIP_FILE):
        findings = read_chip_file(str(chip_file))[1]
        if findings:
            raise FindingsError(findings)
    known: dict[tuple[str, str], ChipSpec | None] = {}

    def dress(plan: Plan) -> Plan:
        key = (plan.cluster.chip, plan.target)
        if key not in known:
            try:
                known[key] = on_measured_chip(plan, chip_file).cluster.measured
            except FindingsError:  # the file is about another chip than this side's
                known[key] = plan.cluster.measured
        return plan.on_chip(known[key])

    return dress


def _read_trace(path: Path) -> dict[str, Any]:
    """What `threefold profile` says of a trace, or of the traces of a run."""
    return profile_traces([path]).to_json()
