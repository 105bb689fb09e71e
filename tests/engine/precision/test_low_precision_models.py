"""Models in low precision: which GEMMs are replaced, losses, layouts against one rank, FP8 dispatch."""

import math
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle_layouts import BASE, CASES, Case
from plans import build
from tiny_models import FAMILIES, spec_of
from torch import nn

from threefold.engine.autograd.delayed_wgrad import WgradQueue
from threefold.engine.build import build as build_parts
from threefold.engine.build import options_of
from threefold.engine.dispatch.alltoall import AllToAllDispatcher
from threefold.engine.dispatch.fp8_rows import pack_fp8, unpack_fp8
from threefold.engine.dispatch.rows import sort_by_expert
from threefold.engine.dist.mesh import Mesh
from threefold.engine.model_options import Options
from threefold.engine.models.build import build_model
from threefold.engine.moe.experts import Experts
from threefold.engine.precision.low_precision_experts import LowPrecisionExperts
from threefold.engine.precision.low_precision_linear import LowPrecisionLinear, low_precision_linear
from threefold.engine.precision.quantize import QuantSpec, quantize
from threefold.engine.precision.recipes import RECIPES, Recipe
from threefold.engine.step import train_step
from threefold.engine.verify.forked_ranks import run_ranks
from threefold.engine.verify.oracle import compare_with_one_rank, synthetic_batch
from threefold.layout.degrees import Layout


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


PRODUCTS = {
    "llama": {"mixer.q", "mixer.k", "mixer.v", "mixer.out", "ffn.gate", "ffn.up", "ffn.down"},
    "deepseek_v3": {
        *("mixer.q_down", "mixer.q_up", "mixer.kv_down", "mixer.kv_up", "mixer.out"),
        *("ffn.gate", "ffn.up", "ffn.down", "ffn.shared.gate", "ffn.shared.up", "ffn.shared.down"),
    },
    "qwen3_next": {
        *("mixer.qkvz", "mixer.q", "mixer.k", "mixer.v", "mixer.out"),
        *("ffn.shared.gate", "ffn.shared.up", "ffn.shared.down"),
    },
}


@pytest.mark.parametrize("name", ["fp8-blockwise", "fp8-cs"])
def test_delayed_wgrad_holds_only_the_quantized_gradient(name: str) -> None:
    """The unquantized output gradient is freed, and the delayed weight gradient equals the immediate one."""
    weight, x = nn.Parameter(torch.randn(128, 256)), torch.randn(128, 256)
    grad_NO, delay, came = torch.randn(128, 128), WgradQueue(), []
    (at_once,) = torch.autograd.grad(
        low_precision_linear(x.clone().requires_grad_(), weight, RECIPES[name]), weight, grad_NO
    )
    with delay:
        y = low_precision_linear(x.clone().requires_grad_(), weight, RECIPES[name])
        scaled = y * 1.0
        y.register_hook(lambda grad: came.append(weakref.ref(grad)))
        torch.autograd.backward(scaled, grad_NO)
    del y, scaled
    assert [there() for there in came] == [None]
    delay.finish()
    torch.testing.assert_close(weight.grad, at_once)


@pytest.mark.parametrize("family", PRODUCTS)
def test_which_gemms_are_in_low_precision(family: str) -> None:
    model = build_model(spec_of(family), device="meta", options=Options(recipe=RECIPES["fp8-blockwise"]))
    low = {name for name, module in model.named_modules() if isinstance(module, LowPrecisionLinear)}
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)} - low
    short = {name.partition("layers.")[2].partition(".")[2] for name in low}
    assert short == PRODUCTS[family]
    assert {name.rpartition(".")[2] for name in linear} <= {"head", "shared_gate", "ba", "join", "gate"}
    assert not [name for name in linear if "mixer" in name and not name.endswith("ba")]
    assert all(module.low_precision is not None for module in model.modules() if isinstance(module, Experts))
    plain = build_model(spec_of(family), device="meta")
    assert [name for name, _ in plain.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert not any(isinstance(module, LowPrecisionLinear) for module in plain.modules())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "name", ["fp8-blockwise", "fp8-rowwise", *(pytest.param(n, marks=pytest.mark.slow) for n in RECIPES)]
)
def test_a_model_trains_near_the_fp32_one(family: str, name: str) -> None:
    """After two steps the loss is within two thousandths, and not the same. With stochastic rounding the mean is taken
    over four sequences, from each of four seeds.

    NVFP4 costs Nemotron-H more, all of it in its Mamba layers: the norm inside of them makes their output large from
    the first step on, so that the loss falls twice as far in a step as in other families, and the rounding of their
    projections takes a seventh of that fall. NVFP4 written anew in plain torch, for the projections of its mixers
    alone, lost 0.0035 to 0.0068 from six seeds; the engine loses 0.0037 to 0.0069 from eight.
    """
    many = 4 if name == "nvfp4" else 1
    bound = 1e-2 if (family, name) == ("nemotron_h", "nvfp4") else 2e-3
    for seed in range(many):
        assert 0 < max(map(abs, _gaps(family, name, seed, many))) < bound


def _gaps(family: str, name: str, seed: int, num_sequences: int) -> list[float]:
    losses = {}
    for precision in ("fp32", name):
        fields = {**BASE, "knobs.precision": precision, "job.seed": seed}
        fields |= {"job.micro_batch": num_sequences, "job.global_batch": num_sequences}
        plan = replace(build(fields), model=spec_of(family))
        parts = build_parts(plan, dtype=torch.float32, with_data=False)
        batches = [synthetic_batch(plan, 0, 0, 0)]
        losses[precision] = [train_step(parts, batches, 1e-3, plan.job).loss for _ in range(2)]
    return [low / wide - 1 for wide, low in zip(*losses.values(), strict=True)]


def small(recipe: Recipe, block: int = 4, turned: bool = True) -> Recipe:
    """The recipe with short blocks, so that the shards of tiny models hold whole blocks."""

    def cut(spec: QuantSpec) -> QuantSpec:
        return replace(spec, block=tuple(1 if b == 1 else block for b in spec.block), stochastic=False)

    sides = [cut(spec) for spec in (recipe.input, recipe.weight, recipe.grad)]
    turn = [cut(spec) for spec in (recipe.input_t, recipe.grad_t) if spec] if turned else [None, None]
    return Recipe(recipe.name, *sides, *turn)


# Sums in another order move numbers by 1e-15. A number between two of e4m3 may then round to the other one, a small
# step where the number is small. A key head replicated on two ranks would be quantized in parts, so no case has one.
EXACT = 1e-5
DENSE = ["tp pp", "cp", "dp tp", "hsdp"]
EXPERTS = ["dp tp ep edp", "tp pp vpp etp", "fsdp tp ep etp", "ep over cp, pipeline", "tp cp", "recompute of modules"]


def compared(name: str, recipe: Recipe) -> Any:
    [case] = [case for case in CASES if case.name == name]
    # Vocabularies and widths that are odd on purpose would have blocks that span two ranks.
    plan = replace(case, spec={k: v for k, v in case.spec.items() if k != "odd"}).plan
    options = replace(
        options_of(plan),
        recipe=recipe,
        cache_quantized_weights=plan.knobs.data_parallel == "zero1",
        expert_backend="loop",
    )
    found = compare_with_one_rank(plan, steps=1, options=options)
    assert found.problems == ()
    assert found.near_ties == 0
    return found


@pytest.mark.parametrize(
    "name", [DENSE[0], DENSE[1], *(pytest.param(name, marks=pytest.mark.slow) for name in DENSE[2:])]
)
def test_layouts_round_as_one_rank(name: str) -> None:
    """All three GEMMs have whole blocks on every rank, along widths and along tokens."""
    found = compared(name, small(RECIPES["fp8-blockwise"]))
    assert max(found.loss, found.norm, found.gradient) <= EXACT


@pytest.mark.parametrize("name", [EXPERTS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in EXPERTS[1:])])
def test_layouts_with_experts_round_as_one_rank(name: str) -> None:
    """Weight gradients in blocks of rows are left out: rows of an expert come in another order from several ranks."""
    found = compared(name, small(RECIPES["fp8-blockwise"], turned=False))
    assert max(found.loss, found.norm, found.gradient) <= EXACT


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_layouts_differ_by_rounding_at_most(recipe: str) -> None:
    """The unchanged recipes on widths shorter than their blocks: other blocks round otherwise, but not worse."""
    found = compared("dp tp ep edp", RECIPES[recipe])
    assert found.loss < 3e-3
    assert found.norm < {"nvfp4": 0.2}.get(recipe, 0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_packed_rows_have_eight_bits_and_come_out_quantized(dtype: Any) -> None:
    x_SD = torch.randn(50, 256, dtype=dtype) * torch.rand(50, 1).mul(20).exp2().to(dtype)
    rows, _ = sort_by_expert(torch.randint(4, (50, 1)).sort(dim=0).values, 4)  # in the order of the tokens
    found, packed = torch.empty_like(x_SD), pack_fp8(x_SD, rows)
    assert (packed.dtype, packed.shape) == (torch.uint8, (50, 256 + 2))
    unpack_fp8(packed, found)
    assert torch.equal(found, quantize(x_SD, RECIPES["fp8-blockwise"].input).dequantize(dtype))
    assert pack_fp8(x_SD[:0], sort_by_expert(torch.zeros(0, 2).long(), 4)[0]).shape == (0, 258)
    x_SD[3, 7] = math.inf
    unpack_fp8(pack_fp8(x_SD, rows), found)
    assert not bool(found[3].isfinite().all())


def _dispatch(rank: int, fp8_rows: bool) -> tuple[Any, ...]:
    mesh = Mesh(Layout(gpus=2, ep=2), rank)
    dispatcher = AllToAllDispatcher(4, mesh.group("ep"), fp8_rows=fp8_rows)
    draw = torch.Generator().manual_seed(rank)
    x_TD = torch.randn(9, 256, generator=draw).requires_grad_()
    expert_TK = torch.rand(9, 4, generator=draw).topk(2).indices
    weight_TK = torch.rand(9, 2, generator=draw)
    x_RD, _, count_e, _, state = dispatcher.dispatch(x_TD, expert_TK, weight_TK)
    y_TD = dispatcher.combine(x_RD * 3.0, state)
    y_TD.backward(torch.ones_like(y_TD))
    return x_RD.detach(), count_e, y_TD.detach(), x_TD.grad


def test_quantizing_before_the_exchange_equals_quantizing_after_it() -> None:
    plain, quantized = run_ranks(2, _dispatch, False), run_ranks(2, _dispatch, True)
    for (x_RD, count_e, _, grad), (fp8_RD, fp8_count_e, _, fp8_grad) in zip(plain, quantized, strict=True):
        assert torch.equal(count_e, fp8_count_e)
        assert torch.equal(fp8_RD, quantize(x_RD, RECIPES["fp8-blockwise"].input).dequantize())
        assert torch.equal(grad, fp8_grad)  # gradients travel unquantized


def test_fp8_dispatch_gives_experts_the_same_bits() -> None:
    """Dispatch quantizes in the blocks of the experts, so forward and gradients of the layout are those of one rank."""
    case = Case("fp8 rows", "qwen3_moe", {"gpus": 2, "ep": 2}, spec={"hidden_size": 128})
    plan = replace(case, knobs={"precision": "fp8-blockwise", "fp8_dispatch": True}).plan
    recipe = RECIPES["fp8-blockwise"]
    # Weight-gradient GEMMs read rows in the same blocks, so that quantizing twice equals quantizing once.
    recipe = replace(recipe, input_t=recipe.input, grad_t=recipe.grad)
    found = compare_with_one_rank(
        plan, steps=1, options=replace(options_of(plan), recipe=recipe, expert_backend="loop")
    )
    assert (found.problems, found.near_ties) == ((), 0)
    assert max(found.loss, found.norm, found.gradient) <= EXACT, found.worst


@pytest.mark.parametrize("name", ["fp8-blockwise", "fp8-rowwise"])
def test_fused_experts_match_experts_one_by_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference steps stand in for the kernels. Weights that are not cached are quantized to the same bits."""
    experts = Experts(4, 64, 128)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.1)
    x_RD, weight_R = torch.randn(50, 64, requires_grad=True), torch.rand(50, requires_grad=True)
    count_E, grad = torch.tensor([10, 0, 30, 10]), torch.randn(50, 64)

    def run(keep: bool, fuses: bool) -> tuple[Any, ...]:
        monkeypatch.setattr(LowPrecisionExperts, "can_fuse", lambda *given, **named: fuses)
        experts.low_precision = LowPrecisionExperts(RECIPES[name], keep)
        y_RD = experts(x_RD, weight_R, count_E)
        return (y_RD, *torch.autograd.grad(y_RD, (x_RD, weight_R, experts.gate_up, experts.down), grad))

    fused, again, each = run(True, True), run(False, True), run(True, False)
    assert all(torch.equal(one, other) for one, other in zip(fused, again, strict=True))
    # The reference rounds the activation between its GEMMs to bf16, which moves some numbers by a step of e4m3.
    gaps = [(one - other).norm() / other.norm() for one, other in zip(fused, each, strict=True)]
    assert 0 < max(gaps) < 0.04
