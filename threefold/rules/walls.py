"""Walls: what holds a plan back by estimate. A wall is a note: the plan runs, and nothing is wrong with it.

Of the four the one that binds speaks (`cost/estimate.py`). What could help comes from the catalogue of remedies, as in
every other verb (`rules/fixes.py`).
"""

from collections.abc import Iterator
from functools import lru_cache

from threefold.cost.estimate import MEMORY_BOUND, WALL_SHARES, WALLS, Estimate, estimate
from threefold.cost.fit import surely_fits
from threefold.findings import Finding
from threefold.plan.plan import Plan
from threefold.rules.base import rule
from threefold.rules.layout.batch import can_be_priced
from threefold.units import format_bytes


@lru_cache(maxsize=64)
def _binding(plan: Plan) -> tuple[str, Estimate | None]:
    """The wall that binds, and the estimate; none where nothing is known of the time, or the plan may not fit."""
    if not can_be_priced(plan) or not plan.num_microbatches or plan.chip.architecture == "cpu" or not surely_fits(plan):
        return "", None
    found = estimate(plan)
    return found.wall, found


def _of_time(plan: Plan, wall: str, advice: str) -> Iterator[Finding]:
    binding, found = _binding(plan)
    if binding != wall or found is None:
        return
    terms, step = found.time.terms, found.time.step_seconds
    share = sum(terms[term] for term in WALLS[wall]) / step
    worst = max(WALLS[wall], key=lambda term: terms[term])
    yield Finding(
        at="layout" if wall == "communication" else "knobs",
        problem=f"{_TAKES[wall]} {share:.0%} of the predicted step, most of it {worst}",
        advice=advice if share > WALL_SHARES[wall] else "",
    )


_TAKES = {
    "host": "the host takes",
    "communication": "exposed communication takes",
    "compute": "compute takes",
}


@rule(severity="note", rows="PW-HOSTSIG HO-GC HO-AFF HO-MBS")
def host_wall(plan: Plan) -> Iterator[Finding]:
    """The host takes less than a quarter of the step.

    Why: where launches take longer than the kernels they launch, the GPU waits; gaps between kernels are the sign.
        Upstream counted this to the compute wall until 2026-08-01, and has other evidence and cures for it since.
    Confirm: `threefold estimate` prints the host's time; in a trace, gaps between kernels on all ranks.
    Fix: graphs, a larger microbatch, garbage collection by hand, CPU affinity.
    """
    yield from _of_time(plan, "host", "keep garbage collection off the step")


@rule(severity="note", rows="PW-COMMSIG OV-DP OV-TP")
def communication_wall(plan: Plan) -> Iterator[Finding]:
    """Exposed communication and the pipeline's bubble take about a third of the step at most.

    Why: what is not hidden behind compute is lost; large exposed collectives in a trace are the sign.
    Confirm: `threefold estimate` prints the exposed time of each axis.
    Fix: overlap, then an A/B of dispatchers, then placement: the axis with most traffic inside NVLink.
    """
    yield from _of_time(plan, "communication", "a trace tells which collectives stand alone")


@rule(severity="note", rows="PW-COMPSIG", needs_fix=True)
def compute_wall(plan: Plan) -> Iterator[Finding]:
    """Where compute takes most of the step, nothing is left that would shorten it.

    Why: once communication is hidden and the host keeps up, kernels decide: fused experts, fewer bits, fewer
        multiprocessors for dispatch.
    Confirm: `threefold estimate` prints compute by kind; in a trace, kernels without gaps.
    Fix: less recompute, fused kernels, an A/B in FP8, dispatch_sms.
    """
    yield from _of_time(plan, "compute", "")


@rule(severity="note", rows="PW-MEMSIG", needs_fix=True)
def memory_wall(plan: Plan) -> Iterator[Finding]:
    """Less than nine tenths of the memory are used, so that a longer sequence or a skewed batch still fits.

    Why: a plan that fills the memory has no room for skew, and pays for what makes it fit with time.
    Confirm: `threefold estimate` prints the peak by stage and term.
    Fix: selective recompute in place of full, a smaller microbatch, states in fewer bits.
    """
    binding, found = _binding(plan)
    if binding == "memory" and found is not None:
        need, have = found.memory.worst.device_bytes, plan.chip.memory_bytes
        problem = f"{format_bytes(need)} of {format_bytes(have)} are predicted to be used: {need / have:.0%}"
        if need <= MEMORY_BOUND * have:
            problem = f"whole layers are recomputed, without which more than {MEMORY_BOUND:.0%} of the memory were used"
        yield Finding(at="layout", problem=problem)
