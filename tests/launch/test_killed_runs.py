"""Ranks that are killed with SIGKILL at random moments: every run ends bit for bit as an undisturbed one.

Weights, optimizer states, random states, the position in the data and the log of losses are compared. One case is
fixed, with copies of experts, which a resumed run must place as before. The slow test draws anew until THREEFOLD_KILLS
ranks were killed; THREEFOLD_SEED repeats a draw.
"""

import json
import os
import random
import shutil
import time
from pathlib import Path

import pytest
from killed_runs import MOMENTS, Case, KilledRun, differences, draw_case

SEED = os.environ.get("THREEFOLD_SEED", str(time.time_ns() % 1_000_000))
KILLS = int(os.environ.get("THREEFOLD_KILLS", "10"))


class Undisturbed:
    """The undisturbed run of each plan, made once, and how long it took to its first checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: dict[str, tuple[Path, float]] = {}

    def run_of(self, case: Case) -> tuple[Path, float]:
        key = json.dumps(case.fields, sort_keys=True)
        if key not in self.made:
            folder = self.folder / f"calm-{len(self.made)}"
            began = time.monotonic()
            KilledRun(Case(case.fields, (), False, 0), folder).run(0)
            self.made[key] = folder, (time.monotonic() - began) / 2
        return self.made[key]


def check_case(case: Case, calm: Undisturbed, folder: Path) -> KilledRun:
    whole, start_seconds = calm.run_of(case)
    run = KilledRun(case, folder)
    run.run(8.0 if case.with_agent else start_seconds)
    assert differences(whole, folder) == [], f"{case}: {run.text()}"
    shutil.rmtree(folder)
    return run


@pytest.mark.timeout(1500)
def test_killed_ranks_cost_nothing_but_time(tmp_path: Path) -> None:
    fields = {"cluster.gpus": 2, "job.data": "synthetic", "job.steps": 8, "layout.ep": 2}
    fields |= {"run.save_every": 1, "run.eval_every": 2, "knobs.expert_balance": "replicate"}
    calm = Undisturbed(tmp_path)
    for seed in range(10):  # on a busy machine a run may end before this process gets to kill
        if check_case(Case(fields, ("save", "evaluation"), False, seed), calm, tmp_path / f"killed-{seed}").num_kills:
            return
    pytest.fail("no run was still there to be killed")


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_killed_ranks_drawn_anew(tmp_path: Path) -> None:
    print(f"THREEFOLD_SEED={SEED}")
    draw, calm = random.Random(SEED), Undisturbed(tmp_path)
    kills = resumed = runs = 0
    while kills < KILLS:
        case = draw_case(draw)
        run = check_case(case, calm, tmp_path / f"killed-{runs}")
        kills, resumed, runs = kills + run.num_kills, resumed + run.num_resumed, runs + 1
        print(f"{kills} kills, {runs} runs: {case.num_ranks} ranks, {case.moments}, {run.attempts} starts", flush=True)
    print(f"{kills} kills in {runs} runs, {resumed} starts resumed; moments: {', '.join(MOMENTS)}")
