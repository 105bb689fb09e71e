"""Tests of fp16's dynamic loss scale: its rule, gradients that survive, ranks that agree, and checkpoints."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle_layouts import FOUR, MTP1, case
from tiny_runs import DEEPSEEK, tiny_plan, tiny_shard

import threefold.engine.step as step_module
from threefold.engine.build import Parts, build, options_of
from threefold.engine.dist.mesh import Mesh
from threefold.engine.layers.cross_entropy import cross_entropy_sum
from threefold.engine.optim.loss_scaler import MIN_SCALE, LossScaler, initial_scale
from threefold.engine.step import StepResult, train_step
from threefold.engine.train import train
from threefold.engine.verify.forked_ranks import run_ranks
from threefold.engine.verify.oracle import synthetic_batch
from threefold.plan.plan import Plan

FP16 = {"knobs.precision": "fp16"}
LABELS = 2**24  # of a step of 128 sequences of 128K tokens


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_rule_is_that_of_megatron() -> None:
    """Megatron's DynamicGradScaler: the second overflow halves, as does each one after it, until the scale doubles."""
    scaler = LossScaler(2.0**16, growth_interval=3)
    scales = []
    for overflowed in (True, True, True, False, False, False, True, True, False):
        scaler.update(overflowed)
        scales.append(scaler.scale / 2**16)
    assert scales == [1, 0.5, 0.25, 0.25, 0.25, 0.5, 0.5, 0.25, 0.25]


def test_the_scale_does_not_fall_below_one() -> None:
    scaler = LossScaler(2.0, growth_interval=3)
    for _ in range(5):
        scaler.update(True)
    assert scaler.scale == MIN_SCALE
    assert not scaler.can_shrink


def step_of(parts: Parts, plan: Plan, lr: float = 1e-3) -> StepResult:
    rank = parts.mesh.coordinate("dp")
    batches = [synthetic_batch(plan, 0, m, rank) for m in range(plan.num_microbatches)]
    return train_step(parts, batches, lr, plan.job)


def fraction_of_zeros(parts: Parts) -> float:
    """The part of gradients that is exactly 0, without embeddings: rows of tokens that do not occur are 0 by right."""
    owned = [one for one in parts.data.owned if one.matrix and "embed" not in one.name and one.grad is not None]
    grads = torch.cat([one.grad.flatten() for one in owned if one.grad is not None])
    return (grads == 0).double().mean().item()


@pytest.mark.parametrize("micro_batch", [2, 4])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_gradients_of_a_large_step_survive(optimizer: str, micro_batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each microbatch has the label share that it has in a step of 2^24 labels. Weights move as in fp32."""
    count = step_module.count_labels

    def count_among_many(*given: Any) -> Any:
        share_M, labels = count(*given)
        return share_M / LABELS, labels

    monkeypatch.setattr(step_module, "count_labels", count_among_many)
    moved, zeros = {}, {}
    for name, fields in {
        "fp32": {},
        "unscaled": {**FP16, "job.initial_loss_scale": 1.0},
        "scaled": {**FP16, "job.initial_loss_scale": float(LABELS)},
    }.items():
        # eps far below the gradients, as it is for gradients of a usual size.
        small = {"job.adam_eps": 1e-15, "job.micro_batch": micro_batch, "job.optimizer": optimizer, "job.clip_norm": 0}
        plan = tiny_plan({"job.data": "synthetic", **small, **fields})
        parts = build(plan, with_data=False)
        before = {one.name: one.value.double().clone() for one in parts.data.owned}
        result = step_of(parts, plan)
        assert result.applied
        assert result.grad_norm == pytest.approx(2 / LABELS, rel=1) or name == "unscaled"
        zeros[name] = fraction_of_zeros(parts)
        moved[name] = {one.name: one.value.double() - before[one.name] for one in parts.data.owned}
    assert zeros["unscaled"] > 0.9
    assert zeros["scaled"] < zeros["fp32"] + 0.05
    for name, change in moved["scaled"].items():
        if "layers" in name and change.dim() and change.numel() > 1000:
            cosine = torch.nn.functional.cosine_similarity(change, moved["fp32"][name], dim=0)
            assert cosine > 0.9, name  # Adam's first step is the sign of each gradient, and fp16 flips some


LAYOUTS = {
    "pipeline with MTP": ("deepseek_v3", 2, {"pp": 2}, {}, FOUR | MTP1),
    "overlapped": ("deepseek_v3", 2, {"ep": 2}, {"ep_overlap": True, "delay_wgrad": True}, MTP1),
    "fsdp": ("qwen3_moe", 2, {}, {"data_parallel": "fsdp"}, {}),
    "zero1 and tp": ("qwen3_moe", 4, {"tp": 2}, {}, {}),
}


def overflow_and_recover(rank: int, plan: Plan) -> list[Any]:
    """A step that overflows, one that does not; the losses and norms of both, and what they changed."""
    parts = build(plan, Mesh(plan.layout, rank), torch.float16, options_of(plan), with_data=False)
    assert parts.loss_scaler is not None
    before = [one.value.clone() for one in parts.data.owned]
    first = step_of(parts, plan)
    parts.data.finish_param_sync()
    same = all(torch.equal(old, one.value) for old, one in zip(before, parts.data.owned, strict=True))
    steps = parts.optimizer.steps
    parts.loss_scaler.scale = 2.0**10
    second = step_of(parts, plan)
    parts.data.finish_param_sync()
    moved = any(not torch.equal(old, one.value) for old, one in zip(before, parts.data.owned, strict=True))
    return [replace(first, load_LE=None), same, steps, replace(second, load_LE=None), moved]


@pytest.mark.parametrize("name", LAYOUTS)
def test_all_ranks_see_an_overflow_and_the_same_norm(name: str) -> None:
    family, gpus, layout, knobs, spec = LAYOUTS[name]
    knobs = {"precision": "fp16", **knobs}
    job = {"global_batch": 4, "initial_loss_scale": 2.0**40}
    plan = case("", family, gpus, **layout, knobs=knobs, spec=spec, job=job).plan
    found = run_ranks(gpus, overflow_and_recover, plan)
    alone = replace(
        plan, layout=replace(plan.layout, gpus=1, tp=1, pp=1, ep=1), knobs=replace(plan.knobs, precision="fp32")
    )
    whole = build(alone, with_data=False)
    expected = train_step(whole, [synthetic_batch(alone, 0, m, 0) for m in range(4)], 0.0, alone.job)
    for first, same, steps, second, moved in found:
        assert (first.applied, first.overflowed, first.loss_scale) == (False, True, 2.0**40)
        assert same
        assert steps == 0
        assert (second.applied, second.overflowed) == (True, False)
        assert moved
        # fp16 rounds by 2^-11, and a model this small has few numbers over which that averages out.
        assert second.loss == pytest.approx(expected.loss, rel=5e-3)
        assert second.grad_norm == pytest.approx(expected.grad_norm, rel=5e-2)
        weighted = {n: value for n, value in second.aux.items() if n.startswith("weighted/")}
        assert weighted == pytest.approx({n: expected.aux[n] for n in weighted}, rel=2e-2)


def test_gradients_of_router_and_mtp_losses_are_scaled_too() -> None:
    """With the main loss alone scaled, the others would be 2^-16 of what they should be."""
    grads = []
    for fields in ({}, {**FP16, "job.initial_loss_scale": 2.0**12}):
        more = {"job.data": "synthetic", "job.aux_loss": 10.0, "job.z_loss": 10.0, "job.mtp_weight": 10.0}
        plan = tiny_plan({**DEEPSEEK, **more, **fields})
        parts = build(plan, with_data=False)
        result = step_of(parts, plan, lr=0.0)
        grads.append(result.grad_norm)
    assert grads[1] == pytest.approx(grads[0], rel=2e-2)


def test_the_scale_goes_on_behind_a_checkpoint(tmp_path: Path) -> None:
    fields = {
        **FP16,
        "job.data": tiny_shard(tmp_path / "shard.bin"),
        "job.steps": 12,
        "job.initial_loss_scale": 2.0**30,
    }
    lines = []
    for folder, halves in (("whole", [None]), ("halves", [5, None])):
        for stop_at in halves:
            state = train(tiny_plan(fields), tmp_path / folder, lambda text: None, stop_at=stop_at)
        found = (tmp_path / folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        lines.append([{n: json.loads(line)[n] for n in ("loss", "loss_scale", "overflow_steps")} for line in found])
        assert state.overflow_steps > 5
        assert state.bad_steps == 0
    assert lines[0] == lines[1]
    assert lines[0][-1]["loss_scale"] < 2.0**27


def test_a_loss_that_is_not_finite_is_a_bad_step(tmp_path: Path) -> None:
    """No loss scale cures it, and the run ends as it does in bf16."""
    plan = tiny_plan({**FP16, "job.data": "synthetic", "job.initial_loss_scale": 2.0**10})
    parts = build(plan, with_data=False)
    with torch.no_grad():
        next(iter(parts.model.parameters())).fill_(torch.nan)
    result = step_of(parts, plan)
    assert (result.applied, result.overflowed) == (False, False)
    assert parts.loss_scaler is not None
    assert parts.loss_scaler.scale == 2.0**10


def test_the_heads_gradient_does_not_overflow_before_it_is_scaled() -> None:
    """Its sum over many equal tokens is beyond fp16, whatever the loss scale: it is made while the logits exist."""
    x = torch.full((4096, 8), 30.0, dtype=torch.float16, requires_grad=True)
    weight = torch.zeros(4, 8, dtype=torch.float16, requires_grad=True)
    (cross_entropy_sum(x, weight, torch.zeros(4096, dtype=torch.long)) * 2.0**-10).backward()
    # p - 1 = -3/4 at the label, over 4,096 tokens of 30, times 2^-10.
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad[0], torch.full((8,), -0.75 * 4096 * 30 / 1024, dtype=torch.float16))


def test_first_scale_follows_the_tokens_of_a_step() -> None:
    """Megatron's 2**32 at 16M tokens; a smaller step begins lower, so that it does not begin with overflows."""
    small, large = tiny_plan(FP16), tiny_plan({**FP16, "job.seq_len": 2**17, "job.global_batch": 128})
    assert initial_scale(large) == 2.0**32
    assert initial_scale(small) == 256 * small.tokens_per_step
    assert initial_scale(tiny_plan({**FP16, "job.initial_loss_scale": 3.0})) == 3.0
