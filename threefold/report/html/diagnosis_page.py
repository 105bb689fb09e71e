"""A diagnosis as a page: the verdict, the steps as curves, memory over the events of a snapshot, and the text.

`threefold diagnose --out` writes it. Everything on it is redacted as in the text; the page asks nothing of the network.
"""

from collections.abc import Iterator

import numpy as np

from threefold.diagnose.diagnosis import Diagnosis
from threefold.diagnose.logs.job_logs import JobLogs
from threefold.diagnose.part import Part
from threefold.diagnose.run_health import RunPart
from threefold.diagnose.snapshots.snapshot_part import SnapshotPart
from threefold.launch.hang_diagnosis import format_ranks
from threefold.report.diagnosis import HEADS
from threefold.report.html.markup import Markup, html_table, join, tag
from threefold.report.html.page import Section, Tile, copied_text, findings_list, page, tiles
from threefold.report.html.run_pictures import curve_figure, router_figures, run_figures
from threefold.units import GIB, format_many, format_number

_STEPS = {
    "loss": ("Loss", "as the log prints it"),
    "grad_norm": ("Gradient norm", "norm"),
    "seconds": ("Step time", "seconds"),
    "tflops": ("Throughput", "TFLOP/s a GPU"),
}


def diagnosis_page(found: Diagnosis) -> str:
    """The whole page."""
    head = join([tag("h1", "Diagnosis"), tiles(_tiles(found))])
    sections = [
        Section(part.kind.replace(" ", "-"), HEADS[part.kind].capitalize(), _part(part)) for part in found.parts
    ]
    if found.findings:
        sections.append(Section("findings", "Findings", findings_list(found.findings)))
    return page("Diagnosis", head, sections)


def _tiles(found: Diagnosis) -> Iterator[Tile]:
    for part in found.parts:
        if not isinstance(part, JobLogs):
            continue
        verdict, health = part.verdict, part.health
        died = verdict.status == "died"
        sure = f"{verdict.confidence} confidence" if verdict.death else ""
        where = f"rank {verdict.evidence.rank}" if verdict.evidence and verdict.evidence.rank is not None else ""
        said = ", ".join(filter(None, (sure, where)))
        yield Tile(
            "Died of" if died else "The job", verdict.slug or verdict.status, "", said, "bad" if died else "good"
        )
        if health.last is not None:
            yield Tile("Steps", f"{health.first} to {health.last}", "", "of the last start")
        if health.step_seconds is not None:
            yield Tile("Step", format_number(health.step_seconds), "s", "median of the steady steps")
        if health.tflops is not None:
            yield Tile("Throughput", format_number(health.tflops), "TFLOP/s a GPU", "median")


def _part(part: Part) -> Markup:
    parts: list[Markup | None] = []
    if isinstance(part, JobLogs):
        if part.columns:
            parts += [curve_figure(part.columns, name, *words) for name, words in _STEPS.items()]
        parts.append(_deaths(part))
    elif isinstance(part, RunPart):
        parts += [figure for run in part.runs for figure in [*run_figures(run), *router_figures(run)]]
    elif isinstance(part, SnapshotPart):
        for one in part.devices:
            time, allocated, reserved = np.array(one.replay.points or [(0, 0, 0)], dtype=float).T
            columns = {"step": time / 1e3, "allocated": allocated / GIB, "reserved": reserved / GIB}
            for name in ("allocated", "reserved"):
                title = f"Memory {name}, {part.redact(one.name)}"
                parts.append(curve_figure(columns, name, title, "GiB", over="millisecond"))
    parts.append(copied_text("\n".join(part.lines), "the text"))
    return join([each for each in parts if each is not None])


def _deaths(logs: JobLogs) -> Markup | None:
    """What each rank said, where one had died."""
    rows = []
    for slug, ranks in logs.verdict.also.items():
        known = sorted(rank for rank in ranks if rank is not None)
        rows.append([slug, format_ranks(known) if known else "-", format_many(len(ranks), "place")])
    return html_table(["also seen", "on", "in"], rows, numeric_from=99) if rows else None
