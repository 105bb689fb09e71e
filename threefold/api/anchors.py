"""The measurement that `threefold estimate --like` and `plan --like` start from: a published row, a run, or a log."""

from pathlib import Path

import numpy as np

from threefold.compare.read_contract import job_logs
from threefold.compare.sides import open_side
from threefold.cost.anchor import Anchor
from threefold.findings import Finding, FindingsError, did_you_mean
from threefold.interop.published import Row, cannot_express, plan_from_row
from threefold.lookup.entries import published_runs
from threefold.plan.plan import Plan
from threefold.rules.all import blockers
from threefold.rules.all import check as check_rules
from threefold.spec.flops import flops_per_token


def read_anchor(source: str, target: str | None = None) -> Anchor:
    """The measured run that `source` names: the id of a published run, the folder of a run, or the log of a job.

    Raises where it is none of these, where it says no plan or no step time, and where it ran on another stack than
    `target`.
    """
    rows = {row["id"]: row for row in published_runs()}
    path = Path(source)
    if source in rows:
        anchor = _from_row(rows[source])
    elif path.is_dir():
        anchor = _from_run(source)
    elif path.is_file():
        anchor = _from_log(source)
    else:
        guess = did_you_mean(source, rows)
        raise _refused(
            source,
            f"no published run, folder of a run or log {guess}".rstrip(),
            "`threefold find --kind run` lists runs",
        )
    if target is not None and anchor.plan.target != target:
        problem = f"it ran on {anchor.plan.target}, and the plan is for {target}"
        raise _refused(source, problem, f"name a run of {target}, or set target={anchor.plan.target}")
    if findings := blockers(check_rules(anchor.plan)):
        raise _refused(source, f"its plan cannot be priced: {findings[0].problem}", "name another run")
    return anchor


def _from_row(row: Row) -> Anchor:
    name = row["id"]
    if problem := cannot_express(row):
        raise _refused(name, problem, "name another run")
    plan = plan_from_row(row).plan
    if plan is None or row.get("status") not in ("ok", None):
        raise _refused(name, f"it states no whole plan, or ended as {row.get('status')}", "name another run")
    if row.get("tflops_per_gpu"):
        work = flops_per_token(plan.model, plan.job.seq_len, plan.mtp, plan.layout.tp, plan.stack.release)
        seconds = work * plan.tokens_per_step / plan.layout.gpus / 1e12 / row["tflops_per_gpu"]
    elif row.get("step_time_s"):
        seconds = row["step_time_s"]
    else:
        raise _refused(name, "it states no throughput", "name another run")
    return Anchor(name, plan, float(seconds))


def _from_run(source: str) -> Anchor:
    side = open_side(source)
    steady = side.run.is_steady() if side.run else np.zeros(0, dtype=bool)
    if side.plan is None or side.run is None or not steady.any():
        raise _refused(source, "no run with a plan and a steady step", "give the folder of a run that trained")
    return Anchor(source, side.plan, float(np.median(side.run.columns["seconds"][steady])))


def _from_log(source: str) -> Anchor:
    logs = job_logs([source], None)
    plan: Plan | None = logs.configuration.plan
    seconds = logs.speed.measured_seconds or logs.health.step_seconds
    if plan is None or not seconds:
        missing = "a configuration" if plan is None else "step times"
        raise _refused(source, f"the log prints no {missing.removeprefix('a ')}", "give the log that has both")
    return Anchor(source, plan, float(seconds))


def _refused(at: str, problem: str, advice: str) -> FindingsError:
    return FindingsError([Finding(rule="anchor-readable", at=at, problem=problem, advice=advice)])
