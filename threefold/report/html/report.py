"""The report: a plan, a run or a tuning as one page. `api/reports.py` gathers what it shows; nothing is computed here.

A page of a run begins with what was measured, that of a tuning with its trials; both go on with their plan as the
estimate sees it, so that prediction and measurement stand on one page.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from threefold.compare.contract import flat, label_of
from threefold.cost.estimate import Estimate
from threefold.cost.traffic.transfers import Transfer
from threefold.findings import Finding, shown
from threefold.plan.file import dump_plan
from threefold.plan.plan import Plan
from threefold.profile.analyze import Profile
from threefold.profile.expert_loads import LoadSummary
from threefold.profile.readers.run_record import RunRecord
from threefold.report.estimate import simulation_text, wall_text
from threefold.report.html.estimate_pictures import memory_figures, time_figure, walls_figure
from threefold.report.html.layout_picture import layout_figure
from threefold.report.html.markup import NOTHING, Markup, details, html_table, join, tag
from threefold.report.html.page import Section, Tile, copied_text, findings_list, page, tiles
from threefold.report.html.pipeline_picture import pipeline_figure
from threefold.report.html.plan_view import PlanView
from threefold.report.html.run_pictures import load_table, profile_figure, router_figures, run_figures
from threefold.report.html.tuning_picture import Tuning, number_pair, real_number, tuning_figures
from threefold.units import format_bytes, format_many, format_number, format_tokens

MOST_FACTS = 400  # rows of the contract; it may come from a stranger


@dataclass(frozen=True, slots=True)
class Subject:
    """What a report is about."""

    kind: str  # "plan", "run" or "tuning"
    name: str  # the file or folder
    view: PlanView | None
    findings: Sequence[Finding] = ()  # about the subject itself, or a plan that cannot be read
    run: RunRecord | None = None
    effects: Sequence[Mapping[str, Any]] = ()
    profile: Profile | None = None
    load: LoadSummary | None = None
    tuning: Tuning | None = None
    notes: Sequence[str] = field(default=())  # what was left out, and why


def report_page(subject: Subject) -> str:
    """The whole page."""
    view = subject.view
    title = f"{view.plan.model_name} · {subject.name}" if view else subject.name
    sections = [*_sections(subject)]
    return page(title, _head(subject), sections)


def _head(subject: Subject) -> Markup:
    view = subject.view
    parts = [tag("h1", view.plan.model_name if view else subject.name)]
    if view:
        parts.append(tag("p", f"{subject.kind} {subject.name} · {plan_line(view.plan)}", class_="subtitle"))
    if subject.run is not None:
        parts.append(tiles(run_tiles(subject.run, view.estimate if view else None)))
    elif subject.tuning is not None:
        parts.append(tiles(_tuning_tiles(subject.tuning)))
    if view is not None and view.estimate is not None:
        if subject.kind != "plan":
            parts.append(tag("p", tag("span", "estimated", class_="level"), class_="subtitle"))
        parts.append(tiles(estimate_tiles(view.plan, view.estimate)))
    parts += [tag("p", each, class_="note") for each in subject.notes]
    return join(parts)


def plan_line(plan: Plan) -> str:
    """A plan in one line: machine, format, step, stack."""
    job = plan.job
    return (
        f"{plan.layout.gpus} x {plan.chip.name}, {plan.knobs.precision}, {job.global_batch} x "
        f"{format_tokens(job.seq_len)} tokens a step, {plan.target}, plan {plan.hash}"
    )


def estimate_tiles(plan: Plan, found: Estimate) -> list[Tile]:
    """The numbers of an estimate that people look for first."""
    low, high = found.seconds_band
    used = found.memory.device_bytes / plan.chip.memory_bytes
    state = "fits" if found.fits else "does not fit"
    left = found.headroom_bytes
    room = f"{format_bytes(left)} left" if left >= 0 else f"{format_bytes(-left)} too much"
    size, unit = format_bytes(found.memory.device_bytes).split(" ")
    basis = "calibrated" if found.calibrated else "uncalibrated"
    return [
        Tile(
            "Memory of the largest rank",
            size,
            unit,
            f"{used:.0%} of {plan.chip.name}, {room}: {state}",
            "good" if found.fits else "bad",
        ),
        Tile(
            "Step, estimated",
            format_number(found.time.step_seconds),
            "s",
            f"{format_number(low)} to {format_number(high)} s, {basis}",
        ),
        Tile(
            "Throughput",
            format_number(found.tokens_per_second_per_gpu),
            "tokens/s a GPU",
            f"{format_number(found.model_tflops_per_gpu)} TFLOP/s a GPU, MFU {found.mfu:.1%}",
        ),
        Tile("Wall", found.wall, "", wall_text(plan, found)),
    ]


def run_tiles(run: RunRecord, found: Estimate | None) -> list[Tile]:
    """What a run reached, the estimate beside it."""
    steady = run.is_steady()
    seconds = float(np.median(run.columns["seconds"][steady])) if steady.any() else None
    done, loss, peak, mfu = run.last("step") or 0, run.last("loss"), run.last("memory_bytes"), run.last("mfu")
    guess = f"estimated {format_number(found.time.step_seconds)} s" if found else ""
    useful = run.last("useful_tokens_per_second")
    skipped = run.last("skipped_steps") or 0
    on_cpu = run.plan.chip.architecture == "cpu"  # where the whole process is measured, and tensors are estimated
    counted = "resident, with Python and torch" if on_cpu else "peak of the largest rank"
    marks = [
        Tile(
            "Steps done", f"{done:,.0f}", f"of {run.plan.job.steps:,}", f"{skipped:,.0f} skipped", "bad" * bool(skipped)
        ),
        Tile("Loss, last logged", "-" if loss is None else f"{loss:.4f}", "", _validation_text(run)),
        Tile("Step, measured", "-" if seconds is None else format_number(seconds), "s", f"median; {guess}".strip("; ")),
        Tile("Tokens a second", "-" if useful is None else format_number(useful), "", "useful, all ranks, last logged"),
        Tile("Memory, measured", "-" if peak is None else format_bytes(peak), "", counted),
    ]
    return [*marks, *([Tile("MFU, measured", f"{mfu:.1%}")] if mfu is not None else [])]


def _validation_text(run: RunRecord) -> str:
    """The last loss of each validation set."""
    found = [f"{name[:40]} {losses[max(losses)]:.4f}" for name, losses in run.validation.items()]
    return f"validation: {', '.join(found)}" if found else "measured"


def _tuning_tiles(found: Tuning) -> Iterator[Tile]:
    result = found.result or {}
    speedup, interval = real_number(result.get("speedup")), number_pair(result.get("interval"))
    if speedup is not None and interval is not None:
        band = " to ".join(f"{each:.3f}" for each in interval)
        yield Tile("Speedup, measured", f"{speedup:.3f}", "times", f"99 % interval {band}", "good")
    kept = sum(one.get("verdict") == "better" for one in found.verdicts)
    yield Tile("Changes better", str(kept), f"of {len(found.verdicts)} looked at")
    yield Tile("Trials", str(len(found.trials)), "", "finished")
    hardware = found.contract.get("hardware")
    chip = hardware.get("chip") if isinstance(hardware, Mapping) else None
    ranks = found.contract.get("ranks")
    yield Tile("Machine", str(chip or "unknown"), "", f"ranks measured: {ranks}" if ranks else "")


def _sections(subject: Subject) -> Iterator[Section]:
    view, run = subject.view, subject.run
    if subject.tuning is not None:
        yield Section("trials", "Trials", join(tuning_figures(subject.tuning)) or tag("p", "No trial is finished."))
    if run is not None:
        yield Section("run", "Run", join(run_figures(run)))
        if figures := router_figures(run):
            yield Section("routers", "Routers", join([*figures, *(load_table(subject.load) if subject.load else ())]))
        if subject.effects:
            yield Section("settings", "Settings that took effect", _effects_table(subject.effects))
    if subject.profile is not None:
        yield Section("traces", "Traces", profile_figure(subject.profile))
    findings = [*subject.findings, *(view.findings if view else ())]
    if findings or view is not None:
        yield Section("findings", "Findings", findings_list(findings))
    if view is not None:
        yield from plan_sections(view)
    if contract := _contract(subject, view):
        yield Section("contract", "Contract", contract)


def plan_sections(view: PlanView) -> Iterator[Section]:
    """Layout, memory, time and pipeline of a plan: what the explorer shows too."""
    plan, found = view.plan, view.estimate
    if plan.layout.fits_ranks:
        yield Section("layout", "Layout", layout_figure(plan))
    if found is None:
        return
    yield Section("memory", "Memory", join(memory_figures(plan, found)))
    yield Section("time", "Time", join([time_figure(plan, found), walls_figure(plan, found), _traffic(view.traffic)]))
    if view.timeline is not None:
        yield Section("pipeline", "Pipeline", pipeline_figure(plan, view.timeline))
    elif plan.layout.pp > 1:
        said = f"{plan.layout.pp} stages of {format_many(plan.layout.vpp, 'chunk')} have too many passes to draw."
        yield Section("pipeline", "Pipeline", tag("p", said, class_="note"))
    if view.simulated is not None:
        said = tag("pre", simulation_text(view.simulated, view.jitter), class_="note")
        drawn = pipeline_figure(plan, view.simulated.timeline, "Simulated step, its first pipeline")
        yield Section("simulation", "Simulated step", join([said, drawn]))


def _traffic(ledger: Sequence[Transfer]) -> Markup:
    if not ledger:
        return NOTHING
    rows = [
        [
            one.axis,
            one.operation,
            one.link,
            format_bytes(one.bytes),
            format_number(one.count),
            format_bytes(one.total_bytes),
        ]
        for one in sorted(ledger, key=lambda one: -one.total_bytes)
    ]
    total = format_bytes(sum(one.total_bytes for one in ledger))
    head = ["axis", "operation", "link", "bytes a call", "calls", "bytes a step"]
    return details(
        f"Traffic of an average rank: {total} a step in {format_many(len(rows), 'kind')} of calls",
        html_table(head, rows, numeric_from=3),
    )


def _effects_table(effects: Sequence[Mapping[str, Any]]) -> Markup:
    words = {True: "yes", False: "no", None: "cannot be seen"}
    rows = [
        [
            f"{one.get('knob', '')}",
            _value_text(one.get("asked")),
            words.get(one.get("took_effect") if isinstance(one.get("took_effect"), bool) else None, ""),
            f"{one.get('ran', '')} ({one.get('evidence', '')})",
        ]
        for one in effects[:MOST_FACTS]
    ]
    return html_table(["setting", "asked for", "took effect", "evidence"], rows, numeric_from=99)


def _value_text(value: Any) -> str:
    """A value of a file that may come from a stranger: a short text as it is, anything else cut to a length."""
    return value if isinstance(value, str) and len(value) <= 200 else shown(value)


def _contract(subject: Subject, view: PlanView | None) -> Markup:
    """The plan as a file, and what else fixes the work: versions, hardware, data."""
    parts: list[Markup] = []
    if view is not None:
        plan = view.plan
        note = f"Plan {plan.hash}, {label_of(plan)}: what differs from the defaults."
        parts.append(tag("p", note, class_="note"))
        parts.append(copied_text(dump_plan(plan), "the plan"))
        parts.append(details("The plan, complete", copied_text(dump_plan(plan, complete=True), "the complete plan")))
    facts: Mapping[str, Any] = {}
    if subject.run is not None:
        facts = subject.run.contract
    elif subject.tuning is not None:
        facts = subject.tuning.contract
    rows: list[list[str]] = []
    for path, value in flat(facts):
        if len(rows) == MOST_FACTS:
            break
        if not path.startswith(("fields.", "model.", "fixed_fields.")):
            rows.append([path, _value_text(value)])
    if rows:
        parts += [tag("h3", "Versions, hardware, data"), html_table(["fact", "value"], rows, numeric_from=99)]
    if view is not None and view.estimate is not None:
        found = view.estimate
        said = [f"Rates of the estimate: {found.basis}.", *(f"Assumed: {each}." for each in found.assumed)]
        parts += [tag("p", each, class_="note") for each in said]
    return join(parts)
