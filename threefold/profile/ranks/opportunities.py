"""What a step could gain at most, from times that a trace proves: T / (T - R) - 1 for a step of T and a time of R.

R is launch-starved time, time that compute was blocked, or time in which communication ran alone. These never overlap
by construction, so that their ceilings may be joined, as far as their remedies do not undo each other. A ceiling is no
forecast: removing a wait can uncover the next one.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from threefold.profile.intervals import subtract
from threefold.profile.ranks.rank_trace import RankTrace

_MIN_SHARE = 0.002  # of a step, below which a time is not listed
_MIN_LINKED = 0.95  # share of kernels with a launch, from which launch-starved time is verified


@dataclass(frozen=True, slots=True)
class Opportunity:
    """A time of a step that something could take away."""

    name: str
    seconds: float  # R, per step
    ceiling: float  # of the gain in throughput: 0.25 is a quarter more
    evidence: str
    status: str  # "trace-verified" or "inferred"
    look_at: str  # where remedies are: the field's words, not a plan's fields


def ceiling(step: float, recoverable: float) -> float:
    """The gain in throughput if all of a time vanished."""
    return step / (step - recoverable) - 1 if recoverable < step else float("inf")


def opportunities(rank: RankTrace) -> list[Opportunity]:
    """The times of a rank's median step, longest first."""
    step = rank.steps.spread("step").median
    found = [
        Opportunity(name, seconds, ceiling(step, seconds), *words)
        for name, seconds, words in _times(rank)
        if seconds > _MIN_SHARE * step
    ]
    return sorted(found, key=lambda one: -one.seconds)


def joined(step: float, found: list[Opportunity]) -> float:
    """The ceiling of all of them together: their intervals are disjoint."""
    return ceiling(step, sum(one.seconds for one in found))


def _times(rank: RankTrace) -> Iterator[tuple[str, float, tuple[str, str, str]]]:
    steps, causes = rank.steps, rank.steps.causes
    linked = "trace-verified" if rank.link_rate >= _MIN_LINKED else "inferred"
    if rank.is_cpu:
        said = "no operator runs on the rank's threads, and no collective blocks them"
        words = "Python between operators, data loading"
        yield "host", steps.per_step(causes.launch_starved), (said, "inferred", words)
    else:
        starved = steps.per_step(causes.launch_starved)
        words = "graphs, CPU affinity, garbage collection, a larger microbatch"
        if steps.spread("starved_in_sync").median > starved / 2:
            words = "calls that synchronize host and device (.item(), pageable copies); then " + words
        yield "launch-starved", starved, ("the next compute kernel was not issued yet", linked, words)
    status = "inferred" if rank.is_cpu else "trace-verified"
    for label, times in causes.blocked_by.items():
        is_copy = label.startswith("Mem")
        words = "offload: fraction, pinned memory, prefetch" if is_copy else "overlap, another dispatcher, a late rank"
        yield f"blocking: {label}", steps.per_step(times), ("compute was issued and waited for it", status, words)
    alone = subtract(subtract(steps.exposed, causes.launch_starved), causes.blocking)
    said = "communication runs alone, and nothing proves that compute waits for it"
    yield "exposed, not proven blocking", steps.per_step(alone), (said, "inferred", "overlap")
