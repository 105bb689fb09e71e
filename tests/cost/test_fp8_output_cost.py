"""The price of `knobs.fp8_output`: time of the output layer, and memory of its quantized weight."""

import pytest
from plans import build

from threefold.cost.estimate import estimate
from threefold.cost.memory.by_stack import memory
from threefold.cost.rates import rates_of
from threefold.cost.time.outside_layers import loss_seconds
from threefold.plan.parse import change

ONE = {
    "model": "qwen3-30b-a3b",
    "target": "threefold",
    "cluster.chip": "h200",
    "cluster.gpus": 1,
    "model.num_layers": 8,
    "job.seq_len": 4096,
    "job.micro_batch": 4,
    "job.global_batch": 16,
    "knobs.precision": "fp8-blockwise",
}


def test_the_output_layer_is_faster_in_fp8() -> None:
    """On an H200 16,384 tokens took 48.4 ms in bf16 and 30.2 ms in FP8 (benchmarks/results/output_head-h200.json)."""
    plain = build(ONE)
    output = change(plain, {"knobs.fp8_output": True})
    before, after = (loss_seconds(plan, rates_of(plan)) for plan in (plain, output))
    assert before == pytest.approx(48.4e-3, rel=0.1)
    assert after == pytest.approx(30.2e-3, rel=0.1)
    assert estimate(output).tokens_per_second_per_gpu > 1.05 * estimate(plain).tokens_per_second_per_gpu


def test_an_emulated_output_layer_gains_nothing() -> None:
    plain = build({**ONE, "cluster.chip": "b200", "knobs.precision": "fp8-rowwise"})
    output = change(plain, {"knobs.fp8_output": True})
    before, after = (loss_seconds(plan, rates_of(plan)) for plan in (plain, output))
    assert after >= before


@pytest.mark.parametrize(("fields", "ranks"), [({}, 1), ({"cluster.gpus": 2, "layout.tp": 2}, 2)])
def test_two_bytes_for_each_weight_of_the_output_layer(fields: dict[str, int], ranks: int) -> None:
    plain = build({**ONE, **fields})
    output = change(plain, {"knobs.fp8_output": True})
    before, after = (memory(plan).worst.terms["quantized_weights"] for plan in (plain, output))
    assert after - before == 2 * 151_936 * 2048 / ranks
    sharded = change(output, {"knobs.data_parallel": "fsdp"})
    assert memory(sharded).worst.terms["quantized_weights"] == 0
