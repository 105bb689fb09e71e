"""All traces of a job together: what was captured, the step budget, ranks, opportunities, and the status of each claim.

`analyze.py` makes a `JobTrace` of the ranks that it read; `report/profile.py` tells it, in the order verdict,
capture quality, step budget, ranks, opportunities, status of claims.

A step of T in which a time of R goes away gains T / (T - R) - 1 at most. R is launch-starved time, time that compute
was blocked, or time in which communication ran alone. These never overlap by construction, so that their ceilings may
be joined, as far as their remedies do not undo each other. Removing a wait can uncover the next one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import comb
from statistics import NormalDist, median
from typing import Any

import numpy as np

from threefold.layout.degrees import Layout
from threefold.profile.intervals import subtract
from threefold.profile.ranks.clocks import Clock, align
from threefold.profile.ranks.collectives import MatchedGroup, match
from threefold.profile.ranks.fingerprints import alike, fingerprint, missing, own_seconds, representatives
from threefold.profile.ranks.rank_trace import RankTrace
from threefold.profile.steps.budget import NAMES

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


MATERIAL = 0.05  # slowdown by the profiler, from which every figure is labeled
_ALWAYS = 0.9  # of the instances
_CHANCE = 0.05  # that a rank is last so often by chance, below which it is called late
_MANY = 200  # instances, from which chance is that of a normal distribution
_WORTH = 0.005  # of the step, that the others must wait for it at least


@dataclass(frozen=True, slots=True)
class Perturbation:
    """Steps under the profiler against steps without it."""

    profiled_seconds: float
    unprofiled_seconds: float | None

    @property
    def slowdown(self) -> float | None:
        return self.profiled_seconds / self.unprofiled_seconds - 1 if self.unprofiled_seconds else None

    @property
    def is_material(self) -> bool:
        return self.slowdown is not None and self.slowdown > MATERIAL


@dataclass(frozen=True, slots=True)
class Jitter:
    """One kind of collective in one group: transfer, and waiting for the last rank, in seconds per step."""

    kind: str
    axis: str
    ranks: tuple[int, ...]
    num_members: int  # that have a trace
    num_matched: int
    num_unmatched: int
    transfer_seconds: float
    wait_seconds: Mapping[str, float]  # by the member's name
    last: Mapping[str, int]  # instances in which the others waited for this member
    start_skew_seconds: float  # median distance between the first and the last start, after alignment
    is_complete: bool
    is_stated: bool

    late_rank: str | None  # that the others wait for more often than by chance; None where nobody stands out


@dataclass(frozen=True, slots=True)
class Claim:
    text: str
    status: str  # trace-verified, source-verified, inferred, unverified


@dataclass(slots=True)
class JobTrace:
    """What the traces of a job say together."""

    ranks: list[RankTrace]
    clocks: list[Clock]
    jitter: list[Jitter]
    order: list[int]  # representative ranks, slowest first
    classes: list[list[int]]  # ranks of the same fingerprint
    opportunities: list[Opportunity]  # of the slowest rank
    perturbation: Perturbation
    missing: list[str]
    mfu: float | None

    @property
    def slowest(self) -> RankTrace:
        return self.ranks[self.order[0]]

    @property
    def joint_ceiling(self) -> float:
        return joined(self.slowest.steps.spread("step").median, self.opportunities)

    @property
    def residual(self) -> float | None:
        """The largest residual of the ranks whose clocks were joined by collectives."""
        known = [one.residual for one in self.clocks if one.residual is not None and one.num_instances]
        return max(known, default=None)

    def warnings(self) -> list[str]:
        """What limits the whole capture: what profilers warned of, and what they did not record."""
        said = [f"{rank.capture.profiler}: {one}" for rank in self.ranks for one in rank.capture.warnings]
        return [*dict.fromkeys([*said, *_limits(self)])]

    def claims(self) -> list[Claim]:
        return list(_claims(self))

    def to_json(self) -> dict[str, Any]:
        slowest = self.slowest
        return {
            "slowest": slowest.name,
            "representatives": [self.ranks[number].name for number in self.order],
            "fingerprints": [[self.ranks[number].name for number in members] for members in self.classes],
            "capture": {
                "warnings": self.warnings(),
                "profiled_step_seconds": self.perturbation.profiled_seconds,
                "unprofiled_step_seconds": self.perturbation.unprofiled_seconds,
                "slowdown": self.perturbation.slowdown,
                "clock_residual_seconds": self.residual,
            },
            "ranks": [_rank_json(rank, clock) for rank, clock in zip(self.ranks, self.clocks, strict=True)],
            "collectives": [asdict(one) for one in self.jitter],
            "opportunities": [asdict(one) for one in self.opportunities],
            "joint_ceiling": self.joint_ceiling if np.isfinite(self.joint_ceiling) else None,
            "missing": self.missing,
            "claims": [asdict(one) for one in self.claims()],
        }


def job_trace(
    ranks: list[RankTrace],
    layout: Layout | None,
    step_lengths: Mapping[int, float] | None = None,
    unprofiled_seconds: float | None = None,
    mfu: float | None = None,
) -> JobTrace:
    """Join the ranks. `step_lengths` are the run's own log, by step; `unprofiled_seconds` is a step without a profiler,
    where the caller knows it."""
    matched = match(ranks)
    clocks = align(ranks, matched)
    order = representatives(ranks, layout)
    slowest = ranks[order[0]]
    if unprofiled_seconds is None:
        unprofiled_seconds = _unprofiled(slowest, step_lengths or {})
    return JobTrace(
        ranks=ranks,
        clocks=clocks,
        jitter=[_jitter(one, ranks, clocks) for one in matched if one.is_in_step.any()],
        order=order,
        classes=alike(ranks),
        opportunities=opportunities(slowest),
        perturbation=Perturbation(slowest.steps.spread("step").median, unprofiled_seconds),
        missing=missing(ranks, matched, layout),
        mfu=mfu,
    )


def _unprofiled(rank: RankTrace, lengths: Mapping[int, float]) -> float | None:
    """The median of the run's steps after those that were profiled; what came before them is warm-up."""
    windows = [*rank.steps.windows.windows, *(window for window, _ in rank.steps.windows.dropped)]
    profiled = [window.number for window in windows if window.number is not None]
    after = [seconds for step, seconds in lengths.items() if profiled and step > max(profiled)]
    return median(after) if after else None


def _jitter(one: MatchedGroup, ranks: Sequence[RankTrace], clocks: Sequence[Clock]) -> Jitter:
    names = [ranks[member].name for member in one.members]
    num_steps = len(ranks[one.members[0]].steps.budgets)
    starts = np.stack([clocks[member].aligned(one.start[place]) for place, member in enumerate(one.members)])
    waits, last = one.wait_seconds() / num_steps, one.times_last()
    latest = int(np.argmax(last))
    step = ranks[one.members[latest]].steps.spread("step").median
    others, transfer = float(np.delete(waits, latest).mean()), one.transfer_seconds() / num_steps
    is_always = last[latest] >= _ALWAYS * last.sum() and others >= transfer  # few instances, but long waits
    is_late = is_always or _by_chance(int(last[latest]), int(last.sum()), len(names)) < _CHANCE
    is_late &= others > _WORTH * step
    skew = np.ptp(starts[:, one.is_in_step], axis=0)
    return Jitter(
        kind=one.group.kind,
        axis=one.group.axis,
        ranks=one.group.ranks,
        num_members=len(names),
        num_matched=int(one.is_in_step.sum()),
        num_unmatched=one.num_unmatched,
        transfer_seconds=transfer,
        wait_seconds=dict(zip(names, waits.tolist(), strict=True)),
        last=dict(zip(names, last.tolist(), strict=True)),
        start_skew_seconds=float(np.median(skew)),
        is_complete=one.is_complete,
        is_stated=one.group.is_stated,
        late_rank=names[latest] if is_late else None,
    )


def _by_chance(count: int, total: int, members: int) -> float:
    """The probability that one of some equal members is last in so many of all instances."""
    share = 1 / members
    if total > _MANY:
        spread = NormalDist(total * share, (total * share * (1 - share)) ** 0.5)
        return min(1.0, members * (1 - spread.cdf(count - 0.5)))
    tail = sum(comb(total, one) * share**one * (1 - share) ** (total - one) for one in range(count, total + 1))
    return min(1.0, members * tail)


def _limits(job: JobTrace) -> Iterator[str]:
    slowest = job.slowest
    if not slowest.steps.windows.is_known:
        yield "no range and no kernel marks steps: the whole trace is taken as one (name the range with --step)"
    if slowest.link_rate < 1:
        yield f"{slowest.link_rate:.1%} of the kernels of {slowest.name} have their launch in the trace"
    if not slowest.is_cpu and not slowest.has_waits:
        yield "waits for events were not recorded: a producer on another stream stays unknown (counts as stalled)"
    if slowest.num_replayed:
        yield f"graphs replay {slowest.num_replayed:,} kernels of {slowest.name}: gaps inside a replay are unresolved"
    rate = slowest.capture.call_stack_rate
    if rate is not None:
        yield f"{rate:.1%} of the runtime's calls have a call stack"
    if any(rank.capture.rank_source == "file name" for rank in job.ranks):
        yield "ranks are known by file names alone"
    if slowest.capture.metrics:
        said = ", ".join(f"{name} {value:.3g}" for name, value in list(slowest.capture.metrics.items())[:6])
        yield f"GPU metrics were sampled in the same pass, which slows it: {said}"
    if job.perturbation.is_material:
        yield f"the profiler slows the step by {job.perturbation.slowdown:.1%}: every time below includes that"


def _claims(job: JobTrace) -> Iterator[Claim]:
    slowest = job.slowest
    by_range = slowest.steps.windows.source.startswith("range")
    marked = "trace-verified" if by_range else "inferred" if slowest.steps.windows.is_known else "unverified"
    yield Claim(f"the step is the {slowest.steps.windows.source}", marked)
    if any(rank.rank is not None for rank in job.ranks):
        from_trace = all(rank.capture.rank_source == "trace" for rank in job.ranks)
        yield Claim("numbers of the ranks", "trace-verified" if from_trace else "unverified")
    sampled = {rank.rank for rank in job.ranks}
    sizes = [rank.capture.world_size for rank in job.ranks if rank.capture.world_size]
    is_whole = bool(sizes) and len(sampled - {None}) == max(sizes)
    yield Claim(f"{slowest.name} is the slowest rank of the job", "trace-verified" if is_whole else "unverified")
    for one in job.jitter[:3]:
        if one.late_rank:
            status = "trace-verified" if one.is_complete else "inferred" if one.is_stated else "unverified"
            yield Claim(f"{one.late_rank} is late in {one.kind} of {one.axis}", status)
    for opportunity in job.opportunities:
        yield Claim(f"{opportunity.seconds * 1e3:.3g} ms of a step: {opportunity.name}", opportunity.status)
    known = job.perturbation.slowdown is not None
    yield Claim("how much the profiler slows the step", "trace-verified" if known else "unverified")
    yield Claim("why a kernel is as slow as it is (Nsight Compute says that)", "unverified")


def _rank_json(rank: RankTrace, clock: Clock) -> dict[str, Any]:
    own = fingerprint(rank)
    return {
        "name": rank.name,
        "rank": rank.rank,
        "rank_source": rank.capture.rank_source,
        "file": str(rank.path),
        "host": rank.capture.host,
        "profiler": rank.capture.profiler,
        "steps": {
            "source": rank.steps.windows.source,
            "dropped": [{"name": window.name, "why": why} for window, why in rank.steps.windows.dropped],
            "seconds": {name: asdict(rank.steps.spread(name)) for name in NAMES},
        },
        "own_seconds": own_seconds(rank),
        "fingerprint": asdict(own),
        "libraries": {name: asdict(one) for name, one in rank.libraries.items()},
        "copies": [
            asdict(one) | {"bytes_per_second": one.bytes_per_second, "is_bottleneck": one.is_bottleneck}
            for one in rank.copies
        ],
        "blocked_by": {label: rank.steps.per_step(one) for label, one in rank.steps.causes.blocked_by.items()},
        "clock": asdict(clock),
        "link_rate": rank.link_rate,
        "call_stack_rate": rank.capture.call_stack_rate,
        "metrics": dict(rank.capture.metrics),
        "num_messages": rank.collectives.num_point_to_point,
    }
