"""A sweep as text: a row a value, what was outgrown, what gave out."""

from typing import Any

from threefold.plan.plan import Plan
from threefold.report.terminal import advice_text, table
from threefold.search.sweep import Point, Sweep
from threefold.units import GIB, format_number, format_tokens


def sweep_text(found: Sweep) -> str:
    first = found.points[0]
    parts = [_head(first.plan, found), _rows(found)]
    if chosen := _chosen(found):
        parts.append("\n".join(chosen))
    if found.outgrown:
        parts.append(_outgrown_text(found))
    if found.right and (pieces := advice_text(found.right.advice)):
        parts.append(f"at {value_text(found.path, found.right.value)}, {pieces}")
    gone = _gone(found)
    if gone:
        parts.append("\n".join(gone))
    if any(point.estimate and not point.estimate.calibrated for point in found.points):
        parts.append("* uncalibrated: nothing near this point was among the measured runs; its band is wide")
    return "\n\n".join(parts)


def value_text(path: str, value: Any) -> str:
    if path == "job.seq_len" and isinstance(value, int):
        return format_tokens(value)
    if isinstance(value, tuple):
        return "+".join(value) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _head(plan: Plan, found: Sweep) -> str:
    return f"estimated for {plan.target}: {plan.model_name} on {plan.chip.name}, {found.path} varied"


def _rows(found: Sweep) -> str:
    header = [found.path, "GPUs", "TP", "CP", "PP", "EP", "DP", "batch", "GiB", "TFLOP/s/GPU", "tokens/s/GPU"]
    header += ["band", "wall", "verdict"]
    return table(header, [_row(found.path, point) for point in found.points])


def _row(path: str, point: Point) -> list[str]:
    layout, guess = point.plan.layout, point.estimate
    degrees = [str(layout.degree(axis)) for axis in ("tp", "cp", "pp", "ep", "dp")]
    row = [value_text(path, point.value), str(layout.gpus), *degrees, str(point.plan.job.global_batch)]
    if guess is None:
        return [*row, "-", "-", "-", "-", "-", point.verdict]
    spread = guess.seconds_band[1] / guess.time.step_seconds - 1
    return [
        *row,
        f"{guess.memory.device_bytes / GIB:.1f}",
        format_number(guess.model_tflops_per_gpu),
        f"{guess.tokens_per_second_per_gpu:,.0f}",
        f"+-{spread:.0%}" + ("" if guess.calibrated else "*"),
        guess.wall,
        point.verdict,
    ]


def _chosen(found: Sweep) -> list[str]:
    """What a memory budget came to at each value, or why nothing meets it."""
    swept = found.path == "knobs.recompute"  # then the problem names the value by itself
    return [
        finding.problem if swept else f"at {value_text(found.path, point.value)}: {finding.problem}"
        for point in found.points
        for finding in point.findings
        if finding.rule == "recompute-chosen"
    ]


def _outgrown_text(found: Sweep) -> str:
    values = [value_text(found.path, one.value) for one in found.outgrown]
    width = max(map(len, values))
    lines = [_outgrown_head(found)]
    for one, value in zip(found.outgrown, values, strict=True):
        finding, cure = one.finding, " (moved along here)" if one.moved_along else ""
        lines.append(f"  {value:>{width}}  {finding.severity}[{finding.rule}] {finding.at}: {finding.problem}")
        kind = finding.fix_kind if finding.fix else "advice"
        lines.append(f"  {'':{width}}    {kind}: {finding.fix_text or 'none'}{cure}")
    return "\n".join(lines)


def _outgrown_head(found: Sweep) -> str:
    if found.right is None:
        return f"no value of {found.path} gives a plan that the rules accept and that fits:"
    where = "later" if found.right is found.points[0] else "elsewhere"
    return f"settings that are right at {found.path} = {value_text(found.path, found.right.value)}, wrong {where}:"


def _gone(found: Sweep) -> list[str]:
    lines = []
    if point := found.dp_gone:
        before, layout = found.points[0].plan.layout.dp, point.plan.layout
        lines.append(
            f"DP gives out at {value_text(found.path, point.value)}: from {before} to 1 on {layout.gpus} GPUs "
            f"(TP {layout.tp} x CP {layout.cp} x PP {layout.pp})"
        )
    if point := found.gpus_gone:
        layout = point.plan.layout
        why = f"PP {layout.pp} x lcm(TP {layout.tp} x CP {layout.cp}, EP {layout.ep} x ETP {layout.etp})"
        where = value_text(found.path, point.value)
        lines.append(f"the GPU count gives out at {where}: it needs a multiple of {layout.min_gpus} = {why}")
    return [*lines, *_memory_gone(found)]


def _memory_gone(found: Sweep) -> list[str]:
    """Where memory does not suffice: for good from a value on, or at values before one that fits."""
    lines, gone = [], found.memory_gone
    if short := found.short_of_memory:
        text = "memory does not suffice at " + ", ".join(value_text(found.path, point.value) for point in short)
        behind = found.points[found.points.index(short[-1]) + 1 :]
        first = next(point for point in behind if point.lacks_memory is False)
        lines.append(text if gone else f"{text}, it does from {value_text(found.path, first.value)} on")
    if gone and found.right:
        lines.append(f"memory gives out at {value_text(found.path, gone.value)}")
    return lines
