"""The report at the end of a run: which settings took effect, what recompute and offload did, and which ranks are slow.

`train.py` makes a `RunEffects` and enters `step` around every step. One step is observed (`observe_step.py`,
`activation_bytes.py`); later ones cost nothing, except that waits for other ranks are timed in steps that are logged
(`own_times.py`). At the end all ranks call `report`, whose gather is the only collective of all this. The first rank
says what the user should know and writes RUN/effects.json:

    step, ranks          the observed step, and the number of ranks
    effects              one object for each setting that the plan asks for (`Effect`)
    activation_memory    one object for each name of recompute and offload, with the numbers of each rank
    own_times            the median own time of each rank, and the slow ranks
    graphs               one object for each rank with CUDA graphs: those recorded, replays by scope, runs without a
                         graph by scope and reason, and the bytes that they hold, over the whole run
"""

import platform
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

from threefold.engine.build import Parts
from threefold.engine.dist.consensus import run_on_all_ranks
from threefold.engine.dist.mesh import Group
from threefold.engine.effects.activation_bytes import ActivationObserver, ActivationUse
from threefold.engine.effects.effect import Effect, StepEvidence, judge_effects
from threefold.engine.effects.observe_step import EventCounts, count_step_events
from threefold.engine.effects.own_times import OwnTimes, RankTime, slow_ranks
from threefold.engine.graphs.stats import GraphStats
from threefold.engine.run.folder import EFFECTS
from threefold.plan.plan import Plan
from threefold.units import format_bytes

OBSERVED_STEP = 3  # counted from the first step of this start: kernels are compiled by then, no profile has begun
OBSERVED_STEP_WITH_GRAPHS = 7  # graphs are recorded by then, and a profile is over
MOST_RANKS = 256  # whose own numbers the file has
MOST_LINES = 16  # slow ranks that are named in the terminal
Uses = dict[str, ActivationUse]


@dataclass
class RankEvidence:
    """The evidence of one rank."""

    rank: int
    host: str
    stage: int
    observed_step: int | None  # None where the run ended before it
    counts: EventCounts
    recompute: Uses
    offload: Uses
    own_seconds: float | None  # the median of the steps that were measured; None where there were none
    num_measured: int = 0
    graphs: GraphStats | None = None  # of the whole run; None where the rank records none
    own_error: float = 0.0  # standard error of own_seconds


@dataclass(eq=False)
class RunEffects:
    """Observes the steps of one rank. Steps are numbered from 1."""

    plan: Plan
    parts: Parts
    rank: int
    steps_before: int  # steps that were done before this start
    last_step: int
    own_times: OwnTimes = field(init=False)
    _evidence: tuple[EventCounts, Uses, Uses] | None = None

    def __post_init__(self) -> None:
        self.own_times = OwnTimes(self.parts.device)
        number = OBSERVED_STEP_WITH_GRAPHS if self.parts.runner.graph_stats else OBSERVED_STEP
        self.observed_step = min(self.steps_before + number, self.last_step)

    def step(self, number: int) -> AbstractContextManager[None]:
        """Around a training step."""
        if number == self.observed_step:
            return self._observed()
        is_logged = number % self.plan.run.log_every == 0 or number == self.plan.job.steps
        return self.own_times.step() if is_logged and number > self.observed_step else nullcontext()

    @contextmanager
    def _observed(self) -> Iterator[None]:
        knobs = self.plan.knobs
        observes_memory = knobs.recompute or knobs.activation_offload or knobs.activation_offload_layers
        observer = ActivationObserver(list(self.parts.chunks.values()), self.parts.device) if observes_memory else None
        with count_step_events(self.parts) as counts, observer.step() if observer else nullcontext():
            yield
        uses: tuple[Uses, Uses] = observer.results(self.plan.num_microbatches) if observer else ({}, {})
        self._evidence = counts, *uses

    def end_step(self, seconds: float) -> None:
        """Take the wall-clock time of the step that has ended."""
        self.own_times.end_step(seconds)

    def collect(self) -> RankEvidence:
        counts, recompute, offload = self._evidence or (Counter(), {}, {})
        own_seconds = self.own_times.median()
        return RankEvidence(
            self.rank,
            platform.node(),
            self.parts.mesh.coordinate("pp"),
            self.observed_step if self._evidence else None,
            counts,
            recompute,
            offload,
            own_seconds,
            self.own_times.num_steps,
            self.parts.runner.graph_stats,
            self.own_times.error(),
        )

    def report(self, group: Group) -> "RunReport | None":
        """Gather the evidence of all ranks. Every rank calls it; the first one gets the report."""
        gathered = run_on_all_ranks(group, self.collect)
        return RunReport(self.plan, gathered) if gathered else None


class RunReport:
    """The evidence of all ranks, judged."""

    def __init__(self, plan: Plan, ranks: Sequence[RankEvidence]) -> None:
        self.plan, self.ranks = plan, ranks
        self.observed_step = ranks[0].observed_step
        counts: EventCounts = Counter()
        for rank in ranks:
            counts.update(rank.counts)
        uses = _sums([r.recompute for r in ranks]), _sums([r.offload for r in ranks])
        self.eager_ranks = _eager_ranks(ranks)
        evidence = StepEvidence(plan, counts, *uses, self.eager_ranks)
        self.effects: list[Effect] = judge_effects(evidence) if self.observed_step is not None else []
        times = [
            RankTime(r.rank, r.host, r.stage, r.own_seconds, r.own_error) for r in ranks if r.own_seconds is not None
        ]
        self.times = times
        self.slow = slow_ranks(times) if len(times) > 1 else []

    def say(self, tell: Callable[[str], None]) -> None:
        """Settings without effect, ranks that replayed no graph where others did, a table of what recompute and
        offload did, and slow ranks, one line each."""
        for effect in self.effects:
            if effect.took_effect is False and effect.is_chosen:
                tell(str(effect))
            elif effect.ran == "replayed on some ranks":
                tell(f"knobs.{effect.knob} was not replayed everywhere in step {self.observed_step}: {effect.evidence}")
        if table := self._table():
            tell(table)
        for slow in self.slow[:MOST_LINES]:
            tell(str(slow))
        if len(self.slow) > MOST_LINES:
            tell(f"and {len(self.slow) - MOST_LINES} more slow ranks: {EFFECTS} lists them")

    def _table(self) -> str:
        rows = [
            (kind, name, max(((uses[name], evidence.rank) for evidence, uses in of_ranks if name in uses), key=_freed))
            for kind, of_ranks in self._uses().items()
            for name in sorted({name for _, uses in of_ranks for name in uses})
        ]
        if not rows:
            return ""
        units = "bytes of a microbatch, seconds of the step, on the rank where they free most"
        lines = [f"recompute and offload in step {self.observed_step}: {units}"]
        lines.append(f"  {'':<10}{'name':<16}{'bytes not saved':>16}{'seconds':>10}{'times':>7}{'rank':>6}")
        for kind, name, (use, rank) in rows:
            bytes_kept = format_bytes(use.kept_bytes)
            lines.append(f"  {kind:<10}{name:<16}{bytes_kept:>16}{use.seconds:>10.4f}{use.times:>7}{rank:>6}")
        return "\n".join(lines)

    def _uses(self) -> dict[str, list[tuple[RankEvidence, Uses]]]:
        return {
            "recompute": [(evidence, evidence.recompute) for evidence in self.ranks],
            "offload": [(evidence, evidence.offload) for evidence in self.ranks],
        }

    def as_json(self) -> dict[str, Any]:
        """The whole report. The numbers of single ranks are those of at most 256, the others are of all."""
        memory = [
            {
                "kind": kind,
                "name": name,
                "kept_bytes": max(uses[name].kept_bytes for _, uses in of_ranks if name in uses),
                "seconds": max(uses[name].seconds for _, uses in of_ranks if name in uses),
                "ranks": [
                    {"rank": evidence.rank, **asdict(uses[name])}
                    for evidence, uses in of_ranks[:MOST_RANKS]
                    if name in uses
                ],
            }
            for kind, of_ranks in self._uses().items()
            for name in sorted({name for _, uses in of_ranks for name in uses})
        ]
        return {
            "step": self.observed_step,
            "ranks": len(self.ranks),
            "effects": [effect.as_json() for effect in self.effects],
            "activation_memory": memory,
            "graphs": [{"rank": r.rank, **r.graphs.as_json()} for r in self.ranks[:MOST_RANKS] if r.graphs is not None],
            "own_times": {
                "steps": max(evidence.num_measured for evidence in self.ranks),
                "ranks": [asdict(time) for time in self.times[:MOST_RANKS]],
                "slow": [
                    {**asdict(slow.time), "median_seconds": slow.median_seconds, "error_seconds": slow.error_seconds}
                    for slow in self.slow[:MOST_RANKS]
                ],
            },
        }


def _eager_ranks(ranks: Sequence[RankEvidence]) -> dict[str, list[int]]:
    """The ranks that have parts of a graph scope and replayed none of them in the observed step, by scope."""
    eager: dict[str, list[int]] = {}
    for evidence in ranks:
        for (kind, scope), times in sorted(evidence.counts.items()):
            if kind == "graph eager" and times and not evidence.counts["graph replay", scope]:
                eager.setdefault(scope, []).append(evidence.rank)
    return eager


def _freed(of_rank: tuple[ActivationUse, int]) -> float:
    return of_rank[0].kept_bytes


def _sums(uses_of_ranks: Sequence[Uses]) -> Uses:
    """Add up the uses of all ranks, by name."""
    total: Uses = {}
    for uses in uses_of_ranks:
        for name, use in uses.items():
            into = total.setdefault(name, ActivationUse())
            into.kept_bytes += use.kept_bytes
            into.seconds += use.seconds
            into.times += use.times
    return total
