"""Prices of an uneven load with copies of hot experts: counted by hand, and on its way to what balance promises."""

from dataclasses import replace

import pytest
from plans import build

from threefold.cost.estimate import estimate
from threefold.cost.expert_load import load_of
from threefold.plan.plan import Plan

FIELDS = {
    "model": "qwen3-30b-a3b",
    "target": "threefold",
    "cluster.chip": "h100",
    "cluster.gpus": 64,
    "layout.ep": 8,
    "job.seq_len": 4096,
    "job.global_batch": 256,
    "job.load": "hot-rank",
}


def plan_of(**knobs: object) -> Plan:
    return build(FIELDS | {f"knobs.{name}": value for name, value in knobs.items()})


def test_one_hot_rank_is_copied_as_counted_by_hand() -> None:
    """With 128 experts on 8 ranks, 8 neighbors get half of the rows, 1/16 each, and the other half is spread over 120.

    The hot rank has 8/16 + 8/240 = 0.533 of all rows, 4.27 times the mean. Seven ranks have one slot each, and each
    takes one hot expert as far as it has room: 0.125 - 0.0667 of all rows, which is less than the expert's 0.0625.
    """
    load = load_of(plan_of(expert_balance="replicate"))
    assert load_of(plan_of()).skew == pytest.approx(8 * (8 / 16 + 8 / 240), rel=0.01)
    assert load.skew == pytest.approx(1.0, abs=0.02)
    assert load.copied == pytest.approx(7)


def test_a_load_that_moves_is_balanced_too_late() -> None:
    moving = {
        name: replace(plan_of(expert_balance=name), job=replace(plan_of().job, load="drift"))
        for name in ("none", "replicate")
    }
    # The experts that are hot next have no copies; only what they had before is elsewhere.
    assert load_of(moving["replicate"]).skew == pytest.approx(load_of(moving["none"]).skew, rel=0.05)


def test_a_step_comes_near_what_forced_balance_promises() -> None:
    plain, copied = (estimate(plan_of(**knobs)) for knobs in ({}, {"expert_balance": "replicate"}))
    assert plain.uneven is not None
    balanced = plain.uneven.balanced_seconds
    assert balanced < copied.time.step_seconds < plain.time.step_seconds
    assert copied.time.step_seconds - balanced < 0.5 * (plain.time.step_seconds - balanced)
    # The chance that a rank has more rows than its part is as it was: memory of rows is less, and slots are more.
    assert copied.uneven is not None
    assert copied.uneven.largest_rows < plain.uneven.largest_rows
