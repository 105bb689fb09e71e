"""Rehearses a plan: the ranks that are asked for, one rank of every distinct pipeline stage, or all ranks.

`threefold dry-run`, `check --rehearse` and `plan --rehearse` call `rehearse`. It runs `rehearse_rank` in several
processes and returns a `Rehearsal`: the ranks, their peaks beside the estimated ones, and a finding for each that does
not fit. Where all ranks are rehearsed, their collectives are compared too (`collective_match.py`).
"""

import math
import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from typing import Any

import torch

from threefold.cost.memory.by_stack import memory
from threefold.cost.memory.stage_memory import Memory, StageMemory
from threefold.cost.memory.threefold.local_sizes import LocalSizes
from threefold.cost.memory.threefold.transients import num_loss_chunks
from threefold.dryrun.collective_match import match_findings
from threefold.dryrun.memory_fit import device_bytes, memory_findings
from threefold.dryrun.rehearse_rank import SAY_SECONDS, RankRehearsal, Say, rehearse_rank
from threefold.dryrun.representatives import distinct_stages, reduce_microbatches
from threefold.dryrun.simulated.expert_load import DrawnLoads, ExpertLoads
from threefold.dryrun.tracking.collective_ledger import LedgerEntry
from threefold.engine.shard.order import chunks_on_rank
from threefold.findings import Finding, FindingsError
from threefold.notebook import ShownAsTable
from threefold.plan.plan import Plan
from threefold.plan.scale import is_small, scale_ranks
from threefold.remedies.advise import Advice, carried
from threefold.units import format_bytes, format_many

STAGES = "stages"
ALL = "all"


@dataclass(frozen=True, repr=False)
class Rehearsal(ShownAsTable):
    """The rehearsed ranks of a plan."""

    plan: Plan
    ranks: tuple[RankRehearsal, ...]
    seconds: float
    skew: float = 1.0  # load of the busiest expert-parallel rank over the mean
    left_out: tuple[str, ...] = ()  # what the plan asks for and the engine cannot run yet, in words
    mismatches: tuple[Finding, ...] | None = None  # of collectives; None where not all ranks were rehearsed
    advice: tuple[Advice, ...] = ()  # what could help the plan, by what was rehearsed
    scaled: tuple[str, ...] = ()  # what was replaced to scale the plan down, in words; its memory is not the plan's

    @property
    def worst(self) -> RankRehearsal:
        """The rank with the highest peak."""
        return max(self.ranks, key=lambda rank: rank.peak_bytes)

    @property
    def device_bytes(self) -> float:
        return device_bytes(self.plan, self.worst)

    @property
    def collectives(self) -> tuple[LedgerEntry, ...]:
        """The collectives of the rank that sends the most bytes."""
        return max((rank.collectives for rank in self.ranks), key=lambda rows: sum(e.num_bytes * e.count for e in rows))

    @property
    def findings(self) -> list[Finding]:
        in_memory = [] if self.scaled else [f for rank in self.ranks for f in memory_findings(self.plan, rank)]
        return [*(self.mismatches or ()), *(carried(finding, self.advice) for finding in in_memory)]

    @property
    def num_calls(self) -> int:
        """Collectives and messages that were compared."""
        return sum(len(rank.calls.calls) for rank in self.ranks if rank.calls)

    def summary(self) -> str:
        fits = "fits" if not self.findings else "has findings"
        worst = self.worst
        return f"{len(self.ranks)} ranks, {format_bytes(self.device_bytes)} at rank {worst.rank} ({worst.at}), {fits}"

    def table(self) -> tuple[list[str], list[list[str]]]:
        """The peak of each rank."""
        rows = [[str(one.rank), str(one.stage), format_bytes(one.peak_bytes), one.at] for one in self.ranks]
        return ["rank", "stage", "peak", "when and where"], rows

    def estimated(self) -> Memory:
        return memory(self.plan, self.skew)

    def stage_estimate(self, rank: RankRehearsal) -> StageMemory:
        estimated = self.estimated() if rank.skew is None else memory(self.plan, round(max(1.0, rank.skew), 3))
        return estimated.stages[rank.stage]

    def to_json(self) -> dict[str, Any]:
        estimates = {rank.rank: self.stage_estimate(rank) for rank in self.ranks}
        chip_bytes = self.plan.chip.memory_bytes
        ranks = [
            {
                **rank.to_json(),
                "device_bytes": round(device_bytes(self.plan, rank)),
                "headroom_bytes": round(chip_bytes - device_bytes(self.plan, rank)),
                "estimated": {
                    "peak_bytes": round(estimates[rank.rank].peak_bytes),
                    "terms": {name: round(size) for name, size in estimates[rank.rank].terms.items()},
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
            "scaled": list(self.scaled),
            **({} if self.mismatches is None else {"compared_calls": self.num_calls}),
            "findings": [finding.to_json() for finding in self.findings],
            "advice": [piece.to_json() for piece in self.advice],
        }


def rehearse(
    plan: Plan,
    ranks: Sequence[int] | str = STAGES,
    loads: ExpertLoads | None = None,
    say: Say | None = None,
    jobs: int | None = None,
    left_out: Sequence[str] = (),
) -> Rehearsal:
    """Rehearse ranks of a plan and compare them with its chip.

    Args:
        plan: a plan without errors that the engine can run.
        ranks: global ranks, "stages" for one rank of every distinct pipeline stage, or "all". All ranks of a large
            plan are those of the plan scaled down.
        loads: how tokens are distributed over experts; None if balanced.
        say: called with a line of text after each rank, and twice a second with where a rank is.
        jobs: number of processes, by default one for each core; with one process, or one rank, nothing is forked.
        left_out: what the engine cannot run of the plan; stored in the result.
    """
    began = time.perf_counter()
    scaled: list[str] = []
    if ranks == ALL and not is_small(plan):
        plan, scaled = scale_ranks(plan)
        if isinstance(loads, DrawnLoads):
            loads = DrawnLoads.of(plan)
    if not isinstance(ranks, str):
        _refuse_missing(plan, ranks)
    refuse_endless(plan, range(plan.layout.pp) if isinstance(ranks, str) else {_stage(plan, rank) for rank in ranks})
    tasks = [_make_task(plan, rank, stages, loads, ranks == ALL) for rank, stages in _select_ranks(plan, ranks, loads)]
    jobs = min(len(tasks), jobs or len(os.sched_getaffinity(0)))
    found: dict[int, RankRehearsal] = {}
    for rehearsed in _run_sequentially(tasks, say) if jobs == 1 else _run_in_processes(tasks, jobs, say):
        found[rehearsed.rank] = rehearsed
        if say:
            say(f"stage {rehearsed.stage}, rank {rehearsed.rank}: {len(found)} of {len(tasks)} rehearsed")
    in_order = tuple(found[rank] for rank in sorted(found))
    skew = loads.skew(plan.layout.ep) if loads else 1.0
    sequences = {rank.rank: rank.calls for rank in in_order if rank.calls}
    mismatches = tuple(match_findings(plan.layout, sequences)) if ranks == ALL else None
    seconds = time.perf_counter() - began
    return Rehearsal(plan, in_order, seconds, skew, tuple(left_out), mismatches, scaled=tuple(scaled))


Task = tuple[Plan, int, ExpertLoads | None, tuple[int, ...], bool]  # arguments of `rehearse_rank`


def _make_task(plan: Plan, rank: int, stages: Sequence[int], loads: ExpertLoads | None, with_calls: bool) -> Task:
    if with_calls or loads is not None:
        ep_rank = plan.layout.coordinate("ep", rank)
        loads = replace(loads or ExpertLoads(), ep_rank=ep_rank, agree_by_pair=with_calls)
    return plan, rank, loads, tuple(stages), with_calls


def _select_ranks(plan: Plan, ranks: Sequence[int] | str, loads: ExpertLoads | None) -> list[tuple[int, list[int]]]:
    """Ranks to rehearse, each with the stages it represents. The loads say which ranks of a stage."""
    layout = plan.layout
    if ranks == ALL:
        ranks = range(layout.gpus)
    if isinstance(ranks, str):
        offsets = [rank * layout.stride("ep") for rank in loads.ranks(layout.ep)] if loads else [0]
        by_stage = distinct_stages(plan).items()
        return [(first * layout.stride("pp") + n, stages) for first, stages in by_stage for n in dict.fromkeys(offsets)]
    return [(rank, [_stage(plan, rank)]) for rank in dict.fromkeys(ranks)]


def _refuse_missing(plan: Plan, ranks: Sequence[int]) -> None:
    gpus = plan.layout.gpus
    if missing := [rank for rank in ranks if not 0 <= rank < gpus]:
        problem, advice = f"rank {missing[0]} of {format_many(gpus, 'rank')}", f"name ranks from 0 to {gpus - 1}"
        advice += f", {STAGES} or {ALL}"
        raise FindingsError([Finding(rule="rehearsal-has-rank", at="--ranks", problem=problem, advice=advice)])


def _stage(plan: Plan, rank: int) -> int:
    return plan.layout.coordinate("pp", rank)


def _run_sequentially(tasks: Sequence[Task], say: Say | None) -> Iterator[RankRehearsal]:
    return (rehearse_rank(*task, say=say) for task in tasks)


def _run_in_processes(tasks: Sequence[Task], jobs: int, say: Say | None) -> Iterator[RankRehearsal]:
    """Results as they come. Processes are forked, because importing torch in each would take longer than its task."""
    context = multiprocessing.get_context("fork")
    lines = context.SimpleQueue() if say else None
    with ProcessPoolExecutor(jobs, context, initializer=_say_through, initargs=(lines,)) as pool:
        try:
            if not pool.submit(_can_run_backward).result():
                yield from _run_sequentially(tasks, say)
                return
            running = {pool.submit(_rehearse_or_findings, task) for task in tasks}
            while running:
                done, running = wait(running, SAY_SECONDS if say else None, FIRST_COMPLETED)
                while say and lines and not lines.empty():
                    say(lines.get())
                for future in done:
                    outcome = future.result()
                    if isinstance(outcome, list):
                        raise FindingsError(outcome)
                    yield outcome
        except BrokenProcessPool:
            raise FindingsError([_killed_process()]) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _say_through(lines: Any) -> None:
    """Let this process of a pool send its lines to the process that started it, if anybody reads them."""
    global _say
    _say = lines.put if lines else None


_say: Say | None = None


def _can_run_backward() -> bool:
    """Whether autograd runs in this process. It refuses a fork of a process that ran a backward where a GPU is."""
    try:
        torch.ones((), requires_grad=True).backward()
    except RuntimeError:
        return False
    return True


def _rehearse_or_findings(task: Task) -> RankRehearsal | list[Finding]:
    """Findings are returned as values, because a `FindingsError` cannot be unpickled."""
    try:
        return rehearse_rank(*task, say=_say)
    except FindingsError as error:
        return error.findings


def _killed_process() -> Finding:
    problem = "a process that rehearsed a rank was ended from outside, most likely for its memory"
    return Finding(rule="rehearsal-runs", at="dry-run", problem=problem, advice="give it more memory, or --jobs 1")


MAX_MICROBATCHES = 2**15  # of a step: each of them is loaded, and a pipeline's schedule has several passes of each
MAX_PASSES = 20_000  # of a layer or the loss over a piece of its tokens; each takes about 20 ms


def refuse_endless(plan: Plan, stages: Iterable[int]) -> None:
    """Raise one finding with the size that makes a rehearsal of these stages too long."""
    if plan.num_microbatches > MAX_MICROBATCHES:
        problem = f"a step has {plan.num_microbatches:,} microbatches; a rehearsal runs at most {MAX_MICROBATCHES:,}"
        raise FindingsError([_finding("job.global_batch", problem, "rehearse a smaller job.global_batch")])
    most = max(num_passes(plan, stage) for stage in stages)
    if most > MAX_PASSES:
        tokens = round(LocalSizes(plan).gathered_tokens)
        problem = (
            f"a rank has {tokens:,} tokens of each microbatch, in {most:,} passes of layers and the loss over pieces "
            f"of them; a rehearsal runs at most {MAX_PASSES:,}"
        )
        shorter = 2 ** int(math.log2(plan.job.seq_len * MAX_PASSES / most))
        advice = f"rehearse it with job.seq_len={shorter}, or with more CP"
        raise FindingsError([_finding("job.seq_len", problem, advice)])


def num_passes(plan: Plan, stage: int) -> int:
    """Forwards of a layer or the loss over one piece of its tokens, on the first rank of a stage."""
    local, chunks = LocalSizes(plan), [plan.chunks[number] for number in chunks_on_rank(plan, stage)]
    pieces = round(1 / min(local.expert_chunk_fraction, local.mlp_chunk_fraction))
    in_loss = sum(chunk.loss + chunk.mtp for chunk in chunks) * num_loss_chunks(local)
    num_microbatches = reduce_microbatches(plan, stage).num_microbatches
    return num_microbatches * (sum(len(chunk.layers) + chunk.mtp for chunk in chunks) * pieces + in_loss)


def _finding(at: str, problem: str, advice: str) -> Finding:
    return Finding(rule="rehearsal-ends", at=at, problem=problem, advice=advice)
