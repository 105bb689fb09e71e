"""Weight gradients of fused products that wait: the same bits, added to the same sums, told of as often."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from oracle_layouts import MTP1, case  # noqa: E402
from ranks import run_ranks  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from threefold.engine.build import build, options_of  # noqa: E402
from threefold.engine.kernels.experts import fused_experts, grouped_experts  # noqa: E402
from threefold.engine.kernels.linears import linears  # noqa: E402
from threefold.engine.mesh import Mesh  # noqa: E402
from threefold.engine.oracle import batch_of  # noqa: E402
from threefold.engine.overlap.trial import VARIANTS  # noqa: E402
from threefold.engine.pipeline.delay import Delay  # noqa: E402
from threefold.engine.shard.data import Zero1  # noqa: E402
from threefold.engine.sinks import give_sink, sink_of  # noqa: E402

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
TOKENS, TOP, EXPERTS, DIM, HALF = 24, 2, 4, 64, 64


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def made(*shape: int, seed: int, device: str) -> Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 4
    return x.to(device, torch.bfloat16)


class Setting:
    """Inputs, weights and sums of experts and of three products of one input."""

    def __init__(self, device: str, sinks: bool) -> None:
        self.x = made(TOKENS, DIM, seed=0, device=device).requires_grad_()
        self.chosen = torch.rand(TOKENS, TOP, generator=torch.Generator().manual_seed(1)).to(device)
        self.expert_TK = torch.arange(TOP, device=device).repeat(TOKENS, 1)  # two experts have no rows
        shapes = [(EXPERTS, 2 * HALF, DIM), (EXPERTS, DIM, HALF), (DIM, DIM), (32, DIM)]
        self.weights = [nn.Parameter(made(*shape, seed=n + 2, device=device)) for n, shape in enumerate(shapes)]
        self.told: Counter[int] = Counter()
        self.kept: list[Any] = []
        for n, weight in enumerate(self.weights if sinks else ()):
            total = torch.zeros_like(weight, dtype=torch.float32)
            self.kept.append(give_sink(weight, total, lambda _, n=n: self.told.update([n])))

    def forward(self) -> Tensor:
        up, down, one, other = self.weights
        y = fused_experts(self.x, self.chosen, self.expert_TK, up, down)
        count_E = torch.tensor([10, 0, 9, 5], device=y.device)
        y = grouped_experts(y, self.chosen[:, 0], count_E, up, down)
        a, b = linears(y, [one, other], [None, None])
        return a.float().square().sum() + b.float().square().sum()

    def grads(self) -> list[Tensor]:
        return [w.grad if sink_of(w) is None else sink_of(w) for w in self.weights]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sinks", [False, True])
def test_what_waits_is_what_would_have_come(device: str, sinks: bool) -> None:
    at_once, later, delay = Setting(device, sinks), Setting(device, sinks), Delay()
    at_once.forward().backward()
    with delay:
        later.forward().backward()
    assert later.x.grad is not None
    assert torch.equal(later.x.grad, at_once.x.grad)
    assert all(w.grad is None for w in later.weights)
    assert all(not sink_of(w).any() for w in later.weights if sinks)
    assert not later.told
    delay.finish()
    for found, expected in zip(later.grads(), at_once.grads(), strict=True):
        # Weights of experts are used twice: two roundings of one sum in another order.
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2 * expected.abs().max().item())
    assert later.told == at_once.told == (Counter(range(4)) if sinks else Counter())


def sums_of(rank: int, plan: Any) -> list[tuple[dict[str, Tensor], set[str]]]:
    """Of each variant: gradients as they are reduced over ranks, and the weights that have a sink."""
    found = []
    for overlap, delay in VARIANTS.values():
        one = replace(plan, knobs=replace(plan.knobs, ep_overlap=overlap, delay_wgrad=delay))
        mesh = Mesh(one.layout, rank)
        options = replace(options_of(one), expert_backend="loop")
        parts = build(one, mesh, torch.bfloat16, options, with_data=False)
        assert isinstance(parts.data, Zero1)
        count = one.num_microbatches
        parts.data.begin(count)
        parts.runner.run([batch_of(one, 0, m, mesh.place("dp")) for m in range(count)], [1 / count] * count)
        parts.data.finish()
        sums = {name: view.clone() for bucket in parts.data.buckets for name, view in bucket.views.items()}
        (chunk,) = parts.chunks.values()
        found.append((sums, {name for name, p in chunk.named_parameters() if sink_of(p) is not None}))
    return found


@pytest.mark.parametrize(("family", "spec"), [("qwen3_moe", {}), ("deepseek_v3", MTP1)])
@pytest.mark.parametrize("fused", [False, True])
def test_bf16_sums_are_those_of_one_after_the_other(family: str, spec: dict[str, Any], fused: bool) -> None:
    """Products, their order and what is rounded between are the same, and so are the bits."""
    plan = case("", family, 2, ep=2, knobs={"expert_fusion": fused}, spec=spec, job={"global_batch": 6}).plan
    for (expected, sinks), *others in run_ranks(2, sums_of, plan):
        assert any(name.endswith("experts.down") for name in sinks)
        for sums, others_sinks in others:
            assert others_sinks == sinks
            unlike = [name for name, total in sums.items() if not torch.equal(total, expected[name])]
            assert unlike == []
