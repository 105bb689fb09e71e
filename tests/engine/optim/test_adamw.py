"""AdamW against torch's fused kernel: without master weights, and with the betas and the eps of a plan."""

from typing import Any

import pytest
import torch
from oracle_layouts import case
from tiny_runs import tiny_plan

from threefold.engine.build import build
from threefold.engine.dist.mesh import Mesh
from threefold.engine.optim.adamw import AdamW
from threefold.engine.optim.muon import Muon
from threefold.engine.step import train_step
from threefold.engine.verify.forked_ranks import run_ranks
from threefold.engine.verify.oracle import synthetic_batch
from threefold.plan.plan import Plan

LR, BETAS, EPS = 1e-2, (0.7, 0.8), 0.1  # an eps as large as gradients, so that its place in the formula matters
ADAM = {"adam_beta1": BETAS[0], "adam_beta2": BETAS[1], "adam_eps": EPS}


def test_without_masters_bf16_weights_move_as_torchs_fused_kernel_moves_them() -> None:
    torch.manual_seed(0)
    ours = [torch.randn(shape).bfloat16().requires_grad_() for shape in ((33, 17), (2, 8, 8))]
    theirs = [p.detach().clone().requires_grad_() for p in ours]
    optimizer = AdamW([(f"w{n}", p) for n, p in enumerate(ours)], 0.1, "bf16", master=False)
    oracle = torch.optim.AdamW(theirs, 1e-2, (0.9, 0.95), weight_decay=0.1, fused=True)
    for _ in range(5):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        optimizer.step(1e-2)
        oracle.step()
    assert not optimizer.master
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)


def test_without_masters_fp32_moments_round_the_weights_once() -> None:
    torch.manual_seed(0)
    bf16_weight = torch.randn(9, 9).bfloat16().requires_grad_()
    fp32_weight = bf16_weight.detach().float().requires_grad_()
    bf16_weight.grad = torch.randn_like(bf16_weight)
    fp32_weight.grad = bf16_weight.grad.float()
    AdamW([("w", bf16_weight)], 0.1, "fp32", master=False).step(1e-2)
    torch.optim.AdamW([fp32_weight], 1e-2, (0.9, 0.95), weight_decay=0.1, fused=True).step()
    assert torch.equal(bf16_weight, fp32_weight.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offload", [0.0, 1.0])
def test_betas_and_eps_are_those_of_torch(offload: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ours = torch.randn(33, 17).to(dtype).requires_grad_()
    theirs = ours.detach().float().requires_grad_()
    optimizer = AdamW([("w", ours)], 0.1, "fp32", BETAS, EPS, offload=offload)
    oracle = torch.optim.AdamW([theirs], LR, BETAS, EPS, weight_decay=0.1, fused=True)
    for _ in range(3):
        ours.grad = torch.randn(33, 17).to(dtype)
        theirs.grad = ours.grad.float()
        optimizer.step(LR)
        oracle.step()
    assert torch.equal(ours, theirs.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("make", [AdamW, Muon])
def test_a_factor_multiplies_every_gradient(make: Any, dtype: torch.dtype) -> None:
    """As if the gradients had been divided by the loss scale before, but without rounding them to fp16."""
    torch.manual_seed(0)
    scaled, plain = (
        {name: torch.ones(8, 4).to(dtype).requires_grad_() for name in ("layers.w", "embed")} for _ in range(2)
    )
    optimizers = [make(params.items(), 0.1) for params in (scaled, plain)]
    for _ in range(3):
        for name, p in scaled.items():
            p.grad = torch.randn(8, 4).to(dtype)
            plain[name].grad = p.grad / 2**6
        optimizers[0].step(LR, torch.tensor(2.0**-6, dtype=torch.float64))
        optimizers[1].step(LR)
    for name, p in scaled.items():
        torch.testing.assert_close(p, plain[name], rtol=1e-6 if dtype == torch.float32 else 2e-3, atol=0)


@pytest.mark.parametrize(("optimizer", "knobs"), [
    ("adamw", {}),
    ("adamw", {"optimizer_offload": 1.0}),
    ("muon", {}),
])  # fmt: skip
def test_a_plan_sets_betas_and_eps(optimizer: str, knobs: dict[str, Any]) -> None:
    fields = {f"job.{name}": value for name, value in ADAM.items()} | {f"knobs.{n}": v for n, v in knobs.items()}
    made = build(tiny_plan({**fields, "job.optimizer": optimizer, "job.data": "synthetic"}), with_data=False).optimizer
    adamw = made.adamw if isinstance(made, Muon) else made
    assert (adamw.betas, adamw.eps) == (BETAS, EPS)


def step_size_of_first_step(rank: int, plan: Plan) -> float:
    """The largest change of a weight of this rank without weight decay, over the learning rate."""
    parts = build(plan, Mesh(plan.layout, rank), torch.float32, with_data=False)
    before = [one.value.clone() for one in parts.data.updated]
    train_step(parts, [synthetic_batch(plan, 0, m, rank) for m in range(plan.num_microbatches)], LR, plan.job)
    return max(((old - one.value).abs().max() / LR).item() for old, one in zip(before, parts.data.updated, strict=True))


@pytest.mark.parametrize("data_parallel", ["zero1", "fsdp"])
def test_sharded_optimizers_take_the_plans_eps(data_parallel: str) -> None:
    """Adam's first step is g / (|g| + eps): 1 for every usual gradient, and next to nothing beside a large eps."""
    for eps in (1e-8, 1.0):
        job = {"adam_eps": eps, "weight_decay": 0.0, "clip_norm": 1e-2}
        plan = case("", "qwen3_moe", 2, knobs={"data_parallel": data_parallel}, job=job).plan
        found = max(run_ranks(2, step_size_of_first_step, plan))
        # Gradients are clipped to a norm of 0.01.
        assert found == pytest.approx(1.0, rel=1e-2) if eps < 1 else found < 0.01
