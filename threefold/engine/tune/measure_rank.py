"""One rank of a measurement: `python -m threefold.engine.tune.measure_rank JOB RESULTS`.

`measure_plans.py` starts it once a rank. The job is a JSON file with plans of one number of ranks; the first rank adds
a line of JSON to the results for every plan, and one for every speed of the machine where the job asks for them.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from threefold.engine.run.cpu_threads import sleep_while_waiting

sleep_while_waiting(os.environ)

import torch  # noqa: E402  OpenMP reads its variables when torch loads

from threefold.engine.dist.join import World, join, leave  # noqa: E402
from threefold.engine.dist.mesh import Mesh  # noqa: E402
from threefold.engine.tune.machine_speeds import machine_speeds  # noqa: E402
from threefold.engine.tune.step_times import measure_steps  # noqa: E402
from threefold.plan.parse import parse  # noqa: E402
from threefold.plan.plan import Plan  # noqa: E402


def main(job_path: str, results_path: str) -> int:
    job = json.loads(Path(job_path).read_text(encoding="utf-8"))
    plans = {name: _plan(fields) for name, fields in job["plans"].items()}
    world = join(next(iter(plans.values())))
    with Path(results_path).open("a" if world.is_leader else "r", encoding="utf-8") as results:

        def write(found: dict[str, Any]) -> None:
            if world.is_leader:
                results.write(json.dumps(found) + "\n")
                results.flush()

        if job["speeds"]:
            plan = next(iter(plans.values()))
            mesh = Mesh(plan.layout, world.rank, world.device) if world.size > 1 else None
            for speed in machine_speeds(world.device, mesh):
                write({"speed": asdict(speed)})
        for name, plan in plans.items():
            write({"plan": name, **_measured(plan, world, job)})
    leave()
    return 0


def _measured(plan: Plan, world: World, job: dict[str, Any]) -> dict[str, Any]:
    """The steps of a plan, or what went wrong. Where there are other ranks, an error ends this process, and with it
    theirs: they would wait for it."""
    try:
        mesh = Mesh(plan.layout, world.rank, world.device)
        found = measure_steps(plan, job["steps"], job["warmup"], mesh, job["seconds"])
    except Exception as error:
        if world.size > 1:
            raise
        if isinstance(error, torch.OutOfMemoryError):
            return {"error": "out of memory"}
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    return {
        "seconds": found.typical_seconds,
        "steps": found.seconds,
        "losses": found.losses,
        "peak_bytes": found.peak_bytes,
    }


def _plan(fields: dict[str, Any]) -> Plan:
    parsed = parse(fields)
    assert parsed.plan is not None, parsed.findings
    return parsed.plan


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
