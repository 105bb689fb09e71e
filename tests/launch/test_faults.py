"""Ranks that die or stop while they train: nobody waits for ever, and the run ends as if nothing had happened."""

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from agent_runs import HANG_SECONDS, Run, plan_of
from tiny_runs import tiny_plan

from threefold.engine.dist.join import World
from threefold.engine.run.checkpoints import read_checkpoint
from threefold.engine.run.folder import CHECKPOINTS
from threefold.engine.train import train
from threefold.engine.verify.forked_ranks import run_ranks
from threefold.plan.plan import Plan


def undisturbed(rank: int, plan: Plan, folder: Path) -> None:
    train(plan, folder, world=World(rank, plan.cluster.gpus, rank, torch.device("cpu"), 0))


@pytest.fixture
def started() -> Iterator[list[Run]]:
    runs: list[Run] = []
    yield runs
    for run in runs:
        run.agent.kill()
        run.agent.wait()
        run.said.close()


def assert_same_end(plan: Plan, left: Path, right: Path) -> None:
    """Weights, optimizer states, router bias, position in the data: bit for bit."""
    (a, facts_a), (b, facts_b) = (
        read_checkpoint(folder / CHECKPOINTS / f"step-{plan.job.steps:08d}") for folder in (left, right)
    )
    assert facts_a == facts_b
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def kill_and_compare(ranks: int, kills: int, steps: int, tmp_path: Path, started: list[Run]) -> None:
    plan, draw = plan_of(ranks, steps), random.Random(ranks)
    run_ranks(ranks, undisturbed, plan, tmp_path / "calm", limit=HANG_SECONDS)
    for attempt in range(10):
        run = Run(plan, tmp_path / f"killed-{attempt}", restarts=kills + 1)
        started.append(run)
        for number in range(kills):
            if run.wait_for(1 + number * (steps - 2) // max(1, kills)):
                time.sleep(draw.uniform(0, 0.2))  # anywhere in a step, in a save
                if victims := run.ranks():
                    os.kill(draw.choice(victims), signal.SIGKILL)
        assert run.finish() == 0, run.text()
        assert_same_end(plan, tmp_path / "calm", run.folder)
        if "was killed by SIGKILL" in run.text():  # on a busy machine a run may end before this process gets to kill
            return
    pytest.fail("no run was still there to be killed")


@pytest.mark.timeout(5000)  # more than HANG_SECONDS, whose failure says more
@pytest.mark.slow
def test_a_killed_rank_costs_nothing_but_time(tmp_path: Path, started: list[Run]) -> None:
    kill_and_compare(2, 1, 30, tmp_path, started)


@pytest.mark.slow
@pytest.mark.timeout(10_000)
def test_twenty_killed_ranks_of_four(tmp_path: Path, started: list[Run]) -> None:
    kill_and_compare(4, 20, 42, tmp_path, started)


@pytest.mark.slow
@pytest.mark.timeout(10_000)
def test_a_rank_that_stops_for_ever_is_named(tmp_path: Path, started: list[Run]) -> None:
    """Rank 2 of four: its pipeline peer and its expert peer wait for it, and say so."""
    plan = plan_of(4, 6, hang_seconds=20.0)  # more than a step takes on a busy machine
    run = Run(plan, tmp_path / "stopped", restarts=1)
    started.append(run)
    assert run.wait_for(1), run.text()
    os.kill(run.ranks()[2], signal.SIGSTOP)
    assert run.finish() == 0, run.text()
    said = run.text() + "".join(path.read_text() for path in sorted((run.folder / "logs").glob("*.log")))
    assert "collective-arrives" in said, said
    assert "rank 2" in said


@pytest.mark.slow
@pytest.mark.timeout(10_000)
def test_a_run_goes_on_with_fewer_ranks(tmp_path: Path) -> None:
    """Four ranks, then two: the same samples in the same order, so the same losses but for rounding."""
    four = plan_of(4, 3)
    run_ranks(4, undisturbed, four, tmp_path / "run", limit=HANG_SECONDS)
    longer = plan_of(4, 5)
    run_ranks(4, undisturbed, longer, tmp_path / "calm", limit=HANG_SECONDS)
    two = tiny_plan({**dict(longer.written), "cluster.gpus": 2, "layout.pp": 1})
    run_ranks(2, undisturbed, two, tmp_path / "run", limit=HANG_SECONDS)
    (a, facts_a), (b, facts_b) = (
        read_checkpoint(tmp_path / name / CHECKPOINTS / "step-00000005") for name in ("calm", "run")
    )
    assert facts_a == facts_b
    for name in a:
        # fp32 sums in another order, through two updates by Adam, whose first steps have the size of the rate.
        torch.testing.assert_close(b[name], a[name], rtol=1e-3, atol=2e-4)
