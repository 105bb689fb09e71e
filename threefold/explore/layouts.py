"""The ranked layouts of a question, and fixes that were tried: what takes longer than an answer may.

`server.py` runs both functions in processes of their own (`background.py`).
"""

from collections.abc import Mapping
from typing import Any

from threefold.api.plans import check
from threefold.api.searches import find_plan
from threefold.explore.request import EXPLORED, Started, read_request
from threefold.findings import FindingsError
from threefold.plan.parse import Fields
from threefold.report.html.page import findings_list

TOP = 12  # layouts that are listed


def question_of(fields: Mapping[str, Any]) -> Fields:
    """The fields of a request that a search keeps as they are: model, machine, job, and the precision where it is
    chosen. The search chooses the rest. `questionOf` of explore.js is the same."""
    return {path: value for path, value in fields.items() if _is_asked(path)}


def _is_asked(path: str) -> bool:
    chosen = path.startswith(("layout.", "knobs.", "run.")) or path == "job.micro_batch"
    return not chosen or path == "knobs.precision"


def search_layouts(question: Fields, started: Started) -> dict[str, Any]:
    """The candidates of a question as rows for the page; or why there are none."""
    try:
        read_request(question, started)
        found = find_plan(question_of(started.completed(question)), top=TOP)
    except FindingsError as error:
        return {"rows": [], "why": "; ".join(one.problem for one in error.findings)}
    rows = []
    for one in found.candidates:
        layout = one.plan.layout
        moved = {path: value for path, value in one.plan.written if path.startswith(("layout.", "knobs."))}
        rows.append(
            {
                "layout": " ".join(f"{axis.upper()}{layout.degree(axis)}" for axis in ("tp", "cp", "pp", "ep")),
                "chunks": layout.vpp,
                "precision": one.plan.knobs.precision,
                "recompute": list(one.plan.knobs.recompute),
                "tflops": one.estimate.model_tflops_per_gpu,
                "device_bytes": one.estimate.memory.device_bytes,
                "wall": one.estimate.wall,
                "set": {
                    **{path: list(value) if isinstance(value, tuple) else value for path, value in moved.items()},
                    "job.micro_batch": one.plan.job.micro_batch,
                    "job.global_batch": one.plan.job.global_batch,
                },
            }
        )
    why = found.finding.problem if found.finding else ""
    return {"rows": rows, "why": why, "searched": found.searched, "seconds": round(found.seconds, 1)}


def try_fixes(fields: Fields, started: Started) -> dict[str, Any]:
    """The findings of a plan with fixes that were tried, as markup."""
    try:
        parsed = read_request(fields, started)
    except FindingsError as error:
        return {"html": findings_list(error.findings, settable=EXPLORED)}
    plan = parsed.plan or parsed.readable
    found = check(plan, parsed.findings) if plan is not None else parsed.findings
    return {"html": findings_list(found, settable=EXPLORED)}
