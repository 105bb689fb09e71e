"""Answers in at most fifteen lines, which a person could be given as they are: the `summary` of `--json`."""

from collections.abc import Sequence

from threefold.cost.estimate import Estimate
from threefold.cost.training_run.training_run import TrainingRun
from threefold.findings import Finding
from threefold.plan.plan import Plan
from threefold.report.estimate import head_text, verdict_lines
from threefold.report.layout import grids_text
from threefold.report.search import head
from threefold.report.terminal import MOST_LINES, cure_text, cut_lines, findings_summary
from threefold.report.training_text import training_text
from threefold.search.search import SearchResult
from threefold.units import format_bytes, format_many


def estimate_summary(plan: Plan, found: Estimate, overfull: Sequence[Finding] = ()) -> list[str]:
    low, high = found.device_bytes_band
    fits = "fits" if found.fits else "does not fit"
    memory = (
        f"{fits}: {format_bytes(found.memory.device_bytes)} ({format_bytes(low)} to {format_bytes(high)}) of "
        f"{format_bytes(plan.chip.memory_bytes)}, on stage {found.memory.worst.stage}"
    )
    return cut_lines([head_text(plan, found), memory, *verdict_lines(plan, found), *findings_summary(overfull)[1:]])


def search_summary(found: SearchResult, why: str = "") -> list[str]:
    """The best plan with its grids and why it is so, and what to try next."""
    if not found.candidates:
        return cut_lines(
            ["no plan" + (f": {found.finding.problem}{cure_text(found.finding)}" if found.finding else "")]
        )
    best = found.candidates[0]
    low, high = best.estimate.seconds_band
    step = f"step {best.estimate.time.step_seconds:.4g} s ({low:.4g} to {high:.4g}), {best.estimate.summary()}"
    tries = [f"to try: {piece}" for piece in found.retune]
    ends = [*tries, f"{format_many(len(found.candidates), 'candidate')} of {found.feasible} that work"]
    lines = [*head(best.plan, why).splitlines(), *grids_text(best.plan).splitlines(), step, *best.why]
    return [*cut_lines(lines, MOST_LINES - len(ends)), *ends]


def training_summary(plan: Plan, found: TrainingRun) -> list[str]:
    return cut_lines(training_text(plan, found).splitlines())
