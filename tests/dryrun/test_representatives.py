"""The microbatches and stages that are rehearsed reach the peak of all of them."""

import pytest
from plans import build
from rehearsal_plans import GPU, tiny

from threefold.dryrun.rehearse_rank import rehearse_rank
from threefold.dryrun.representatives import distinct_stages, reduce_microbatches


def test_fewer_microbatches_reach_the_same_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = tiny("tiny-qwen3-moe", 2, layout__pp=2, job__global_batch=6, job__seq_len=32)
    small = reduce_microbatches(plan, 0)
    assert small.num_microbatches < plan.num_microbatches == 6
    few = rehearse_rank(plan, 0)
    monkeypatch.setattr("threefold.dryrun.rehearse_rank.reduce_microbatches", lambda plan, stage: plan)
    assert few.peak_bytes == rehearse_rank(plan, 0).peak_bytes


def test_fewer_microbatches_have_as_many_weights_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"layout__pp": 3, "layout__schedule": "zero-bubble", "model__num_layers": 3, "job__seq_len": 32}
    plan = tiny("tiny-qwen3-moe", 3, job__global_batch=9, **changes)
    assert reduce_microbatches(plan, 2).num_microbatches < 9
    few = [rehearse_rank(plan, rank).peak_bytes for rank in range(3)]
    monkeypatch.setattr("threefold.dryrun.rehearse_rank.reduce_microbatches", lambda plan, stage: plan)
    # With more of them one more message between stages may not be asked about yet: 16 KiB of 9 MiB.
    assert few == pytest.approx([rehearse_rank(plan, rank).peak_bytes for rank in range(3)], rel=2e-3)


def test_fewer_microbatches_have_sent_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between virtual stages a rank holds what it has sent, hidden states and, later, gradients."""
    changes = {"model": "qwen3-8b", "cluster.gpus": 16, "job.seq_len": 32768, "job.global_batch": 64, "layout.ep": 1}
    changes |= {"layout.pp": 4, "layout.vpp": 2, "model.num_layers": 8, "knobs.recompute": ["full"]}
    plan = build({**GPU, **changes})
    assert reduce_microbatches(plan, 3).num_microbatches < plan.num_microbatches
    few = rehearse_rank(plan, 12).peak_bytes
    monkeypatch.setattr("threefold.dryrun.rehearse_rank.reduce_microbatches", lambda plan, stage: plan)
    assert few == pytest.approx(rehearse_rank(plan, 12).peak_bytes, rel=2e-3)


def test_stages_that_are_alike_are_rehearsed_once() -> None:
    plan = build({**GPU, "layout.pp": 4, "model.num_layers": 8, "job.global_batch": 256, "cluster.gpus": 1024})
    assert plan.num_microbatches == 1  # one microbatch in flight everywhere: only the ends differ
    assert distinct_stages(plan) == {0: [0], 1: [1, 2], 3: [3]}
