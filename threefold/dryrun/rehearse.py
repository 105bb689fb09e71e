"""A plan rehearsed: some ranks, or one of every distinct stage, several at a time; and whether they fit."""

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from typing import Any

from threefold.cost.memory import Memory, StageMemory, memory
from threefold.dryrun.fewer import distinct_stages
from threefold.dryrun.ledger import Entry
from threefold.dryrun.loads import Loads
from threefold.dryrun.rank import RankRehearsal, rehearse_rank
from threefold.dryrun.verdict import device_bytes, misfits
from threefold.findings import Finding, FindingsError
from threefold.plan.plan import Plan

Say = Callable[[str], None]
STAGES = "stages"


@dataclass(frozen=True)
class Rehearsal:
    """`left_out`: what of the plan the engine does not run yet, in words."""

    plan: Plan
    ranks: tuple[RankRehearsal, ...]
    seconds: float
    skew: float = 1.0
    left_out: tuple[str, ...] = ()

    @property
    def worst(self) -> RankRehearsal:
        return max(self.ranks, key=lambda rank: rank.peak_bytes)

    @property
    def device_bytes(self) -> float:
        return device_bytes(self.plan, self.worst)

    @property
    def collectives(self) -> tuple[Entry, ...]:
        """Of the rank that sends most."""
        return max((rank.collectives for rank in self.ranks), key=lambda rows: sum(e.num_bytes * e.count for e in rows))

    @property
    def findings(self) -> list[Finding]:
        return [finding for rank in self.ranks for finding in misfits(self.plan, rank)]

    def estimated(self) -> Memory:
        return memory(self.plan, self.skew)

    def stage_estimate(self, rank: RankRehearsal) -> StageMemory:
        return self.estimated().stages[rank.stage]

    def to_json(self) -> dict[str, Any]:
        guesses = self.estimated().stages
        have = self.plan.chip.memory_bytes
        ranks = [
            {
                **rank.to_json(),
                "device_bytes": round(device_bytes(self.plan, rank)),
                "headroom_bytes": round(have - device_bytes(self.plan, rank)),
                "estimated": {
                    "peak_bytes": round(guesses[rank.stage].peak_bytes),
                    "terms": {name: round(size) for name, size in guesses[rank.stage].terms.items()},
                },
            }
            for rank in self.ranks
        ]
        return {
            "level": "rehearsed",
            "ranks": ranks,
            "collectives": [entry.to_json() for entry in self.collectives],
            "seconds": round(self.seconds, 2),
            "left_out": list(self.left_out),
            "findings": [finding.to_json() for finding in self.findings],
        }


def rehearse(
    plan: Plan,
    ranks: Sequence[int] | str = STAGES,
    loads: Loads | None = None,
    say: Say | None = None,
    jobs: int | None = None,
    left_out: Sequence[str] = (),
) -> Rehearsal:
    """`jobs` processes at a time (None: as many as cores); one rank, or one job, runs in this process."""
    began = time.perf_counter()
    tasks = [_task(plan, rank, stages, loads) for rank, stages in _wanted(plan, ranks, loads)]
    jobs = min(len(tasks), jobs or len(os.sched_getaffinity(0)))
    found: dict[int, RankRehearsal] = {}
    for rehearsed in _one_by_one(tasks) if jobs == 1 else _side_by_side(tasks, jobs):
        found[rehearsed.rank] = rehearsed
        if say:
            say(f"stage {rehearsed.stage}, rank {rehearsed.rank}: {len(found)} of {len(tasks)} rehearsed")
    in_order = tuple(found[rank] for rank in sorted(found))
    skew = loads.skew(plan.layout.ep) if loads else 1.0
    return Rehearsal(plan, in_order, time.perf_counter() - began, skew, tuple(left_out))


Task = tuple[Plan, int, Loads | None, tuple[int, ...]]


def _task(plan: Plan, rank: int, stages: Sequence[int], loads: Loads | None) -> Task:
    if loads is not None and loads.shares:
        loads = replace(loads, ep_rank=plan.layout.coordinate("ep", rank))
    return plan, rank, loads, tuple(stages)


def _wanted(plan: Plan, ranks: Sequence[int] | str, loads: Loads | None) -> list[tuple[int, list[int]]]:
    """Ranks and the stages each stands for; of a stage the one with the busiest experts."""
    layout = plan.layout
    if isinstance(ranks, str):
        busy = loads.busiest(layout.ep) * layout.stride("ep") if loads else 0
        return [(first * layout.stride("pp") + busy, stages) for first, stages in distinct_stages(plan).items()]
    missing = [rank for rank in ranks if not 0 <= rank < layout.gpus]
    if missing:
        problem = f"rank {missing[0]} of {layout.gpus} ranks"
        advice = f"name ranks from 0 to {layout.gpus - 1}, or {STAGES}"
        raise FindingsError([Finding(rule="rehearsal-has-rank", at="--ranks", problem=problem, advice=advice)])
    return [(rank, [layout.coordinate("pp", rank)]) for rank in dict.fromkeys(ranks)]


def _one_by_one(tasks: Sequence[Task]) -> Iterator[RankRehearsal]:
    return (rehearse_rank(*task) for task in tasks)


def _side_by_side(tasks: Sequence[Task], jobs: int) -> Iterator[RankRehearsal]:
    """Forked, so that nobody imports torch again."""
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork")) as pool:
        under_way = [pool.submit(_caught, task) for task in tasks]
        try:
            for done in as_completed(under_way):
                outcome = done.result()
                if isinstance(outcome, list):
                    raise FindingsError(outcome)
                yield outcome
        except BrokenProcessPool:
            raise FindingsError([_killed()]) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _caught(task: Task) -> RankRehearsal | list[Finding]:
    """Findings travel as values: their exception does not unpickle."""
    try:
        return rehearse_rank(*task)
    except FindingsError as error:
        return error.findings


def _killed() -> Finding:
    problem = "a process that rehearsed a rank was ended from outside, most likely for its memory"
    return Finding(rule="rehearsal-runs", at="dry-run", problem=problem, advice="give it more memory, or --jobs 1")
