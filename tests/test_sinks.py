"""Weight gradients added where they are summed: the same sums as autograd's, and nothing of them on the way."""

import gc
from dataclasses import replace
from typing import Any
from weakref import ref

import pytest

torch = pytest.importorskip("torch")

from tiny_models import spec_of  # noqa: E402
from tiny_runs import tiny_plan  # noqa: E402
from torch import nn  # noqa: E402

from threefold.engine.build import build, options_of  # noqa: E402
from threefold.engine.mesh import Mesh  # noqa: E402
from threefold.engine.oracle import batch_of  # noqa: E402
from threefold.engine.shard.data import Zero1  # noqa: E402
from threefold.engine.sinks import sink_of  # noqa: E402
from threefold.engine.step import train_step  # noqa: E402
from threefold.engine.train import to_device  # noqa: E402

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def gradients(fused: bool, family: str, device: str, more: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sums of a step of three microbatches in bf16, and what autograd left in `.grad` of the weights with a sink."""
    fields = {"job.seq_len": 32, "job.global_batch": 3, "job.micro_batch": 1, "knobs.grad_accum_fusion": fused, **more}
    plan = replace(tiny_plan(fields), model=spec_of(family))
    mesh = Mesh(plan.layout, device=torch.device(device))
    options = options_of(plan) if device == "cuda" else replace(options_of(plan), expert_backend="loop")
    parts = build(plan, mesh, dtype=torch.bfloat16, options=options, with_data=False)
    assert isinstance(parts.data, Zero1)
    seen: dict[str, Any] = {}
    for chunk in parts.chunks.values():
        for name, parameter in chunk.named_parameters():
            if sink_of(parameter) is not None:
                parameter.register_hook(lambda grad, name=name: seen.update({name: grad} if grad is not None else {}))
    parts.data.begin(plan.num_microbatches)
    batches = [to_device(batch_of(plan, 0, m, 0), mesh.device) for m in range(plan.num_microbatches)]
    parts.runner.run(batches, [1 / 3] * 3)
    parts.data.finish()
    sums = {name: view for bucket in parts.data.buckets for name, view in bucket.views.items()}
    assert all(view.dtype == torch.float32 for view in sums.values())
    return sums, seen


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("family", "more"), [
    ("qwen3_moe", {}),
    ("qwen3_moe", {"knobs.expert_fusion": True}),
    ("gpt_oss", {"knobs.expert_fusion": True}),
    ("deepseek_v3", {"knobs.expert_fusion": True, "knobs.recompute": ["moe_act"]}),
])  # fmt: skip
def test_sums_are_autograd_s(family: str, more: dict[str, Any], device: str) -> None:
    expected, _ = gradients(False, family, device, more)
    found, seen = gradients(True, family, device, more)
    assert found.keys() == expected.keys()
    for name, total in found.items():
        # Each product of autograd's is rounded to bf16 before it is added; ours are not.
        scale = expected[name].norm()
        assert (total - expected[name]).norm() <= 8e-3 * scale + 1e-7, name
    went = [name for name in found if name not in seen]
    assert any(name.endswith("mixer.out.weight") for name in went)
    assert any("experts.gate_up" in name for name in went if "bias" not in name) == bool(more)


@pytest.mark.parametrize("fused", [False, True])
def test_weights_and_buffers_go_with_their_run(fused: bool) -> None:
    def run() -> list[Any]:
        plan = replace(tiny_plan({"job.global_batch": 2, "job.micro_batch": 1}), model=spec_of("qwen3_moe"))
        plan = replace(plan, knobs=replace(plan.knobs, grad_accum_fusion=fused))
        options = replace(options_of(plan), expert_backend="loop")
        parts = build(plan, dtype=torch.bfloat16, options=options, with_data=False)
        train_step(parts, [batch_of(plan, 0, m, 0) for m in range(2)], 1e-3, plan.job)
        assert isinstance(parts.data, Zero1)
        return [ref(x) for x in (*parts.chunks[0].parameters(), *parts.data.buckets)]

    left = run()
    gc.collect()
    assert not any(one() is not None for one in left)


def test_reductions_wait_for_every_microbatch() -> None:
    """A bucket is told once a backward, also where no gradient came by autograd."""
    told = []
    weight = nn.Parameter(torch.ones(2, 2))
    from threefold.engine.products import own_linears
    from threefold.engine.sinks import give_sink

    total, linear = torch.zeros(2, 2), nn.Linear(2, 2, bias=False)
    linear.weight = weight
    kept = give_sink(weight, total, lambda _: told.append(total.clone()))
    own_linears(nn.Sequential(linear))
    x = torch.ones(1, 2, requires_grad=True)
    (linear(x) + linear(2 * x)).sum().backward()
    assert kept is not None
    assert weight.grad is None
    assert len(told) == 1
    torch.testing.assert_close(told[0], torch.full((2, 2), 3.0))
    torch.testing.assert_close(x.grad, torch.full((1, 2), 6.0))
