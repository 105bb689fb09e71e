"""What optimizer states on the host add to a step: our own engine copies them, Megatron updates them on the host."""

from typing import Any

import pytest
from plans import build

from threefold.cost.rates import calibration
from threefold.cost.time.step import StepTime, step_time
from threefold.plan.parse import change

TWO_LAYERS: dict[str, Any] = {
    "model": "qwen3-30b-a3b",
    "cluster.chip": "h200",
    "cluster.gpus": 1,
    "layout.ep": 1,
    "model.num_layers": 2,
}
SHARDED_EXPERTS = {"cluster.gpus": 8, "layout.ep": 8, "job.global_batch": 8}


def offload_seconds_of(**fields: Any) -> tuple[float, StepTime]:
    """Seconds that optimizer states on the host add, and the step without them."""
    plan = build({**TWO_LAYERS, "target": "threefold", "job.global_batch": 1, "job.seq_len": 4096, **fields})
    without = step_time(plan, calibration("threefold").rates)
    with_states = step_time(change(plan, {"knobs.optimizer_offload": 1.0}), calibration("threefold").rates)
    return with_states.terms["offload"], without


def test_optimizer_states_come_and_go_at_the_rate_of_the_link() -> None:
    """1.87 billion parameters have 22 GB of states, which took 450 ms in each direction on an H200 (benchmark of
    2026-11-15), less the forward that runs beside them. bf16 moments are a third less."""
    seconds, step = offload_seconds_of()
    forward = step.step_seconds - step.terms["optimizer"] - step.terms["other"]
    assert 0.450 - forward < seconds < 0.450
    smaller, _ = offload_seconds_of(**{"knobs.optimizer_dtype": "bf16"})
    remainders, _ = offload_seconds_of(**{"knobs.store_param_remainders": True})
    assert smaller < remainders < seconds


def test_more_compute_hides_more_of_the_optimizer_states() -> None:
    """But each layer waits for its own update, the first one from the start."""
    seconds = [offload_seconds_of(**{"job.seq_len": length})[0] for length in (4096, 16384, 262_144)]
    assert seconds[0] > seconds[1] > seconds[2] > 0
    link = offload_seconds_of(**{"job.seq_len": 1, "job.micro_batch": 1})[0]
    assert seconds[2] == pytest.approx(link / 3, rel=0.02)


@pytest.mark.parametrize(("fields", "hides"), [
    ({}, True),
    ({"knobs.param_gather_overlap": False}, False),
    ({"knobs.data_parallel": "fsdp"}, False),
    ({"layout.ep": 4}, False),
])  # fmt: skip
def test_gathered_weights_wait_for_all_their_updates(fields: dict[str, Any], hides: bool) -> None:
    """A forward may begin before experts are updated that no other rank holds, because nobody gathers them."""
    short, long = (
        offload_seconds_of(**{**SHARDED_EXPERTS, "job.seq_len": length, **fields})[0] for length in (1, 16384)
    )
    assert (long < 0.9 * short) == hides


def test_megatron_updates_offloaded_states_on_the_host() -> None:
    """Whatever the length of a forward."""
    found = {offload_seconds_of(target="megatron-bridge", **{"job.seq_len": n})[0] for n in (1024, 16384)}
    assert len(found) == 1
