"""Slow ranks by their own step times: a rank that is held up is named, and those that wait for it are not."""

import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import tiny_plan, tiny_shard
from torch.nn.modules.module import register_module_forward_pre_hook

from threefold.engine.context import context
from threefold.engine.dist.join import World
from threefold.engine.effects.own_times import OwnTimes, RankTime, slow_ranks
from threefold.engine.models.block import Block
from threefold.engine.run.folder import EFFECTS
from threefold.engine.train import train
from threefold.engine.verify.forked_ranks import run_ranks
from threefold.plan.plan import Plan

STEPS = 6  # the third one is observed, those behind it are measured


def times(*seconds: float, stages: tuple[int, ...] = ()) -> list[RankTime]:
    stages = stages or (0,) * len(seconds)
    return [RankTime(n, f"host{n}", stage, own) for n, (own, stage) in enumerate(zip(seconds, stages, strict=True))]


@pytest.mark.parametrize(
    ("measured", "slow"),
    [
        (times(1.0, 1.0, 1.0, 1.0), []),
        (times(1.0, 1.0, 1.09, 1.0), []),
        (times(1.0, 1.0, 1.12, 1.0), [2]),
        (times(1.0, 1.2), [1]),  # of two ranks too
        (times(3.0, 1.0, 1.0, 1.5, 1.0), [0, 3]),  # the slowest first
        (times(2.0, 2.0, 1.0, 1.0, stages=(0, 0, 1, 1)), []),  # the first stage has more work
        (times(2.0, 2.5, 1.0, 1.0, stages=(0, 0, 1, 1)), [1]),
        (times(1.0, 2.0, stages=(0, 1)), [1]),  # no stage has two ranks
    ],
)
def test_ranks_more_than_a_tenth_above_the_median_are_slow(measured: list[RankTime], slow: list[int]) -> None:
    found = slow_ranks(measured)
    assert [one.time.rank for one in found] == slow
    assert all(f"rank {one.time.rank} on host{one.time.rank} is slow" in str(one) for one in found)


def test_a_difference_within_the_noise_is_no_slow_rank() -> None:
    """A fifth above the median, with a standard error of a tenth: two errors. With one of a twentieth it is four."""
    for error, slow in ((0.1, []), (0.05, [1])):
        noisy = [RankTime(0, "a", 0, 1.0), RankTime(1, "b", 0, 1.2, error), RankTime(2, "c", 0, 1.0)]
        assert [one.time.rank for one in slow_ranks(noisy)] == slow


def test_the_error_of_a_median() -> None:
    """Of normal draws with sigma 0.1: the medians of many samples scatter as the error of one says."""
    draw = random.Random(3)
    medians, errors = [], []
    for _ in range(300):
        own = OwnTimes(torch.device("cpu"))
        for _ in range(41):
            with own.step():
                pass
            own.end_step(draw.gauss(10.0, 0.1))
        medians.append(own.median() or 0.0)
        errors.append(own.error())
    assert statistics.median(errors) == pytest.approx(statistics.stdev(medians), rel=0.15)


def test_own_time_is_the_step_without_its_waits() -> None:
    own = OwnTimes(torch.device("cpu"))
    nap = 0.05
    with own.step():
        began = time.perf_counter()
        assert context.wait_timer is not None
        for _ in range(3):
            with context.wait_timer():
                time.sleep(nap)
        seconds = time.perf_counter() - began
    own.end_step(seconds)
    own.end_step(100.0)  # of a step that was not measured
    median = own.median()
    assert median is not None
    assert 0 <= median <= seconds - 3 * nap
    assert own.num_steps == 1


def train_with_naps(rank: int, plan: Plan, folder: Path, naps: tuple[float, ...]) -> list[str]:
    """Train as one rank, which sleeps in its only layer in the steps behind the observed one; what it said."""
    num_forwards = 0

    def nap(module: Any, args: Any) -> None:
        nonlocal num_forwards
        if isinstance(module, Block):
            num_forwards += 1
            time.sleep(naps[rank] if num_forwards > 3 else 0)

    register_module_forward_pre_hook(nap)
    said: list[str] = []
    train(plan, folder, said.append, world=World(rank, plan.layout.gpus, rank, torch.device("cpu"), 0))
    return said


# Delays are long beside what a busy machine adds to a step of milliseconds.
@pytest.mark.parametrize(
    ("fields", "naps", "slow"),
    [
        pytest.param({}, (3.0, 3.0), [], marks=pytest.mark.slow, id="even"),
        pytest.param({}, (0.0, 2.0), [1], id="one slow rank"),
        pytest.param(
            {"layout.pp": 2, "model.num_layers": 2}, (0.0, 2.0), [1], marks=pytest.mark.slow, id="one slow stage"
        ),
    ],
)
def test_a_run_names_its_slow_ranks(
    fields: dict[str, Any], naps: tuple[float, ...], slow: list[int], tmp_path: Path
) -> None:
    batch = {"job.global_batch": 4 if not fields else 2, "job.micro_batch": 2}  # one microbatch on each rank
    data = {"job.data": tiny_shard(tmp_path / "counting.tok"), "job.steps": STEPS, "cluster.gpus": 2}
    plan = tiny_plan({**data, **batch, **fields})
    assert plan.num_microbatches == 1
    said, nothing = run_ranks(2, train_with_naps, plan, tmp_path / "run", naps)
    assert not nothing  # the first rank speaks for all
    assert [line.split()[1] for line in said if " is slow: " in line] == [str(rank) for rank in slow]
    report = json.loads((tmp_path / "run" / EFFECTS).read_text(encoding="utf-8"))["own_times"]
    assert [row["rank"] for row in report["slow"]] == slow
    assert report["steps"] == STEPS - 3
    for row in report["ranks"]:
        assert row["own_seconds"] >= naps[row["rank"]]
