"""Faults of the capture are seen: a missed copy, a stale buffer, a gradient that is overwritten.

Each mutation takes one step out of a replay, with the stand-in recorder; the numbers then differ from those of the
eager model. Without a mutation they are equal.
"""

from typing import Any

import pytest
import torch
from fake_cuda_graphs import StandIn
from test_graphs import EVERY, batches, pair

from threefold.engine.dist.collectives import PendingCollective, _start
from threefold.engine.dist.mesh import TRIVIAL_GROUP
from threefold.engine.graphs import full_iteration, graphed_function
from threefold.engine.graphs.graphed_function import GraphedFunction
from threefold.engine.graphs.graphed_part import ChunkGraphs
from threefold.engine.graphs.stats import GraphStats
from threefold.engine.precision.recipes import RECIPES

FP8 = {"recipe": RECIPES["fp8-blockwise"], "cache_quantized_weights": True}
FULL = ("full_iteration",)


def is_equal(scopes: tuple[str, ...], options: dict[str, Any]) -> bool:
    """Whether three steps of two microbatches give the numbers of the eager model."""
    torch.set_num_threads(1)
    plain, graphed = pair("qwen3_moe", scopes, **options)
    equal = True
    for seed in range(3):
        found, wanted = (run.step(batches(run.model, 2, seed)) for run in (graphed, plain))
        equal &= all(torch.equal(found[name], value) for name, value in wanted.items())
    graph_stats = graphed.model_graphs.graph_stats
    assert graph_stats is not None
    assert graph_stats.replays
    assert not graph_stats.fallbacks
    return equal


def nothing(*_: Any) -> None:
    """In the place of a step of a replay."""


@pytest.mark.parametrize("scopes", [EVERY, pytest.param(FULL, marks=pytest.mark.slow)], ids="+".join)
def test_quantized_weights_are_those_of_the_step(scopes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_equal(scopes, FP8)
    for module in (graphed_function, full_iteration):
        monkeypatch.setattr(module, "refresh_weights", nothing)
    assert not is_equal(scopes, FP8)


def test_a_missed_copy_of_an_input_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphed_function, "_copy_into", nothing)
    assert not is_equal(EVERY, {})


def test_a_gradient_that_is_overwritten_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GraphedFunction, "copy_grads_out", nothing)
    assert not is_equal(EVERY, {})


def test_a_stream_that_is_not_joined_is_seen() -> None:
    def never_waited_for() -> list[torch.Tensor]:
        started: PendingCollective = _start(TRIVIAL_GROUP, "all_reduce", 0, lambda: None)
        assert started
        return [torch.ones(2)]

    with pytest.raises(RuntimeError, match="unjoined"):
        StandIn().record(never_waited_for)


def test_the_budget_bounds_the_slots() -> None:
    """A slot of the stand-in has two pools of 1,000 bytes; a third slot would pass 5,000."""
    graphs = ChunkGraphs(StandIn, GraphStats(), warmup=0, max_bytes=5000.0)
    for number in range(2):
        with graphs.microbatch():
            assert graphs.slot is graphs.slots[number]
            graphs.slot.num_in_flight = 1
        with graphs.microbatch():  # before the backward of the first is recorded its memory is not known
            assert graphs.slot is None
        graphs.slots[number].is_sealed = True
    with graphs.microbatch():
        assert graphs.slot is None
    assert {reason: times for (_, reason), times in graphs.graph_stats.fallbacks.items()} == {
        "the memory of a microbatch that is being recorded is not known yet": 2,
        "no memory left in knobs.graph_memory_gb": 1,
    }


def test_the_budget_holds_where_a_pipeline_records() -> None:
    """Three microbatches are in flight before the first backward: one after the other gets graphs, up to the budget."""
    held = {}
    for budget in (None, 4500.0):
        plain, graphed = pair("qwen3_moe", ("moe_router",))
        graphs = graphed.model_graphs.graphs
        assert graphs is not None
        graphs.max_bytes = budget
        for seed in range(4):
            for run in (graphed, plain):
                run.model.zero_grad(set_to_none=True)
                losses = []
                run.model_graphs.reset()
                for batch in batches(run.model, 3, seed):
                    with run.model_graphs.microbatch():
                        losses.append(run.model(batch.tokens_BS, batch.labels_BS).loss)
                for loss in losses:
                    loss.backward()
            for one, other in zip(graphed.model.parameters(), plain.model.parameters(), strict=True):
                assert torch.equal(one.grad, other.grad)
        held[budget] = len(graphs.slots)
    assert held == {None: 3, 4500.0: 1}  # static copies make two slots larger than that
