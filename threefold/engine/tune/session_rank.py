"""One rank of a measuring session: `python -m threefold.engine.tune.session_rank JOBS RESULTS`.

`plan_session.py` starts it once a rank and adds a line of JSON to JOBS for every trial, or for the speeds of the
machine; all ranks read the same lines in the same order. The first rank adds each result to RESULTS as a line of JSON.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from threefold.launch.cpu_cores import sleep_while_waiting

sleep_while_waiting(os.environ)

import torch  # noqa: E402  OpenMP reads its variables when torch loads

from threefold.engine.dist.join import World, join  # noqa: E402
from threefold.engine.dist.mesh import Mesh  # noqa: E402
from threefold.engine.tune.machine_speeds import machine_speeds  # noqa: E402
from threefold.engine.tune.trial_steps import TrialWindow, run_trial  # noqa: E402
from threefold.launch.cpu_cores import pin_to_cores  # noqa: E402
from threefold.plan.parse import parse  # noqa: E402
from threefold.plan.plan import Plan  # noqa: E402
from threefold.plan.ranks import rank_environment  # noqa: E402

POLL_SECONDS = 0.02


def main(jobs_path: str, results_path: str) -> int:
    world: World | None = None
    for job in read_jobs(Path(jobs_path)):
        plan = plan_of(job["fields"])
        if world is None:
            _pin(plan)
            world = join(plan)
        mesh = Mesh(plan.layout, world.rank, world.device)
        if job["window"] is None:
            result = {"speeds": [asdict(speed) for speed in machine_speeds(mesh)]}
        else:
            result = _measured(plan, world, mesh, TrialWindow(**job["window"]))
        if world.is_leader:
            add_result(Path(results_path), result)
    return 0


def read_jobs(path: Path) -> Iterator[dict[str, Any]]:
    """Each line as it is written; a line without its end is still being written."""
    done = 0
    while True:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
        for line in lines[done:]:
            yield json.loads(line)
        done = len(lines)
        time.sleep(POLL_SECONDS)


def add_result(path: Path, found: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as results:
        results.write(json.dumps(found) + "\n")


def _pin(plan: Plan) -> None:
    if plan.run.cores:
        env = rank_environment(os.environ)
        place = (env.local_rank, env.local_size) if env else (0, 1)
        pin_to_cores(plan.run.cores, *place, on_gpu=plan.cluster.chip != "cpu")


def _measured(plan: Plan, world: World, mesh: Mesh, window: TrialWindow) -> dict[str, Any]:
    """The steps of a plan, or what went wrong. Where there are other ranks, an error ends this process, and with it
    theirs: they would wait for it."""
    try:
        return run_trial(plan, mesh, window)
    except Exception as error:
        if world.size > 1:
            raise
        return {"error": in_words(error)}


def in_words(error: Exception) -> str:
    """An error as the result of a trial."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    return f"{type(error).__name__}: {error}".splitlines()[0]


def plan_of(fields: dict[str, Any]) -> Plan:
    parsed = parse(fields)
    assert parsed.plan is not None, parsed.findings
    return parsed.plan


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
