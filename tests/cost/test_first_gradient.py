"""Where gradients begin in a plan with frozen weights, and that layers before it save nothing."""

from typing import Any

import pytest
from plans import build
from rehearsal_plans import GPU

from threefold.cost.memory.by_stack import memory
from threefold.cost.memory.threefold.activations import layer_activations
from threefold.cost.memory.threefold.graphs.layer_pool import PoolTimeline
from threefold.cost.memory.threefold.graphs.pools import largest_pool
from threefold.cost.memory.threefold.local_sizes import LocalSizes
from threefold.cost.stage_contents import chunk_layers, first_gradient_in
from threefold.cost.trained_weights import first_gradient
from threefold.units import MIB

LAYERS = {**GPU, "model.num_layers": 4}


@pytest.mark.parametrize(
    ("fields", "first"),
    [
        ({}, (0, "input")),
        ({"job.freeze": ["*.experts.*"]}, (0, "input")),  # the embedding trains
        ({"job.freeze": ["embed.weight"]}, (0, "mixer_norm")),
        ({"job.freeze": ["embed.weight", "*norm*"]}, (0, "mixer")),
        ({"job.freeze": ["embed.weight", "layers.0.*", "layers.1.*"]}, (2, "mixer_norm")),
        ({"job.lora_rank": 16, "job.lora_targets": ["attention"]}, (0, "mixer")),
        ({"job.lora_rank": 16, "job.lora_targets": ["experts"]}, (0, "ffn")),
        (
            {"model": "qwen3-vl-30b-a3b", "job.freeze": ["language"]},
            (0, "input"),
        ),  # features of pictures have gradients
    ],
    ids=str,
)
def test_the_first_gradient_is_that_of_the_first_trained_weight(fields: dict[str, Any], first: tuple[int, str]) -> None:
    assert first_gradient(build({**LAYERS, **fields})) == first


def test_layers_before_the_first_gradient_save_nothing() -> None:
    plan = build({**LAYERS, "job.freeze": ["embed.weight", "layers.0.*", "layers.1.*"]})
    layers = chunk_layers(plan, plan.chunks[0])
    assert [first_gradient_in(layer) for layer in layers] == ["none", "none", "input", "input"]
    saved = [sum(layer_activations(LocalSizes(plan), layer).values()) for layer in layers]
    assert saved[:2] == [0.0, 0.0]
    assert saved[2] == saved[3] > 0


@pytest.mark.parametrize("scopes", [["attn", "moe"], ["moe"], ["full_iteration"]], ids=str)
def test_graphs_hold_less_of_layers_before_the_first_gradient(scopes: list[str]) -> None:
    alone = {**LAYERS, "cluster.gpus": 1, "layout.ep": 1, "job.global_batch": 1, "knobs.graphs": scopes}
    frozen = build({**alone, "job.freeze": ["embed.weight", "layers.0.*", "layers.1.*"]})
    assert 0 < largest_pool(frozen) < largest_pool(build(alone))
    assert memory(frozen).worst.terms["graphs"] > 0


def test_a_pool_is_larger_than_what_is_live_in_it() -> None:
    """A tensor of 64 MiB is freed before one of 96 MiB is made, which does not fit where the first was."""
    line = PoolTimeline()
    line.make(64.0 * MIB)
    line.free(64.0 * MIB)
    line.make(96.0 * MIB)
    line.pass_through(48.0 * MIB)
    assert (line.peak, line.pool.num_bytes) == (144 * MIB, 160 * MIB)
