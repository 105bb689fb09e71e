"""Whether a model fits, by number of GPUs, as text."""

from collections.abc import Sequence

from threefold.report.search import degrees_text
from threefold.report.terminal import table
from threefold.search.fit import FitPoint
from threefold.units import GIB, format_many, format_rounded


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
