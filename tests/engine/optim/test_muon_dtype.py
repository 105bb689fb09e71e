"""Muon's GEMMs in bf16: against fp64, against torch.optim.Muon, and in a training run against fp32."""

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import tiny_plan, tiny_shard

from threefold.engine.build import build
from threefold.engine.device import simulate
from threefold.engine.optim.muon import Muon, orthogonalize
from threefold.engine.step import train_step

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(48, 96), (96, 48), (64, 64), (5, 32, 80), (5, 80, 32)])
def test_bf16_is_close_to_fp64(shape: tuple[int, ...], device: str) -> None:
    """bf16 rounds by up to 2^-9 at each of fifteen GEMMs; errors of single elements cancel."""
    update = torch.randn(shape, device=device, generator=torch.Generator(device).manual_seed(0))
    expected = orthogonalize(update.double())
    found = orthogonalize(update, dtype=torch.bfloat16)
    assert expected.dtype == torch.float64
    assert found.dtype == torch.bfloat16
    assert ((found.double() - expected).norm() / expected.norm()).item() < 0.02
    narrow = orthogonalize(update.bfloat16(), dtype=torch.bfloat16)
    assert ((narrow.double() - expected).norm() / expected.norm()).item() < 0.03


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(48, 96), (96, 48)])
def test_steps_are_those_of_torch(shape: tuple[int, ...], device: str) -> None:
    """torch.optim.Muon has its momentum as a mean, which orthogonalisation scales alike, and GEMMs in bf16."""
    draw = torch.Generator(device).manual_seed(0)
    ours = torch.nn.Parameter(torch.randn(shape, device=device, generator=draw))
    theirs, before = torch.nn.Parameter(ours.detach().clone()), ours.detach().clone()
    muon = Muon([("layers.w", ours)], 0.1, matmul_dtype="bf16")
    oracle = torch.optim.Muon([theirs], lr=1e-2, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        ours.grad = torch.randn(shape, device=device, generator=draw)
        theirs.grad = ours.grad.clone()
        muon.step(1e-2)
        oracle.step()
    assert ((ours - theirs).norm() / (theirs - before).norm()).item() < 0.03


def test_a_gpu_multiplies_sixteen_bit_weights_in_bf16() -> None:
    weights = {dtype: torch.nn.Parameter(torch.ones(4, 4, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32)}

    def dtypes(matmul_dtype: str | None) -> list[torch.dtype]:
        made = Muon([(str(dtype), p) for dtype, p in weights.items()], 0.0, matmul_dtype=matmul_dtype)
        return [made._matmul_dtype(param) for param in made.params]

    assert dtypes(None) == [torch.float32, torch.float32]
    assert dtypes("bf16") == [torch.bfloat16, torch.bfloat16]
    with simulate("cuda"):
        assert dtypes(None) == [torch.bfloat16, torch.float32]
        assert dtypes("fp32") == [torch.float32, torch.float32]


def last_losses(fields: dict[str, Any], steps: int) -> list[float]:
    plan = tiny_plan(fields)
    parts = build(plan)
    assert parts.loader is not None
    losses = []
    for step in range(steps):
        batches = [parts.loader.batch(step, m) for m in range(plan.num_microbatches)]
        losses.append(train_step(parts, batches, 3e-3, plan.job).loss)
    parts.close()
    return losses


def test_a_run_learns_as_in_fp32(tmp_path: Path) -> None:
    """Two runs that differ in rounding alone differ less than two that differ in their first weights."""
    data = {"job.data": tiny_shard(tmp_path / "shard"), "job.optimizer": "muon", "knobs.precision": "bf16"}
    kinds = ({}, {"knobs.muon_dtype": "bf16"}, {"job.seed": 1})
    fp32, bf16, other = (last_losses({**data, **kind, "job.seq_len": 16}, 40) for kind in kinds)
    assert fp32 != bf16
    means = [statistics.mean(losses[-10:]) for losses in (fp32, bf16, other)]
    assert means[0] < 0.95 * fp32[0]
    assert abs(means[1] - means[0]) < min(0.01 * means[0], abs(means[2] - means[0]))
