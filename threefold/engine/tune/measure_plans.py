"""Measures steps of plans in processes of their own, so that a crash, a full memory or a hang is a result.

`threefold calibrate` calls `measure_plans`. Plans of one number of ranks share processes, one after the other, because
starting them takes longer than measuring. A plan that ends its processes is a failure, and the rest begins anew.
"""

import json
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from threefold.engine.launch.rank_process import RankProcess, start_rank

RANK_MODULE = ["-m", "threefold.engine.tune.measure_rank"]
POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Measuring:
    """How plans are measured."""

    steps: int
    warmup: int
    seconds: float  # after which no further step of a plan begins
    limit_seconds: float  # without a result, after which processes hang
    speeds: bool = False  # whether the machine's speeds are measured first
    total_seconds: float = float("inf")  # after which no further plan is measured


Result = dict[str, Any]


def measure_plans(
    plans: Mapping[str, Mapping[str, Any]],
    ranks: int,
    how: Measuring,
    folder: Path,
    on_result: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """The steps of each plan, given as fields by name: seconds, losses and peak of memory, or an error."""
    left, found = dict(plans), list[Result]()
    speeds, began = how.speeds, time.monotonic()
    while left and time.monotonic() - began < how.total_seconds:
        job = {"plans": left, "steps": how.steps, "warmup": how.warmup, "seconds": how.seconds, "speeds": speeds}
        trouble = "ended without a result"
        for result in _run(job, ranks, how.limit_seconds, folder):
            if "trouble" in result:
                trouble = result["trouble"]
                break
            found.append(result)
            on_result(result)
            left.pop(result.get("plan", ""), None)
            if not left or time.monotonic() - began > how.total_seconds:
                return found
        failed = next(iter(left))
        result = {"plan": failed, "error": trouble}
        found.append(result)
        on_result(result)
        del left[failed]
        speeds = False
    return found


def _run(job: Mapping[str, Any], ranks: int, limit_seconds: float, folder: Path) -> Iterator[Result]:
    """Results as they come; one with `trouble` where the processes failed or hang."""
    folder.mkdir(parents=True, exist_ok=True)
    job_path, results = folder / "job.json", folder / "results.jsonl"
    job_path.write_text(json.dumps(job), encoding="utf-8")
    results.write_text("", encoding="utf-8")
    argv = [sys.executable, *RANK_MODULE, str(job_path), str(results)]
    logs = [folder / f"rank-{rank}.log" for rank in range(ranks)]
    for log in logs:
        log.write_text("", encoding="utf-8")
    processes = [start_rank(argv, env, rank, logs[rank]) for rank, env in enumerate(rank_variables(ranks))]
    try:
        yield from _watch(processes, results, limit_seconds)
    finally:
        for process in processes:
            process.kill()
            process.process.wait()


def _watch(processes: list[RankProcess], results: Path, limit_seconds: float) -> Iterator[Result]:
    seen, last = 0, time.monotonic()
    while True:
        ended = [process for process in processes if process.has_ended]
        lines = [line for line in results.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
        for line in lines[seen:]:
            yield json.loads(line)
            last = time.monotonic()
        seen = len(lines)
        failed = [process for process in ended if process.process.returncode]
        if failed:
            yield {"trouble": failure_reason(failed[0])}
            return
        if len(ended) == len(processes):
            return
        if time.monotonic() - last > limit_seconds:
            yield {"trouble": f"no result within {limit_seconds:.0f} s"}
            return
        time.sleep(POLL_SECONDS)


def failure_reason(failed: RankProcess) -> str:
    lines = [line for line in failed.log_tail() if line.strip()]
    if any("out of memory" in line.lower() for line in lines):
        return "out of memory"
    return f"rank {failed.number} {failed.end_reason}" + (f": {lines[-1].strip()}" if lines else "")


def rank_variables(ranks: int) -> list[dict[str, str]]:
    """The variables of torchrun for each rank. A single rank needs none."""
    if ranks == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    every = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    return [
        {name: str(value) for name, value in {**every, "RANK": rank, "LOCAL_RANK": rank}.items()}
        for rank in range(ranks)
    ]
