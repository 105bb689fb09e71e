"""Tests of fused gradient accumulation: the same sums as autograd's, and no gradients left to autograd."""

import gc
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ref

import pytest
import torch
from oracle_layouts import FOUR, MTP1, case
from tiny_models import spec_of
from tiny_runs import tiny_plan
from torch import nn

from threefold.engine.autograd.main_grad import main_grad_of
from threefold.engine.build import build, options_of
from threefold.engine.data_parallel.zero1 import Zero1
from threefold.engine.dist.mesh import Mesh
from threefold.engine.step import to_device, train_step
from threefold.engine.verify.forked_ranks import run_ranks
from threefold.engine.verify.oracle import synthetic_batch
from threefold.plan.plan import Plan

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def gradients(fused: bool, family: str, device: str, more: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """-> (gradient sums of a step of three bf16 microbatches, gradients autograd made for weights with `main_grad`)."""
    fields = {"job.seq_len": 32, "job.global_batch": 3, "job.micro_batch": 1, "knobs.grad_accum_fusion": fused, **more}
    plan = replace(tiny_plan(fields), model=spec_of(family))
    mesh = Mesh(plan.layout, device=torch.device(device))
    options = options_of(plan) if device == "cuda" else replace(options_of(plan), expert_backend="loop")
    parts = build(plan, mesh, dtype=torch.bfloat16, options=options, with_data=False)
    assert isinstance(parts.data, Zero1)
    seen: dict[str, Any] = {}
    for chunk in parts.chunks.values():
        for name, parameter in chunk.named_parameters():
            if main_grad_of(parameter) is not None:
                parameter.register_hook(lambda grad, name=name: seen.update({name: grad} if grad is not None else {}))
    parts.data.begin_step(plan.num_microbatches)
    batches = [to_device(synthetic_batch(plan, 0, m, 0), mesh.device) for m in range(plan.num_microbatches)]
    parts.runner.run(batches, [1 / 3] * 3)
    parts.data.finish_grad_sync()
    sums = {name: view for bucket in parts.data.buckets for name, view in bucket.grad_views.items()}
    assert all(view.dtype == torch.float32 for view in sums.values())
    return sums, seen


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("family", "more"), [
    ("qwen3_moe", {}),
    ("qwen3_moe", {"knobs.expert_fusion": True}),
    ("gpt_oss", {"knobs.expert_fusion": True}),
    ("deepseek_v3", {"knobs.expert_fusion": True, "knobs.recompute": ["moe_act"]}),
])  # fmt: skip
def test_sums_equal_those_of_autograd(family: str, more: dict[str, Any], device: str) -> None:
    expected, _ = gradients(False, family, device, more)
    found, seen = gradients(True, family, device, more)
    assert found.keys() == expected.keys()
    for name, total in found.items():
        # Autograd rounds each gradient to bf16 before it is added; the fused accumulation does not.
        scale = expected[name].norm()
        assert (total - expected[name]).norm() <= 8e-3 * scale + 1e-7, name
    accumulated = [name for name in found if name not in seen]
    assert any(name.endswith("mixer.out.weight") for name in accumulated)
    assert any("experts.gate_up" in name for name in accumulated if "bias" not in name) == bool(more)


@pytest.mark.parametrize("fused", [False, True])
def test_weights_and_buffers_are_freed_with_their_run(fused: bool) -> None:
    def run() -> list[Any]:
        plan = replace(tiny_plan({"job.global_batch": 2, "job.micro_batch": 1}), model=spec_of("qwen3_moe"))
        plan = replace(plan, knobs=replace(plan.knobs, grad_accum_fusion=fused))
        options = replace(options_of(plan), expert_backend="loop")
        parts = build(plan, dtype=torch.bfloat16, options=options, with_data=False)
        train_step(parts, [synthetic_batch(plan, 0, m, 0) for m in range(2)], 1e-3, plan.job)
        assert isinstance(parts.data, Zero1)
        return [ref(x) for x in (*parts.chunks[0].parameters(), *parts.data.buckets)]

    refs = run()
    gc.collect()
    assert not any(one() is not None for one in refs)


def test_the_hook_fires_once_a_backward() -> None:
    """It also fires where autograd brings no gradient, so that a bucket knows when its sums are complete."""
    sums = []
    weight = nn.Parameter(torch.ones(2, 2))
    from threefold.engine.autograd.linear import use_main_grad_linears
    from threefold.engine.autograd.main_grad import attach_main_grad

    total, linear = torch.zeros(2, 2), nn.Linear(2, 2, bias=False)
    linear.weight = weight
    handle = attach_main_grad(weight, total, lambda _: sums.append(total.clone()))
    use_main_grad_linears(nn.Sequential(linear))
    x = torch.ones(1, 2, requires_grad=True)
    (linear(x) + linear(2 * x)).sum().backward()
    assert handle is not None
    assert weight.grad is None
    assert len(sums) == 1
    torch.testing.assert_close(sums[0], torch.full((2, 2), 3.0))
    torch.testing.assert_close(x.grad, torch.full((1, 2), 6.0))


def _note(made: set[str], name: str, grad: torch.Tensor | None) -> None:
    if grad is not None:
        made.add(name)


def pipeline_sums(rank: int, plan: Plan) -> list[tuple[dict[str, torch.Tensor], set[str]]]:
    """Without and with fused accumulation: gradient sums of a step, and weights that autograd made no gradient for."""
    found = []
    for fused in (False, True):
        one = replace(plan, knobs=replace(plan.knobs, grad_accum_fusion=fused))
        mesh = Mesh(one.layout, rank)
        parts = build(one, mesh, torch.bfloat16, replace(options_of(one), expert_backend="loop"), with_data=False)
        assert isinstance(parts.data, Zero1)
        made: set[str] = set()
        for chunk in parts.chunks.values():
            for name, parameter in chunk.named_parameters():
                parameter.register_hook(partial(_note, made, name))
        parts.data.begin_step(one.num_microbatches)
        batches = [synthetic_batch(one, 0, m, mesh.coordinate("dp")) for m in range(one.num_microbatches)]
        parts.runner.run(batches, [1 / len(batches)] * len(batches))
        parts.data.finish_grad_sync()
        sums = {name: view.clone() for bucket in parts.data.buckets for name, view in bucket.grad_views.items()}
        found.append((sums, sums.keys() - made))
    return found


@pytest.mark.parametrize(("vpp", "schedule", "knobs"), [
    (1, "1f1b", {"expert_fusion": True}),
    (2, "interleaved", {"ep_overlap": True, "delay_wgrad": True}),
    (1, "zero-bubble", {}),
    (2, "dualpipev", {"expert_fusion": True}),
])  # fmt: skip
def test_pipelines_accumulate_in_their_gemms(vpp: int, schedule: str, knobs: dict[str, Any]) -> None:
    layout = {"pp": 2, "vpp": vpp, "schedule": schedule}
    plan = case("", "deepseek_v3", 2, **layout, knobs=knobs, spec=FOUR | MTP1, job={"global_batch": 6}).plan
    for (expected, _), (found, not_made) in run_ranks(2, pipeline_sums, plan):
        assert any(name.endswith("mixer.out.weight") for name in not_made)
        for name, total in found.items():
            # Autograd rounds each gradient to bf16 before it is added; the fused accumulation does not.
            assert (total - expected[name]).norm() <= 8e-3 * expected[name].norm() + 1e-7, name
