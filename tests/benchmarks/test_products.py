"""Tests of `benchmarks/products.py`: a limit of a step must hold all products of the model, and no others."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from threefold.plan.parse import parse
from threefold.spec.flops import flops_per_token
from threefold.spec.model import ModelSpec
from threefold.spec.models import DEEPSEEK_V3, QWEN3_30B, TINY_DEEPSEEK_V3, TINY_QWEN3_MOE

SCRIPT = Path(__file__).parents[2] / "benchmarks/products.py"


@pytest.fixture
def products() -> ModuleType:
    found = importlib.util.spec_from_file_location("benchmark_products", SCRIPT)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.parametrize("model", [QWEN3_30B, DEEPSEEK_V3, TINY_QWEN3_MOE, TINY_DEEPSEEK_V3], ids=lambda m: m.name)
def test_linear_layers_and_attention_are_the_flops_of_a_step(products: ModuleType, model: ModelSpec) -> None:
    plan = parse({"model": model.name, "job.mtp": 0, "job.seq_len": 128, "job.micro_batch": 2}).plan
    assert plan is not None
    linear = sum(2 * 3 * rows * n * k for rows, n, k in products.linear_shapes(plan))
    heads = products.attention_heads_of(plan)
    attention = 3 * 2 * model.num_layers * heads.flops(128)
    # The formula of MLA counts the norms of its down projections, too: one FLOP for each of their values.
    assert linear + attention == pytest.approx(2 * 128 * flops_per_token(model, 128, 0), rel=1e-3)


def test_each_linear_layer_is_multiplied_three_times(products: ModuleType) -> None:
    plan = parse({"model": "tiny-deepseek-v3", "job.mtp": 0, "job.seq_len": 32, "job.micro_batch": 2}).plan
    assert plan is not None
    run = products.products_alone(plan, torch.device("cpu"))
    with FlopCounterMode(display=False) as counter:
        run(torch.zeros(2, 32, dtype=torch.int64))
    linear = sum(2 * 3 * rows * n * k for rows, n, k in products.linear_shapes(plan))
    assert counter.get_flop_counts()["Global"][torch.ops.aten.mm] == linear
