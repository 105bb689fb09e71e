"""What activation offload leaves on the device of our own engine: by hand, by rehearsal, and for any plan."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import build
from random_plans import moe_plans

from threefold.cost.memory.by_stack import layer_activation_bytes, memory
from threefold.cost.memory.threefold.activations import layer_activations
from threefold.cost.memory.threefold.local_sizes import LocalSizes
from threefold.cost.memory.threefold.offloaded import offloaded_activations
from threefold.dryrun.rehearse_plan import rehearse
from threefold.plan.parse import change
from threefold.plan.plan import OFFLOAD_MODULES, Plan
from threefold.spec.model import Layer
from threefold.units import MIB

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {"model.num_layers": 4, "job.seq_len": 32768},
    "deepseek-v3": {"model.num_layers": 3, "model.num_dense_layers": 1, "job.seq_len": 8192},
    "gpt-oss-20b": {"model.num_layers": 4, "job.seq_len": 16384},
}
TOGETHER = [*OFFLOAD_MODULES], ["core_attn", "attn_proj"], ["attn_norm", "qkv_linear", "expert_fc1"]


def one_gpu(model: str, **knobs: Any) -> Plan:
    fields = {"model": model, "target": "threefold", "cluster.chip": "h200", "cluster.gpus": 1, "job.global_batch": 1}
    fields |= {"model.num_experts": 16, **SHAPES[model], **{f"knobs.{name}": value for name, value in knobs.items()}}
    return build(fields)


@pytest.mark.parametrize("fusion", [False, True])
@pytest.mark.parametrize("model", SHAPES)
def test_the_peak_with_tensors_away_is_near_the_rehearsal(model: str, fusion: bool) -> None:
    """Those of a layer come back together, and with them those of the layer before it."""
    plan = one_gpu(model, expert_fusion=fusion)
    for names in (["expert_fc1"], ["moe_act"], ["fused_group_mlp"], *TOGETHER):
        away = change(plan, {"knobs.activation_offload": names})
        rehearsed = rehearse(away, jobs=1).worst.peak_bytes
        assert memory(away).peak_bytes == pytest.approx(rehearsed, rel=0.03), names


def freed(plan: Plan, *names: str, layer: Layer | None = None) -> float:
    away = change(plan, {"knobs.activation_offload": names})
    there, here = (
        sum(layer_activation_bytes(each, layer or plan.model.layers[-1], 1.0).values()) for each in (plan, away)
    )
    return (there - here) / MIB


@pytest.mark.parametrize("fusion", [False, True])
def test_what_each_name_sends_by_hand(fusion: bool) -> None:
    """A layer of Qwen3-30B-A3B over 32,768 tokens: 128 MiB wide, queries 256, keys and values 32 each, rows of the
    experts 1024, and 384 of each tensor inside of them."""
    plan = one_gpu("qwen3-30b-a3b", expert_fusion=fusion)
    sums = 32768 * 32 * 4 / MIB  # of the softmax, a number in fp32 for each head
    assert freed(plan, "attn_norm") == freed(plan, "mlp_norm") == 128
    assert freed(plan, "qkv_linear") == 128 + 256 + 32
    assert freed(plan, "core_attn") == 256 + 2 * 32 + sums
    assert freed(plan, "attn_proj") == 0  # the kernel keeps its output too
    assert freed(plan, "core_attn", "attn_proj") == 2 * 256 + 2 * 32 + sums
    assert freed(plan, "expert_fc1") == (0 if fusion else 1024)
    assert freed(plan, "moe_act") == (0 if fusion else 4 * 384)
    # Fused experts read tokens where they are, and those stay for the router.
    assert freed(plan, "fused_group_mlp") == (2 * 384 if fusion else 1024 + 5 * 384)


def test_experts_elsewhere_send_their_rows() -> None:
    plan = change(one_gpu("qwen3-30b-a3b", expert_fusion=True), {"cluster.gpus": 8, "layout.ep": 8})
    plan = change(plan, {"job.global_batch": 8})
    assert freed(plan, "fused_group_mlp") == 1024 + 2 * 384


def test_latent_attention_sends_its_heads() -> None:
    plan = one_gpu("deepseek-v3")
    tokens = 8192 * 2 / MIB  # bytes of a number of every token
    dense = plan.model.layers[0]
    assert freed(plan, "qkv_linear", layer=dense) == tokens * (7168 + 2 * (1536 + 512) + 64)
    assert freed(plan, "core_attn", layer=dense) == tokens * 128 * (2 * 192 + 128 + 128 + 2)
    assert freed(plan, "expert_fc1", "moe_act", "fused_group_mlp", layer=dense) == 0


def test_small_tensors_and_what_is_made_again_stay() -> None:
    plan = one_gpu("qwen3-30b-a3b")
    assert freed(change(plan, {"job.seq_len": 128}), "attn_norm") == 0  # half a MiB
    assert freed(change(plan, {"knobs.recompute": ["moe"]}), "expert_fc1", "moe_act", "fused_group_mlp") == 0
    assert freed(change(plan, {"knobs.recompute": ["full"]}), *OFFLOAD_MODULES) == 0


@given(plan=moe_plans(), names=st.sets(st.sampled_from(OFFLOAD_MODULES)), fusion=st.booleans())
def test_no_more_is_sent_than_is_kept(plan: Plan, names: set[str], fusion: bool) -> None:
    plan = change(plan, {"target": "threefold", "knobs.activation_offload": sorted(names)})
    local = LocalSizes(change(plan, {"knobs.expert_fusion": fusion}))
    for layer in {*plan.model.layers}:
        kept = layer_activations(local, layer)
        for name, size in offloaded_activations(local, layer).terms.items():
            assert 0 <= size <= kept[name] * (1 + 1e-9)
