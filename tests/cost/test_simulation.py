"""Simulated steps: equal ranks against the closed form and a paper, unequal ones against order statistics."""

import math

import pytest
from plans import build

from threefold.cli.main import main
from threefold.cost.time.simulation import simulate_step
from threefold.plan.parse import change
from threefold.plan.plan import Plan


def plan_of(pp: int, vpp: int, gpus: int, global_batch: int) -> Plan:
    return build(
        {
            "model": "deepseek-v3",
            "target": "megatron-bridge",
            "cluster.chip": "h100",
            "cluster.gpus": gpus,
            "job.seq_len": 4096,
            "job.global_batch": global_batch,
            "job.mtp": 0,
            "layout.pp": pp,
            "layout.vpp": vpp,
            "layout.ep": 64,
            "knobs.precision": "fp8-blockwise",
        }
    )


@pytest.mark.parametrize(
    ("pp", "vpp", "gpus", "batch"), [(1, 1, 256, 2048), (8, 1, 1024, 2048), (8, 4, 2048, 8192), (16, 2, 16_384, 16_384)]
)
def test_equal_ranks_take_what_the_closed_form_says(pp: int, vpp: int, gpus: int, batch: int) -> None:
    """The closed form fills the pipeline with the slowest stage's time, and 61 layers do not divide by 16: 3 %."""
    found = simulate_step(plan_of(pp, vpp, gpus, batch), 0.0, draws=1)
    assert found.seconds == (found.even_seconds,)
    assert found.even_seconds == pytest.approx(found.closed_seconds, rel=0.03)
    assert found.num_ranks == gpus


def test_a_group_waits_for_its_slowest_rank() -> None:
    """Without a pipeline each pass takes the slowest of 64 ranks: the mean of the largest of 64 normal numbers is 2.38
    (tables of order statistics), and the last of four groups of four passes a step is a little later."""
    jitter = 0.01
    found = simulate_step(plan_of(1, 1, 256, 2048), jitter, draws=200)
    assert found.median_seconds / found.even_seconds == pytest.approx(math.exp(2.38 * jitter), rel=0.006)


def test_weak_scaling_loses_as_groups_multiply() -> None:
    """More pipelines that end together can only wait longer, and little: the largest of n grows as sqrt(log n)."""
    slower = []
    for replicas in (1, 4, 16):
        found = simulate_step(plan_of(4, 1, 256 * replicas, 2048 * replicas), 0.0, spread=0.01, draws=50)
        slower.append(found.median_seconds / found.even_seconds)
    assert slower[0] < slower[1] < slower[2] < slower[0] + 0.02


def test_too_large_a_plan_is_refused() -> None:
    with pytest.raises(ValueError, match="16,384 ranks"):
        simulate_step(plan_of(16, 1, 32_768, 32_768), 0.02)


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["recipes/deepseek-v3-4k-1024xh100-fp8.toml", "target=megatron-bridge"]
    assert main(["estimate", *arguments, "--jitter", "0.02"]) == 0
    assert "steps of 1,024 ranks" in capsys.readouterr().out
    assert main(["estimate", *arguments, "--jitter", "2"]) == 2


@pytest.mark.parametrize("load", ["zipf", "hot-rank", "burst"])
def test_simulated_loads_take_what_the_closed_form_says(load: str) -> None:
    """The mean over a period of the load; passes that deviate by chance make a pipeline wait a little longer."""
    plan = change(plan_of(8, 1, 1024, 2048), {"job.load": load})
    found = simulate_step(plan, 0.0, draws=16)
    assert sum(found.seconds) / 16 == pytest.approx(found.closed_seconds, rel=0.04)
    if load == "burst":  # every eighth step
        assert found.seconds[13] < 1.1 * found.even_seconds < found.seconds[14] / 2
