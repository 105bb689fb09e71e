"""Offload changes no bit: activations by module and by layer, optimizer states by fraction; and they do leave."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from live_tensors import LiveTensors
from oracle_layouts import FOUR, FSDP, PACKED, case
from test_recompute import assert_same, forward, gradients, make
from tiny_models import FAMILIES

from threefold.engine.autograd import offload
from threefold.engine.build import build, options_of
from threefold.engine.device import simulate
from threefold.engine.model_options import Options
from threefold.engine.models.build import build_model
from threefold.engine.optim import cpu_offload as hosted
from threefold.engine.optim.adamw import AdamW
from threefold.engine.step import train_step
from threefold.engine.verify.compare import compare_results
from threefold.engine.verify.forked_ranks import run_ranks
from threefold.engine.verify.oracle import run_one_rank, run_rank, synthetic_batch
from threefold.plan.parse import parse
from threefold.plan.plan import OFFLOAD_MODULES, Plan
from threefold.rules.all import check

HOST = torch.uint8  # copies on the host are bytes


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("family", FAMILIES)
def test_activations_come_back_as_they_left(family: str) -> None:
    plain = gradients(family, torch.float32)
    assert_same(gradients(family, torch.float32, activation_offload=OFFLOAD_MODULES), plain)
    assert_same(gradients(family, torch.float32, activation_offload_layers=1), plain)


@pytest.mark.parametrize("name", OFFLOAD_MODULES)
def test_each_module_by_name(name: str) -> None:
    plain = gradients("deepseek_v3", torch.float64)
    assert_same(gradients("deepseek_v3", torch.float64, activation_offload=(name,)), plain)


@pytest.mark.parametrize("names", [("layernorm",), ("moe",), ("full",), ("mla_up_proj", "core_attn", "moe_act")])
def test_offload_beside_recompute(names: tuple[str, ...]) -> None:
    plain = gradients("deepseek_v3", torch.float64)
    for more in ({"activation_offload": OFFLOAD_MODULES}, {"activation_offload_layers": 2}):
        assert_same(gradients("deepseek_v3", torch.float64, recompute=names, **more), plain)


def test_what_a_recompute_discards_does_not_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output of a recomputed norm, which the first GEMMs of attention would save."""
    sizes: dict[str, list[int]] = {}

    def copied(*recompute: str) -> list[int]:
        found: list[int] = []
        to_host = offload._copy_to_host
        with monkeypatch.context() as patch:
            patch.setattr(offload, "_copy_to_host", lambda x, name: found.append(x.numel()) or to_host(x, name))
            gradients("qwen3_moe", torch.float32, activation_offload=("qkv_linear",), recompute=recompute)
        return found

    sizes = {name: copied(*names) for name, names in (("saved", ()), ("recomputed", ("layernorm",)))}
    assert len(sizes["recomputed"]) < len(sizes["saved"])


def left(family: str, **options: Any) -> float:
    """Values of fp64 a token that stay on the device, 32 tokens."""
    model = make(family, torch.float64, expert_backend="loop", **options)
    with LiveTensors(without=(HOST,)) as living:
        out = forward(model)
        num_bytes = living.num_bytes
    del out
    return num_bytes / 8 / 32


# By hand from tiny_models.py: model dim 32, 4 heads of 8 with 2 of keys, 3 experts a token of 24, two layers.
GONE = {
    # Input, input over its size, and the size; what is behind the weight belongs to the reader.
    ("qwen3_moe", "attn_norm"): 2 * (32 + 32 + 1),
    ("qwen3_moe", "expert_fc1"): 2 * 3 * 32,
    ("qwen3_moe", "moe_act"): 2 * 3 * (48 + 24 + 24 + 1),  # FC1's output, silu, product, router weights
    ("llama", "core_attn"): 2 * (32 + 2 * 16 + 4) + 1,  # q, k, v, log-sum-exp; of both layers the documents
    ("llama", "attn_proj"): 0,  # attention saves its output too, so that it leaves with both names only
    ("llama", "core_attn,attn_proj"): 2 * (32 + 2 * 16 + 4 + 32) + 1,
}


@pytest.mark.parametrize(("family", "name"), GONE, ids=[name for _, name in GONE])
def test_what_leaves_is_what_was_counted(family: str, name: str) -> None:
    gone = left(family) - left(family, activation_offload=tuple(name.split(",")))
    # The first layer's input is the embedding's output, which lives on nowhere else; indices may stay as they are used.
    assert gone == pytest.approx(GONE[family, name], rel=0.02)


def test_what_fused_experts_keep_leaves_as_one() -> None:
    """FC1's output and the router weights, three experts a token in two layers; other readers keep their input too."""
    fused = left("qwen3_moe", expert_fusion=True)
    gone = {
        name: fused - left("qwen3_moe", expert_fusion=True, activation_offload=(name,))
        for name in ("fused_group_mlp", "expert_fc1", "moe_act")
    }
    assert gone == {"fused_group_mlp": 2 * 3 * (48 + 1), "expert_fc1": 0, "moe_act": 0}


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_what_fused_experts_keep_comes_back(family: str) -> None:
    plain = gradients(family, torch.float32, expert_fusion=True)
    moved = gradients(family, torch.float32, expert_fusion=True, activation_offload=("fused_group_mlp",))
    assert_same(moved, plain)


H200 = {"model": "qwen3-30b-a3b", "target": "threefold", "cluster.chip": "h200", "cluster.gpus": 8, "layout.ep": 8}
FUSED = {**H200, "knobs.expert_fusion": True}
AWAY = ["attn_norm", "expert_fc1", "moe_act", "fused_group_mlp"]
LEFT_OVER = [
    (H200, AWAY),
    (FUSED, ["attn_norm", "fused_group_mlp"]),
    ({**FUSED, "target": "megatron-bridge"}, AWAY),
    ({**FUSED, "cluster.chip": "a100"}, AWAY),  # no fused kernels
    ({**FUSED, "knobs.precision": "fp32"}, AWAY),
    ({**FUSED, "knobs.recompute": ["moe"]}, ["attn_norm"]),
    ({"model": "llama3-8b"}, ["attn_norm"]),
    ({"model": "llama3-8b", "knobs.recompute": ["full"]}, []),
]


@pytest.mark.parametrize(("fields", "left_over"), LEFT_OVER)
def test_names_that_move_nothing_are_told(fields: dict[str, Any], left_over: list[str]) -> None:
    plan = parse(fields, {"knobs.activation_offload": AWAY}).plan
    assert plan is not None
    fixes = [finding.fix for finding in check(plan) if finding.rule == "offload-of-what-is-kept"]
    assert fixes == ([] if left_over == AWAY else [{"knobs.activation_offload": left_over}])


def test_a_whole_layer_leaves() -> None:
    one_layer = left("llama", num_layers=3) - left("llama", num_layers=2)
    gone = left("llama", num_layers=3) - left("llama", num_layers=3, activation_offload_layers=2)
    # Both layers; their last output is the next one's input and stays.
    assert 2 * one_layer - 32 <= gone <= 2 * one_layer


def test_parameters_stay() -> None:
    model = make("qwen3_moe", torch.float64, activation_offload_layers=2)
    sent = []
    with pytest.MonkeyPatch.context() as patch:
        to_host = offload._copy_to_host
        patch.setattr(offload, "_copy_to_host", lambda x, name: sent.append(x) or to_host(x, name))
        forward(model).loss.backward()
    assert sent
    assert not {x.untyped_storage()._cdata for x in sent} & {p.untyped_storage()._cdata for p in model.parameters()}


def test_a_layer_is_on_its_way_when_the_one_behind_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, int]] = []
    order: list[int] = []
    layer_class = offload.OffloadedLayer
    prefetch, restore, init = layer_class.prefetch, layer_class.restore, layer_class.__init__

    def noted_init(self: Any, *args: Any) -> None:
        order.append(id(self))
        alive.append(self)
        init(self, *args)

    def noted_prefetch(self: Any) -> None:
        if self._copies:
            said.append(("fetch", order.index(id(self))))
        prefetch(self)

    def noted_restore(self: Any, *args: Any) -> Any:
        said.append(("back", order.index(id(self))))
        return restore(self, *args)

    alive: list[Any] = []
    monkeypatch.setattr(layer_class, "__init__", noted_init)
    monkeypatch.setattr(layer_class, "prefetch", noted_prefetch)
    monkeypatch.setattr(layer_class, "restore", noted_restore)
    out = forward(make("llama", torch.float32, num_layers=4, activation_offload=("attn_norm", "core_attn")))
    assert said == []
    out.loss.backward()
    assert [layer for what, layer in said if what == "fetch"] == [3, 2, 1, 0]
    for layer in (2, 1, 0):
        assert said.index(("back", layer + 1)) < said.index(("fetch", layer)) < said.index(("back", layer))


def test_a_rehearsal_holds_nothing_of_what_leaves() -> None:
    """Its tensors stand for a GPU's: the host's memory is not counted."""
    model = build_model(
        make("llama", torch.float64).spec, 0, torch.float64, options=Options(activation_offload_layers=2)
    )
    with pytest.MonkeyPatch.context() as patch, simulate("cuda"), LiveTensors() as living:
        patch.setattr(offload, "MIN_BYTES", 1)
        out = forward(model)
        stays = living.num_bytes
    del out
    assert stays / 8 / 32 < left("llama") / 2


# Optimizer states


def test_fraction_takes_whole_parameters() -> None:
    assert hosted.choose_offloaded([10, 40, 30, 20], 0.0) == set()
    assert hosted.choose_offloaded([10, 40, 30, 20], 1.0) == {0, 1, 2, 3}
    assert hosted.choose_offloaded([10, 40, 30, 20], 0.4) == {1}
    assert hosted.choose_offloaded([10, 40, 30, 20], 0.5) in ({1, 0}, {1, 2, 0}, {1, 3})
    for fraction in (0.1, 0.25, 0.5, 0.75):
        share = len(hosted.choose_offloaded([3] * 40, fraction)) / 40
        assert abs(share - fraction) <= 1 / 40
    assert hosted.choose_offloaded([], 0.5) == set()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("state_dtype", ["fp32", "bf16"])
def test_hosted_states_move_alike(dtype: torch.dtype, state_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Whole vectors of the CPU's kernel, so that its tail is the last piece's.
    monkeypatch.setattr(hosted, "MAX_CHUNK", 64)
    shapes = {"a": (33, 17), "b": (3, 8, 8), "c": (29,), "d_bias": (2, 5)}
    draw = torch.Generator().manual_seed(0)
    first = {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in shapes.items()}
    sides = [{name: value.clone().requires_grad_() for name, value in first.items()} for _ in range(3)]
    optimizers = [
        AdamW(side.items(), 0.1, state_dtype, offload=part) for side, part in zip(sides, (0, 0.5, 1), strict=True)
    ]
    assert [len(optimizer.offloaded) for optimizer in optimizers][::2] == [0, 4]
    for step in range(4):
        for name, shape in shapes.items():
            grad = torch.randn(shape, generator=draw).to(dtype)
            for side in sides:
                side[name].grad = None if (step, name) == (1, "b") else grad.clone()
        for optimizer in optimizers:
            optimizer.step(1e-2)
    wanted = optimizers[0].state_dict()
    for side, optimizer in zip(sides[1:], optimizers[1:], strict=True):
        assert_same(side, sides[0])
        assert_same(optimizer.state_dict(), wanted)
    loaded = AdamW(
        ((name, value.clone().requires_grad_()) for name, value in first.items()), 0.1, state_dtype, offload=1.0
    )
    loaded.load_state_dict(wanted)
    assert_same(loaded.state_dict(), wanted)


def test_a_plan_hosts_a_fraction() -> None:
    plan = case("", "qwen3_moe", 1).plan
    results = []
    for part in (0.0, 0.3, 1.0):
        parts = build(replace(plan, knobs=replace(plan.knobs, optimizer_offload=part)), with_data=False)
        sizes = {param.name: param.value.numel() for param in parts.optimizer.params}
        share = sum(sizes[name] for name in parts.optimizer.offloaded) / sum(sizes.values())
        assert share == pytest.approx(part, abs=max(sizes.values()) / sum(sizes.values()))
        for step in range(2):
            batches = [synthetic_batch(plan, step, m, 0) for m in range(plan.num_microbatches)]
            train_step(parts, batches, 1e-3, plan.job)
        parts.data.finish_param_sync()
        results.append(dict(parts.model.named_parameters()))
    for found in results[1:]:
        assert_same(found, results[0])


EVERYTHING = {"activation_offload": OFFLOAD_MODULES, "recompute": ("layernorm",)}
LAYOUTS = {
    "zero1": (case("", "qwen3_moe", 4, tp=2, ep=2, job=PACKED), EVERYTHING, False),
    "fsdp": (case("", "qwen3_moe", 2, ep=2, knobs=FSDP), {"activation_offload_layers": 1}, False),
    "pipeline": (case("", "gpt_oss", 2, pp=2, vpp=2, spec=FOUR), {**EVERYTHING, "activation_offload_layers": 1}, True),
    "zero-bubble": (case("", "mixtral", 2, pp=2, schedule="zero-bubble", spec=FOUR), EVERYTHING, True),
}


def with_hosted_states(plan: Plan) -> Plan:
    return replace(plan, knobs=replace(plan.knobs, optimizer_offload=0.5))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if slow else ()) for name, (_, _, slow) in LAYOUTS.items()]
)
def test_ranks_that_offload_are_one_rank_that_does_not(name: str) -> None:
    chosen, more, _ = LAYOUTS[name]
    plan = chosen.plan
    plain = replace(options_of(plan), expert_backend="loop")
    alone = run_one_rank(plan, 2, torch.float64, plain)
    options = replace(plain, **more)
    ranks = run_ranks(plan.layout.gpus, run_rank, with_hosted_states(plan), 2, torch.float64, options)
    found = compare_results(plan, alone, ranks)
    assert found.problems == ()
    assert found.largest <= 1e-10, found  # as in test_oracle.py: sums in another order, and AdamW's division
