"""Tests of `benchmarks/gemms_and_attention.py`: all GEMMs and the attention of a step are there, and nothing else."""

from types import ModuleType

import pytest
import torch
from repository import ROOT
from scripts import load_script
from torch.utils.flop_counter import FlopCounterMode

from threefold.plan.parse import parse
from threefold.spec.flops import flops_per_token
from threefold.spec.model import ModelSpec
from threefold.spec.models import MODELS


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(ROOT / "benchmarks/gemms_and_attention.py", "benchmark_gemms_and_attention")


@pytest.mark.parametrize(
    "model",
    [MODELS["qwen3-30b-a3b"], MODELS["deepseek-v3"], MODELS["tiny-qwen3-moe"], MODELS["tiny-deepseek-v3"]],
    ids=lambda m: m.name,
)
def test_linear_layers_and_attention_are_the_flops_of_a_step(script: ModuleType, model: ModelSpec) -> None:
    plan = parse({"model": model.name, "job.mtp": 0, "job.seq_len": 128, "job.micro_batch": 2}).plan
    assert plan is not None
    linear = sum(2 * 3 * rows * n * k for rows, n, k in script.linear_shapes(plan))
    heads = script.attention_heads_of(plan)
    attention = 3 * 2 * model.num_layers * heads.flops(128)
    # The formula of MLA counts the norms of its down projections, too: one FLOP for each of their values.
    assert linear + attention == pytest.approx(2 * 128 * flops_per_token(model, 128, 0), rel=1e-3)


def test_each_linear_layer_is_multiplied_three_times(script: ModuleType) -> None:
    plan = parse({"model": "tiny-deepseek-v3", "job.mtp": 0, "job.seq_len": 32, "job.micro_batch": 2}).plan
    assert plan is not None
    run = script.gemms_and_attention(plan, torch.device("cpu"))
    with FlopCounterMode(display=False) as counter:
        run(torch.zeros(2, 32, dtype=torch.int64))
    linear = sum(2 * 3 * rows * n * k for rows, n, k in script.linear_shapes(plan))
    assert counter.get_flop_counts()["Global"][torch.ops.aten.mm] == linear
