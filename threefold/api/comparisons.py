"""Traces and runs looked at, and two of anything compared. No torch."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from threefold.api.plans import on_measured_chip, open_plan, with_choices
from threefold.compare.comparison import Comparison, compare_sides
from threefold.compare.contract import Contract
from threefold.compare.read_contract import contract_of_logs, contract_of_run, job_logs, read_contract
from threefold.compare.sides import open_side
from threefold.compare.validation import Validation, settings_in_kernels, validate_logs, validate_run
from threefold.cost.chip_file import read_chip_file
from threefold.diagnose.diagnosis import Diagnosis, diagnose
from threefold.diagnose.files import kind_of
from threefold.diagnose.part import Context
from threefold.diagnose.redact import Redactor
from threefold.findings import Finding, FindingsError
from threefold.machine.own_chip_file import NO_CHIP_FILE
from threefold.plan.plan import Plan
from threefold.profile.analyze import Profile, profile_traces, read_trace
from threefold.profile.readers.run_record import is_run_folder, read_run
from threefold.spec.chips import ChipSpec


def profile_run(
    *paths: str | Path,
    plan: Plan | None = None,
    step_range: str | None = None,
    unprofiled_seconds: float | None = None,
) -> Profile:
    """Read PyTorch traces, exports of Nsight Systems or folders of runs; say which wall holds them back, and what could
    help. With the plan that ran, advice is changes of its fields; a run's folder has its own. `step_range` names the
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
    declared: Sequence[str] | None = None,
) -> Comparison:
    """Set two plan files, folders of runs or traces side by side, and say which difference explains how much.

    `window` are the steps whose times count, by default the steady ones. `anyway` compares also where the work is not
    comparable; with `declared` fields, any other difference is refused. Raises where there is nothing to compare.
    """
    dress = _dress(chip_file)
    sides = [open_side(str(name), read_trace=_read_trace, dress=dress) for name in (a, b)]
    return compare_sides(sides[0], sides[1], window, anyway, dress, declared)


def contract_of(*sources: str | Path, plan: str | Path | None = None) -> Contract:
    """The contract of a plan file, the folder of a run, the logs of one job, or a contract's file: what must not move
    while its speed is measured. `plan` is the one that ran, where logs do not say it."""
    return read_contract([str(source) for source in sources], _log_plan(plan))


def validate(
    *sources: str | Path,
    window: tuple[int, int] | None = None,
    against: str | Path | None = None,
    declared: Sequence[str] = (),
    plan: str | Path | None = None,
) -> Validation:
    """Judge whether a run, or a job by its logs and traces, can be accepted. `window` are its declared steps. With
    `against`, the run must keep that contract in all but the `declared` fields."""
    frozen = contract_of(against) if against is not None else None
    paths = [Path(source) for source in sources]
    if len(paths) == 1 and is_run_folder(paths[0]):
        return validate_run(read_run(paths[0]), contract_of_run(paths[0]), window, frozen, declared)
    traces = [path for path in paths if _is_trace(path)]
    names = [str(path) for path in paths if path not in traces]
    if not names:
        problem, advice = "traces alone state no contract", "give the logs of the job too, or the folder of a run"
        raise FindingsError([Finding(rule="contract-readable", at=str(paths[0]), problem=problem, advice=advice)])
    logs = job_logs(names, _log_plan(plan))
    kernels = settings_in_kernels([name for path in traces for name in read_trace(path).names]) if traces else None
    return validate_logs(logs, contract_of_logs(logs, names), window, frozen, declared, kernels)


def _log_plan(plan: str | Path | None) -> Plan | None:
    if plan is None:
        return None
    parsed, findings = with_choices(*open_plan(str(plan)))
    if parsed.plan is None:
        raise FindingsError(findings)
    return parsed.plan


def _is_trace(path: Path) -> bool:
    try:
        return kind_of(path) == "trace"
    except (OSError, ValueError):
        return False


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
