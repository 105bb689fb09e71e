"""Tests of delayed weight gradients: the same values as without delay, the same sums, and as many calls of hooks."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle_layouts import MTP1, case
from torch import Tensor, nn

from threefold.engine.autograd.delayed_wgrad import WgradQueue
from threefold.engine.autograd.linear import shared_input_linears
from threefold.engine.autograd.main_grad import attach_main_grad, main_grad_of
from threefold.engine.build import build, options_of
from threefold.engine.data_parallel.zero1 import Zero1
from threefold.engine.dist.mesh import Mesh
from threefold.engine.kernels.experts.fused_experts import fused_experts, grouped_experts
from threefold.engine.verify.forked_ranks import run_ranks
from threefold.engine.verify.oracle import synthetic_batch
from threefold.engine.verify.overlap_ab import VARIANTS

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
TOKENS, TOP, EXPERTS, DIM, HALF = 24, 2, 4, 64, 64


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def made(*shape: int, seed: int, device: str) -> Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 4
    return x.to(device, torch.bfloat16)


class Setting:
    """Inputs and weights of fused experts and of two linear layers of one input, with or without `main_grad`."""

    def __init__(self, device: str, with_main_grad: bool) -> None:
        self.x = made(TOKENS, DIM, seed=0, device=device).requires_grad_()
        self.chosen = torch.rand(TOKENS, TOP, generator=torch.Generator().manual_seed(1)).to(device)
        self.expert_TK = torch.arange(TOP, device=device).repeat(TOKENS, 1)  # two experts have no rows
        shapes = [(EXPERTS, 2 * HALF, DIM), (EXPERTS, DIM, HALF), (DIM, DIM), (32, DIM)]
        self.weights = [nn.Parameter(made(*shape, seed=n + 2, device=device)) for n, shape in enumerate(shapes)]
        self.hook_calls: Counter[int] = Counter()
        self.handles: list[Any] = []
        for n, weight in enumerate(self.weights if with_main_grad else ()):
            total = torch.zeros_like(weight, dtype=torch.float32)
            self.handles.append(attach_main_grad(weight, total, lambda _, n=n: self.hook_calls.update([n])))

    def forward(self) -> Tensor:
        up, down, one, other = self.weights
        y = fused_experts(self.x, self.chosen, self.expert_TK, up, down)
        count_E = torch.tensor([10, 0, 9, 5], device=y.device)
        y = grouped_experts(y, self.chosen[:, 0], count_E, up, down)
        a, b = shared_input_linears(y, [one, other], [None, None])
        return a.float().square().sum() + b.float().square().sum()

    def grads(self) -> list[Tensor]:
        return [w.grad if main_grad_of(w) is None else main_grad_of(w) for w in self.weights]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("with_main_grad", [False, True])
def test_delayed_gradients_equal_immediate_ones(device: str, with_main_grad: bool) -> None:
    immediate, delayed, queue = Setting(device, with_main_grad), Setting(device, with_main_grad), WgradQueue()
    immediate.forward().backward()
    with queue:
        delayed.forward().backward()
    assert delayed.x.grad is not None
    assert torch.equal(delayed.x.grad, immediate.x.grad)
    assert all(w.grad is None for w in delayed.weights)
    assert all(not main_grad_of(w).any() for w in delayed.weights if with_main_grad)
    assert not delayed.hook_calls
    queue.finish()
    for found, expected in zip(delayed.grads(), immediate.grads(), strict=True):
        # The expert weights are used twice, and their two gradients are rounded and added in another order.
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2 * expected.abs().max().item())
    assert delayed.hook_calls == immediate.hook_calls == (Counter(range(4)) if with_main_grad else Counter())


def sums_of(rank: int, plan: Any) -> list[tuple[dict[str, Tensor], set[str]]]:
    """For each overlap variant: (gradient sums after the reduction over ranks, names of weights with `main_grad`)."""
    found = []
    for overlap, delay in VARIANTS.values():
        one = replace(plan, knobs=replace(plan.knobs, ep_overlap=overlap, delay_wgrad=delay))
        mesh = Mesh(one.layout, rank)
        options = replace(options_of(one), expert_backend="loop")
        parts = build(one, mesh, torch.bfloat16, options, with_data=False)
        assert isinstance(parts.data, Zero1)
        count = one.num_microbatches
        parts.data.begin_step(count)
        parts.runner.run([synthetic_batch(one, 0, m, mesh.coordinate("dp")) for m in range(count)], [1 / count] * count)
        parts.data.finish_grad_sync()
        sums = {name: view.clone() for bucket in parts.data.buckets for name, view in bucket.grad_views.items()}
        (chunk,) = parts.chunks.values()
        found.append((sums, {name for name, p in chunk.named_parameters() if main_grad_of(p) is not None}))
    return found


@pytest.mark.parametrize(("family", "spec"), [("qwen3_moe", {}), ("deepseek_v3", MTP1)])
@pytest.mark.parametrize("fused", [False, True])
def test_bf16_sums_are_the_same_bits_in_all_variants(family: str, spec: dict[str, Any], fused: bool) -> None:
    """All variants run the same GEMMs in the same order with the same roundings, so their bits agree."""
    plan = case("", family, 2, ep=2, knobs={"expert_fusion": fused}, spec=spec, job={"global_batch": 6}).plan
    for (expected, with_main_grad), *others in run_ranks(2, sums_of, plan):
        assert any(name.endswith("experts.down") for name in with_main_grad)
        for sums, names in others:
            assert names == with_main_grad
            different = [name for name, total in sums.items() if not torch.equal(total, expected[name])]
            assert different == []
