"""Fine-tuning drawn at random gives on several ranks what one rank computes: losses, gradients, states, evaluations.

The default suite runs a few fixed draws. The slow test draws anew each time, or again with THREEFOLD_SEED; hundreds are
run by hand with `benchmarks/drawn_cases.py sft`.
"""

import os
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drawn_layouts import resolve
from drawn_sft import draw_sft, run_sft
from layout_runs import FAULTS, TOLERANCE, Outcome
from oracle_layouts import case

from threefold.engine.data.loader import Loader
from threefold.engine.data.shard_writer import ShardWriter
from threefold.engine.verify.oracle import compare_with_one_rank
from threefold.plan.plan import Plan

SEED = os.environ.get("THREEFOLD_SEED", str(time.time_ns() % 1_000_000))
SLOW_COUNT = 40


SAMPLE = (3, 4, 7)  # a few ranks each


def outcomes(seed: str, numbers: Iterable[int], root: Path) -> list[Outcome]:
    return [run_sft(f"{seed}/{number}", root / str(number)) for number in numbers]


def test_drawn_fine_tuning_is_one_rank(tmp_path: Path) -> None:
    found = outcomes("0", SAMPLE, tmp_path)
    assert not [str(outcome) for outcome in found if outcome.kind in FAULTS]
    assert Counter(outcome.kind for outcome in found)["equal"] >= 2


@pytest.mark.slow
def test_more_drawn_fine_tuning_is_one_rank(tmp_path: Path) -> None:
    faults = [str(outcome) for outcome in outcomes(SEED, range(SLOW_COUNT), tmp_path) if outcome.kind in FAULTS]
    assert not faults, f"THREEFOLD_SEED={SEED}\n" + "\n".join(faults)


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> list[Plan]:
    folder = tmp_path_factory.mktemp("draws")
    drawn = [resolve(draw_sft(f"coverage/{number}", folder / str(number))) for number in range(50)]
    return [one.plan for one in drawn if one.plan is not None]


def test_draws_cover_what_fine_tuning_can_be(plans: list[Plan]) -> None:
    assert len(plans) >= 25
    assert {plan.job.task for plan in plans} == {"sft"}
    for axis in ("tp", "cp", "pp", "vpp", "dp", "ep", "etp", "edp"):
        assert any(plan.layout.degree(axis) > 1 for plan in plans), axis
    assert {plan.knobs.data_parallel for plan in plans} == {"zero1", "fsdp", "hsdp"}
    assert {len(plan.job.data) for plan in plans if not isinstance(plan.job.data, str)} >= {1, 2, 3}
    assert any(entry.rpartition(":")[2] == "2x" for plan in plans for entry in plan.job.data)
    assert {plan.job.val_data is None for plan in plans if plan.run.eval_every} == {True, False}
    for name in ("packing", "dynamic_length", "lora_rank"):
        assert any(getattr(plan.job, name) for plan in plans), name
    assert any(plan.mtp for plan in plans)
    assert any(plan.job.dynamic_length and plan.layout.tp * plan.layout.cp > 1 for plan in plans)


def test_a_draw_writes_the_same_data_again(tmp_path: Path) -> None:
    for seed in ("0", "1", "2"):
        one, two = (draw_sft(seed, tmp_path / folder / seed) for folder in ("one", "two"))
        assert one.config == two.config
        names = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*.*"))
        assert names
        assert all((tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes() for name in names)


def write_conversations(path: Path, count: int) -> str:
    with ShardWriter(path, 67, "test") as writer:
        for number in range(count):
            writer.add([(7 * number + n) % 67 for n in range(12)], [0] * 4 + [1] * (3 + number) + [0] * (5 - number))
    return str(path)


def test_the_oracle_sees_an_evaluation_that_counts_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three samples on two ranks: one more fills the last microbatch, and must not count."""
    data, held_out = write_conversations(tmp_path / "data.tok", 4), write_conversations(tmp_path / "held.tok", 3)
    job = {"task": "sft", "data": [data], "val_data": [held_out]}
    plan = case("evaluation", "qwen3_moe", 2, ep=2, job=job).plan
    plan = replace(plan, run=replace(plan.run, eval_every=1, eval_batches=3))
    torch.set_num_threads(1)
    assert compare_with_one_rank(plan, 1, reads_data=True).largest < TOLERANCE
    monkeypatch.setattr(Loader, "samples", lambda self, step, microbatch: [0] * plan.job.micro_batch)
    assert compare_with_one_rank(plan, 1, reads_data=True).loss > 1e-3
