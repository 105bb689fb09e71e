"""Answers of a search as text: a plan in the order Fit, Scale, Profile, Retune, Candidates, and from how many GPUs on a
model fits."""

import shutil
import textwrap
from collections.abc import Iterable, Sequence

from threefold.findings import as_overrides
from threefold.plan.plan import Plan
from threefold.report.estimate import time_text, wall_text
from threefold.report.layout import axes_text, grids_text
from threefold.report.terminal import MOST_LINES as SUMMARY_LINES
from threefold.report.terminal import advice_text, cure_text, cut_lines, findings_text, table
from threefold.search.explain import cp_comm_text
from threefold.search.fit import FitPoint
from threefold.search.neighbors import Comparison, NextBetter, Trial
from threefold.search.search import Candidate, SearchResult
from threefold.units import GIB, format_bytes, format_many, format_rounded, format_tokens

MOST_LINES = 60  # of the short answer
NARROW, WIDE = 72, 120  # columns
MOST_TRIES = 3  # of what to try next and of findings, in the short answer


def terminal_width() -> int:
    """Columns of the terminal, or of COLUMNS; 100 where there is neither."""
    return min(WIDE, max(NARROW, shutil.get_terminal_size((100, 24)).columns))


def search_text(found: SearchResult, why: str = "", details: bool = False, width: int | None = None) -> str:
    """The answer in at most 60 lines; with `details` all of it."""
    if not found.candidates:
        return f"{found.finding}\n\n{_count(found)}"
    return _all_of_it(found, why) if details else _short(found, why, width or terminal_width())


def _short(found: SearchResult, why: str, width: int) -> str:
    best = found.candidates[0]
    tries, tried = [str(piece) for piece in found.retune], [piece.changes for piece in found.retune]
    left = [one for one in found.comparisons if one.trial.effect is not None and dict(one.trial.changes) not in tried]
    compare = [_comparison(one) for one in left[:MOST_TRIES]]
    grids = [f"  {line}" for line in grids_text(best.plan, used=True).splitlines()]
    sections = {
        "Fit": _items(best.reasons.fit, width),
        "Scale": [*grids, *_items(best.reasons.scale, width)],
        "Profile": _items(best.reasons.profile, width),
        "Retune": _items([f"The wall is {wall_text(best.plan, best.estimate)}.", *tries, *compare], width),
        "Candidates": [*_items([str(found.group)] if found.group else [], width), *_rows(found, width)],
    }
    said = [f"{one.severity}[{one.rule}] {one.at}: {one.problem}" for one in best.findings if one.severity != "note"]
    text = [*_wrapped(head(best.plan, why), width)]
    for title, lines in sections.items():
        text += ["", title, *lines]
    text += ["", *(part for one in said[:MOST_TRIES] for part in _wrapped(one, width))]
    text += _wrapped(f"{_count(found)}; all of it: --details", width)
    over = len(text) - MOST_LINES + 4  # an empty line and what to do next come after it
    if over > 0:  # the last candidates are in --details
        end = len(text) - 1 - text[::-1].index("")
        text[end - over - 1 : end] = ["  ..."]
    return "\n".join(text)


def _items(lines: Iterable[str], width: int) -> list[str]:
    return [part for line in lines for part in _wrapped(line, width, "  - ")]


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=" " * len(indent),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _comparison(one: Comparison) -> str:
    band = "" if one.trial.band is None else f" +- {one.trial.band:.0%}"
    change = as_overrides(one.trial.changes)
    return (
        f"next A/B: {change}: {one.trial.effect or 0.0:+.0%} throughput{band}, a candidate since {one.candidate.since}"
    )


def _rows(found: SearchResult, width: int) -> list[str]:
    """Each candidate with its degrees, what is predicted, its knobs, and why it stands where it does."""
    lines: list[str] = []
    for place, one in enumerate(found.candidates, 1):
        band = one.estimate.seconds_band[1] / one.estimate.time.step_seconds - 1
        tflops = format_rounded(one.estimate.model_tflops_per_gpu, band)
        top = one.estimate.device_bytes_band[1] / GIB
        parts = [
            f"{degrees_text(one.plan)}, microbatch {one.plan.job.micro_batch}",
            f"about {tflops} TFLOP/s a GPU, up to {top:.0f} GiB",
            *filter(None, [knobs_text(one.plan)]),
        ]
        line = "; ".join(parts) + (f". After: {one.after}" if one.after else "")
        lines += _wrapped(line, width, f"  {place}. ")
    return lines


def _all_of_it(found: SearchResult, why: str) -> str:
    best = found.candidates[0]
    parts = [
        head(best.plan, why),
        _section("Fit", [_bullets(best.reasons.fit)]),
        _section("Scale", [grids_text(best.plan), axes_text(best.plan), _bullets(best.reasons.scale)]),
        _section("Profile", [time_text(best.plan, best.estimate), _bullets(best.reasons.profile)]),
        _section("Retune", _retune(best, found)),
        _section("Findings", [_findings(best)]),
        _section("Candidates", [_candidates(found.candidates), _legend(found), _count(found)]),
    ]
    return "\n\n".join(parts)


def _section(title: str, parts: Sequence[str]) -> str:
    return "\n\n".join([f"{title}\n{'=' * len(title)}", *(part for part in parts if part)])


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _findings(best: Candidate) -> str:
    """What `check` says of the best plan. A fix that cost nothing would have been applied."""
    findings = best.findings
    if not findings:
        return "`threefold check` finds nothing about the best plan."
    return "`threefold check` says of the best plan:\n" + findings_text(findings)


def head(plan: Plan, why: str) -> str:
    job = plan.job
    planned = f"Planned {why}; --target names another stack.\n" if why else ""
    return planned + (
        f"plan {plan.hash}: {plan.model_name} on {plan.layout.gpus} x {plan.chip.name} for {plan.target}, "
        f"{job.global_batch} x {format_tokens(job.seq_len)} tokens a step, {plan.knobs.precision}. "
        "Every number is estimated."
    )


def _retune(best: Candidate, found: SearchResult) -> list[str]:
    wall = f"The wall is {wall_text(best.plan, best.estimate)}."
    wall += f"\n\n{advice_text(found.retune)}" if found.retune else " Profile before changing anything."
    return [
        wall,
        _comparisons(found, best.plan),
        _next_better(found.next_better),
        f"One step in each degree:\n{_sensitivity(found.sensitivity)}",
    ]


def _effect(one: Trial) -> str:
    return one.reason if one.effect is None else f"{one.effect:+.1%} throughput"


def _next_better(one: NextBetter | None) -> str:
    if one is None:
        return "No plan that fails for want of memory would be faster once it fits."
    lack = one.need_bytes - one.have_bytes
    text = (
        f"The next better plan, {degrees_text(one.plan)} with {knobs_text(one.plan) or 'no knobs'}, would be "
        f"{one.effect:+.1%} but needs {format_bytes(one.need_bytes)} of {format_bytes(one.have_bytes)} on stage "
        f"{one.stage}: {format_bytes(lack)} too much."
    )
    cures = "; ".join(f"{as_overrides(cure.changes)} ({_effect(cure)} against this plan there)" for cure in one.cures)
    return f"{text} It fits and is faster with {cures}."


def _sensitivity(steps: Sequence[Trial]) -> str:
    rows = [[as_overrides(one.changes), _effect(one)] for one in steps]
    return table(["change", "predicted"], rows)


def _comparisons(found: SearchResult, plan: Plan) -> str:
    """The next A/Bs: candidates with their predicted gain, and what was seen for and against them."""
    if not found.comparisons:
        return ""
    rows = []
    for one in found.comparisons:
        candidate, band = one.candidate, "" if one.trial.band is None else f" +- {one.trial.band:.0%}"
        seen = candidate.evidence + (f"; but {candidate.counterexample}" if candidate.counterexample else "")
        rows.append([as_overrides(one.trial.changes), f"{_effect(one.trial)}{band}", seen])
    title = f"The next A/Bs, one variable at a time; {plan.chip.name} names candidates, and steps that you time choose:"
    return f"{title}\n{table(['change', 'predicted', 'seen (2026-08)'], rows)}"


def degrees_text(plan: Plan) -> str:
    axes = ("tp", "cp", "pp", "vpp", "ep", "etp")
    used = [f"{axis.upper()} {plan.layout.degree(axis)}" for axis in axes if plan.layout.degree(axis) > 1]
    return " ".join(used) or "data parallel only"


def knobs_text(plan: Plan) -> str:
    knobs = plan.knobs
    words = ["recompute " + "+".join(knobs.recompute)] if knobs.recompute else []
    words += ["save " + "+".join(knobs.recompute_save)] if knobs.recompute_save else []
    words += [knobs.data_parallel] if knobs.data_parallel != "zero1" else []
    words += ["overlap" + ("+wgrad" if knobs.delay_wgrad else "")] if knobs.ep_overlap else []
    words += [f"offload {knobs.optimizer_offload:.0%}"] if knobs.optimizer_offload else []
    words += [f"graphs {'+'.join(knobs.graphs)}"] if knobs.graphs else []
    words += ["fused experts"] if knobs.expert_fusion else []
    words += ["tp overlap"] if knobs.tp_overlap else []
    words += [f"cp {cp_comm_text(plan)}"] if knobs.cp_comm != "p2p" and plan.layout.cp > 1 else []
    words += [f"stages {plan.layout.stages}"] if plan.layout.stages else []
    return ", ".join(words)


def _candidates(candidates: Sequence[Candidate]) -> str:
    header = [
        "#",
        "TP",
        "CP",
        "PP",
        "VPP",
        "EP",
        "ETP",
        "DP",
        "EDP",
        "micro",
        "TFLOP/s",
        "tok/s",
        "GiB",
        "precision",
        "dispatcher",
    ]
    rows = []
    for place, one in enumerate(candidates, 1):
        layout, guess = one.plan.layout, one.estimate
        degrees = [str(layout.degree(axis)) for axis in ("tp", "cp", "pp", "vpp", "ep", "etp", "dp", "edp")]
        numbers = [
            f"{guess.model_tflops_per_gpu:.0f}",
            f"{guess.tokens_per_second_per_gpu:.0f}",
            f"{guess.memory.device_bytes / GIB:.1f}-{guess.device_bytes_band[1] / GIB:.1f}",
        ]
        knobs = one.plan.knobs
        words = [knobs.precision, knobs.dispatcher, knobs_text(one.plan)]
        rows.append([str(place), *degrees, str(one.plan.job.micro_batch), *numbers, *words])
    return table([*header, "knobs"], rows)


def _legend(found: SearchResult) -> str:
    legend = "TFLOP/s and tok/s are a GPU's, GiB the largest rank's, predicted and at the top of its band."
    return f"{legend} {found.group}" if found.group else legend


def _count(found: SearchResult) -> str:
    return (
        f"{found.searched:,} candidates searched, {found.priced:,} priced in full, {found.feasible:,} feasible, "
        f"{found.seconds:.1f} s"
    )


def fit_text(points: Sequence[FitPoint]) -> str:
    """One line for each number of GPUs, and a sentence that answers."""
    rows = [[str(point.gpus), f"{point.need_bytes / GIB:.0f}", *_answer(point)] for point in points]
    have = points[0].have_bytes / GIB if points else 0.0
    header = ["GPUs", f"GiB of {have:.0f}", "fits", "layout", "TFLOP/s", "with"]
    return f"{table(header, rows)}\n\n{verdict_text(points)}"


def verdict_text(points: Sequence[FitPoint]) -> str:
    fits = next((point.gpus for point in points if point.fits), None)
    mild = next((point.gpus for point in points if point.is_mild), None)
    if fits is None:
        return f"It does not fit {format_many(points[-1].gpus, 'GPU')} or fewer, whatever is recomputed and offloaded."
    if mild is None:
        return f"It fits from {format_many(fits, 'GPU')} on, with full recompute or offload."
    text = f"It fits from {format_many(mild, 'GPU')} on without full recompute or offload"
    return f"{text}." if mild == fits else f"{text}, and from {fits} with it."


def _answer(point: FitPoint) -> list[str]:
    if point.candidate is None:
        least = "no layout divides model and batch" if not point.need_bytes else "with all recomputed and offloaded"
        return ["no", "", "", least]
    plan, guess = point.candidate.plan, point.candidate.estimate
    error = guess.seconds_band[1] / guess.time.step_seconds - 1
    settings = ["recompute " + "+".join(plan.knobs.recompute)] if plan.knobs.recompute else []
    settings += [f"{plan.knobs.optimizer_offload:.0%} of the optimizer on the host"] * (
        plan.knobs.optimizer_offload > 0
    )
    settings += [plan.knobs.precision] if plan.knobs.precision != "bf16" else []
    tflops = f"about {format_rounded(guess.model_tflops_per_gpu, error)}"
    return ["yes", degrees_text(plan), tflops, ", ".join(settings)]


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
    return [*cut_lines(lines, SUMMARY_LINES - len(ends)), *ends]
