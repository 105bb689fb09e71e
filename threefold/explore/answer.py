"""The answer to one request: the plan judged and priced, drawn with the drawings of the report.

Findings carry the first fix of their rule, which nobody has tried: pressing Apply is the trial. Trying fixes can take
seconds and is asked for on its own, as is the list of layouts: `server.py` runs `try_fixes` and `search_layouts` in
processes of their own (`server.py`). The drawings are markup, made on this side only; the page puts them into
their places.
"""

import json
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from threefold.api.plans import check, on_measured_chip
from threefold.api.searches import find_plan
from threefold.cost.cp_exchange import resolve_exchange
from threefold.cost.estimate import estimate
from threefold.cost.time.pipeline_timeline import pipeline_timeline
from threefold.explore.request import EXPLORED, Started, checked_fields, read_request
from threefold.findings import Finding, FindingsError, in_order
from threefold.plan.file import dump_plan
from threefold.plan.parse import Fields, Parsed
from threefold.plan.plan import Plan
from threefold.report.html.markup import NOTHING, tag
from threefold.report.html.page import copied_text, findings_list, tiles
from threefold.report.html.plan_view import PlanView
from threefold.report.html.report import estimate_tiles, plan_line, plan_sections
from threefold.rules.all import PREDICTED, RULES, blockers, errors, judge

PARTS = ("layout", "memory", "time", "pipeline")  # sections of the report that an answer has
MOST_KEPT = 128  # answers that are kept
TOP = 12  # layouts that are listed


def request_key(fields: Fields) -> str:
    """Equal for equal requests, whatever the order of their fields."""
    return json.dumps(fields, sort_keys=True)


class Answers:
    """Answers requests; equal requests get the answer that is kept."""

    def __init__(self, started: Started) -> None:
        self.started = started
        self._kept: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def answer(self, raw: Any) -> dict[str, Any]:
        """What the page shows for the fields of a request: markup by place, and the plan."""
        begin = time.perf_counter()
        try:
            fields = checked_fields(raw)
            key = request_key(fields)
            if key not in self._kept:
                self._kept[key] = _answer(read_request(fields, self.started))
                if len(self._kept) > MOST_KEPT:
                    self._kept.popitem(last=False)
            found = self._kept[key]
        except FindingsError as error:
            found = _refusal(error.findings)
        return {**found, "milliseconds": round(1e3 * (time.perf_counter() - begin), 1)}


def _refusal(findings: list[Finding]) -> dict[str, Any]:
    """Nothing is drawn, and the page says why."""
    html: dict[str, str] = dict.fromkeys(PARTS, NOTHING)
    html |= {"tiles": tag("p", "No estimate: see the findings.", class_="note"), "plan": NOTHING, "line": NOTHING}
    return {"ok": False, "html": {**html, "findings": findings_list(in_order(findings), settable=EXPLORED)}}


def _answer(parsed: Parsed) -> dict[str, Any]:
    plan = parsed.plan or parsed.readable
    if plan is None or plan.recompute_budget is not None:
        return _refusal(parsed.findings or [_no_budget()])
    view = quick_view(on_measured_chip(resolve_exchange(plan)), parsed.findings)
    html: dict[str, str] = {
        "line": tag("span", plan_line(view.plan)),
        "findings": findings_list(view.findings, settable=EXPLORED),
        "plan": copied_text(dump_plan(view.plan), "the plan"),
        "tiles": tag("p", "No estimate: the rules refuse this plan.", class_="note"),
        **dict.fromkeys(PARTS, NOTHING),
    }
    if view.estimate is not None:
        html["tiles"] = tiles(estimate_tiles(view.plan, view.estimate))
    html |= {section.anchor: section.body for section in plan_sections(view)}
    return {"ok": view.estimate is not None, "html": html, "numbers": _numbers(view)}


def _no_budget() -> Finding:
    problem = "a memory budget takes a search; name the modules to recompute"
    return Finding(rule="explorer-limits", at="knobs.recompute", problem=problem, fix={"knobs.recompute": None})


def quick_view(plan: Plan, before: list[Finding]) -> PlanView:
    """`report.html.plan_view.view_plan` without notes and without trying fixes. The rules about the predicted peak
    are asked only where it may not fit: they would estimate the memory of the plan three times more."""
    judged = judge(plan, leave_out=PREDICTED)
    if errors(before) or blockers(judged):
        return PlanView(plan, in_order([*before, *judged]))
    guess = estimate(plan)
    if guess.device_bytes_band[1] > plan.chip.memory_bytes:
        told = (judge(plan, leave_out=RULES.keys() - {slug}) for slug in sorted(PREDICTED))
        judged += next(filter(None, told), [])  # a plan that surely does not fit is not near the limit too
    return PlanView(plan, in_order([*before, *judged]), guess, pipeline_timeline(plan, guess.time))


def _numbers(view: PlanView) -> Mapping[str, Any] | None:
    """The few numbers that a program wants of an answer."""
    found = view.estimate
    if found is None:
        return None
    return {
        "device_bytes": round(found.memory.device_bytes),
        "step_seconds": found.time.step_seconds,
        "tokens_per_second_per_gpu": found.tokens_per_second_per_gpu,
        "fits": found.fits,
        "wall": found.wall,
    }


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
