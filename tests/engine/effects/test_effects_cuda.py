"""What a run reports on a GPU: kernels, graphs, bytes and times by CUDA events. Skipped where there is none."""

from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from tiny_runs import tiny_plan, tiny_shard

from threefold.engine.build import build
from threefold.engine.context import context
from threefold.engine.dist.mesh import Mesh
from threefold.engine.effects.activation_bytes import ActivationObserver
from threefold.engine.effects.own_times import OwnTimes
from threefold.engine.effects.recorder import RunEffects, RunReport
from threefold.engine.model_options import Options
from threefold.engine.models.build import build_model
from threefold.engine.models.decoder import Decoder
from threefold.engine.run.folder import EFFECTS
from threefold.engine.step import to_device, train_step
from threefold.engine.train import train
from threefold.engine.verify.oracle import synthetic_batch
from threefold.spec.models import MODELS

DEVICE = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
GPU = {"cluster.chip": "h200", "knobs.precision": "bf16", "job.seq_len": 256}
STEPS = 4


def observe(fields: dict[str, Any]) -> RunReport:
    plan = tiny_plan({**GPU, **fields})
    parts = build(plan, Mesh(plan.layout, device=DEVICE), with_data=False)
    effects = RunEffects(plan, parts, 0, 0, STEPS)
    effects.observed_step = STEPS
    for step in range(STEPS):
        batches = [to_device(synthetic_batch(plan, step, m, 0), DEVICE) for m in range(plan.num_microbatches)]
        with effects.step(step + 1):
            train_step(parts, batches, 1e-3, plan.job)
    return RunReport(plan, [effects.collect()])


def took(report: RunReport) -> dict[str, bool | None]:
    return {effect.knob: effect.took_effect for effect in report.effects}


def test_attention_and_graphs_of_a_gpu() -> None:
    report = observe({"knobs.graphs": ["attn", "moe_router"]})
    assert took(report)["graphs.attn"] is took(report)["graphs.moe_router"] is True
    eager = {effect.knob: effect for effect in observe({}).effects}
    assert "torch's" in eager["attention"].ran or "FlashAttention" in eager["attention"].ran


@pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="kernels of Hopper")
def test_kernels_of_experts_and_linears() -> None:
    fused = observe({"knobs.expert_fusion": True, "knobs.expert_kernels": "triton"})
    assert took(fused)["expert_fusion"] is took(fused)["expert_kernels"] is True
    assert took(observe({"knobs.precision": "fp8-blockwise", "knobs.expert_fusion": True}))["precision"] is True


def forward_bytes(model: Decoder, tokens_BS: torch.Tensor) -> int:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = model(tokens_BS, tokens_BS.roll(-1, 1))
    torch.cuda.synchronize()
    torch.empty(1, device=DEVICE)  # lets go of what was sent to the host
    kept = torch.cuda.memory_allocated() - before
    del out
    return kept


@pytest.mark.parametrize("options", [{"recompute": ("layernorm", "moe_act")}, {"activation_offload": ("core_attn",)}])
def test_bytes_and_seconds_on_the_device(options: dict[str, Any]) -> None:
    spec = MODELS["tiny-qwen3-moe"]
    tokens_BS = torch.randint(spec.vocab, (8, 2048), device=DEVICE)
    plain, model = (
        build_model(spec, 0, torch.bfloat16, DEVICE, Options(**chosen), 0) for chosen in ({}, dict(options))
    )
    for one in (plain, model):  # kernels are compiled, tables and workspaces are made
        loss = one(tokens_BS, tokens_BS.roll(-1, 1)).loss
        assert loss is not None
        loss.backward()
    measured = forward_bytes(plain, tokens_BS) - forward_bytes(model, tokens_BS)
    observer = ActivationObserver([model], DEVICE)
    with observer.step():
        loss = model(tokens_BS, tokens_BS.roll(-1, 1)).loss
        assert loss is not None
        loss.backward()
    uses = {name: use for found in observer.results(1) for name, use in found.items()}
    # The allocator rounds each tensor up to 512 bytes.
    assert sum(use.kept_bytes for use in uses.values()) == pytest.approx(measured, rel=0.01)
    assert all(use.seconds > 0 for use in uses.values())


def test_own_time_is_what_the_compute_stream_did_not_wait() -> None:
    own, side = OwnTimes(DEVICE), torch.cuda.Stream()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with own.step():
        assert context.wait_timer is not None
        start.record()
        with torch.cuda.stream(side):
            torch.cuda._sleep(400_000_000)  # type: ignore[no-untyped-call]
            arrived = torch.cuda.Event()
            arrived.record()
        with context.wait_timer():
            arrived.wait()
        torch.cuda._sleep(40_000_000)  # type: ignore[no-untyped-call]
        end.record()
        end.synchronize()
    seconds = start.elapsed_time(end) / 1e3
    own.end_step(seconds)
    median = own.median()
    assert median is not None
    assert median < 0.3 * seconds  # a tenth of the cycles, and what launches take


def test_a_run_on_a_gpu_writes_its_report(tmp_path: Path) -> None:
    said: list[str] = []
    data = {"job.data": tiny_shard(tmp_path / "counting.tok"), "job.steps": 5}
    train(tiny_plan({**GPU, **data, "knobs.recompute": ["layernorm"]}), tmp_path / "run", said.append)
    assert (tmp_path / "run" / EFFECTS).exists()
    assert any("layernorm" in text for text in said)
