"""A model in low precision: which products are, how near it trains, over ranks as on one, rows that travel in FP8."""

import math
import weakref
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from oracle_layouts import BASE, CASES, Case  # noqa: E402
from plans import build  # noqa: E402
from ranks import run_ranks  # noqa: E402
from tiny_models import FAMILIES, spec_of  # noqa: E402
from torch import nn  # noqa: E402

from threefold.engine.build import build as build_parts  # noqa: E402
from threefold.engine.build import options_of  # noqa: E402
from threefold.engine.dispatch.alltoall import AllToAllDispatcher  # noqa: E402
from threefold.engine.dispatch.narrow import pack, unpack  # noqa: E402
from threefold.engine.mesh import Mesh  # noqa: E402
from threefold.engine.models.build import build_model  # noqa: E402
from threefold.engine.moe.experts import Experts  # noqa: E402
from threefold.engine.options import Options  # noqa: E402
from threefold.engine.oracle import batch_of, compare  # noqa: E402
from threefold.engine.pipeline.delay import Delay  # noqa: E402
from threefold.engine.precision.experts import LowExperts  # noqa: E402
from threefold.engine.precision.linear import LowLinear, low_linear  # noqa: E402
from threefold.engine.precision.quantize import Cast, quantize  # noqa: E402
from threefold.engine.precision.recipes import RECIPES, Recipe  # noqa: E402
from threefold.engine.step import train_step  # noqa: E402
from threefold.layout.degrees import Layout  # noqa: E402


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
def test_gradients_of_weights_wait_with_what_they_need(name: str) -> None:
    """Rounded, a gradient is not kept as it came beside that; and what comes is what would have come at once."""
    weight, x = nn.Parameter(torch.randn(128, 256)), torch.randn(128, 256)
    grad_NO, delay, came = torch.randn(128, 128), Delay(), []
    (at_once,) = torch.autograd.grad(low_linear(x.clone().requires_grad_(), weight, RECIPES[name]), weight, grad_NO)
    with delay:
        y = low_linear(x.clone().requires_grad_(), weight, RECIPES[name])
        scaled = y * 1.0
        y.register_hook(lambda grad: came.append(weakref.ref(grad)))
        torch.autograd.backward(scaled, grad_NO)
    del y, scaled
    assert [there() for there in came] == [None]
    delay.finish()
    torch.testing.assert_close(weight.grad, at_once)


@pytest.mark.parametrize("family", PRODUCTS)
def test_which_products_are_low(family: str) -> None:
    model = build_model(spec_of(family), device="meta", options=Options(recipe=RECIPES["fp8-blockwise"]))
    low = {name for name, module in model.named_modules() if isinstance(module, LowLinear)}
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)} - low
    short = {name.partition("layers.")[2].partition(".")[2] for name in low}
    assert short == PRODUCTS[family]
    assert {name.rpartition(".")[2] for name in linear} <= {"head", "shared_gate", "ba", "join", "gate"}
    assert not [name for name in linear if "mixer" in name and not name.endswith("ba")]
    assert all(module.low is not None for module in model.modules() if isinstance(module, Experts))
    plain = build_model(spec_of(family), device="meta")
    assert [name for name, _ in plain.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert not any(isinstance(module, LowLinear) for module in plain.modules())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "name", ["fp8-blockwise", "fp8-rowwise", *(pytest.param(n, marks=pytest.mark.slow) for n in RECIPES)]
)
def test_a_model_trains_near_the_wide_one(family: str, name: str) -> None:
    """Two steps: the loss within two thousandths, and not the same. Where numbers are rounded by chance: over four
    sequences, so that it is not one's luck, and from each of four starts."""
    many = 4 if name == "nvfp4" else 1
    for seed in range(many):
        assert 0 < max(map(abs, _gaps(family, name, seed, many))) < 2e-3


def _gaps(family: str, name: str, seed: int, num_sequences: int) -> list[float]:
    losses = {}
    for precision in ("fp32", name):
        fields = {**BASE, "knobs.precision": precision, "job.seed": seed}
        fields |= {"job.micro_batch": num_sequences, "job.global_batch": num_sequences}
        plan = replace(build(fields), model=spec_of(family))
        parts = build_parts(plan, dtype=torch.float32, with_data=False)
        batches = [batch_of(plan, 0, 0, 0)]
        losses[precision] = [train_step(parts, batches, 1e-3, plan.job).loss for _ in range(2)]
    return [low / wide - 1 for wide, low in zip(*losses.values(), strict=True)]


def small(recipe: Recipe, block: int = 4, turned: bool = True) -> Recipe:
    """With short blocks, so that the cuts of tiny models hold whole ones."""

    def cut(cast: Cast) -> Cast:
        return replace(cast, block=tuple(1 if b == 1 else block for b in cast.block), stochastic=False)

    sides = [cut(cast) for cast in (recipe.input, recipe.weight, recipe.grad)]
    turn = [cut(cast) for cast in (recipe.input_t, recipe.grad_t) if cast] if turned else [None, None]
    return Recipe(recipe.name, *sides, *turn)


# Sums in another order move numbers by 1e-15; one that lies between two of e4m3 then makes a step, which is small where
# the number is. A key head that two ranks hold alike would be rounded in parts, so that none has such.
EXACT = 1e-5
DENSE = ["tp pp", "cp", "dp tp", "hsdp"]
EXPERTS = ["dp tp ep edp", "tp pp vpp etp", "fsdp tp ep etp", "ep over cp, pipeline", "tp cp", "recompute of modules"]


def compared(name: str, recipe: Recipe) -> Any:
    [case] = [case for case in CASES if case.name == name]
    # Vocabularies and widths that are odd on purpose would have blocks on two ranks.
    plan = replace(case, spec={k: v for k, v in case.spec.items() if k != "odd"}).plan
    options = replace(
        options_of(plan), recipe=recipe, keep_low=plan.knobs.data_parallel == "zero1", expert_backend="loop"
    )
    found = compare(plan, steps=1, options=options)
    assert found.problems == ()
    assert found.near_ties == 0
    return found


@pytest.mark.parametrize(
    "name", [DENSE[0], DENSE[1], *(pytest.param(name, marks=pytest.mark.slow) for name in DENSE[2:])]
)
def test_layouts_round_as_one_rank(name: str) -> None:
    """All three products: whole blocks on every rank, along widths and along tokens."""
    found = compared(name, small(RECIPES["fp8-blockwise"]))
    assert max(found.loss, found.norm, found.gradient) <= EXACT


@pytest.mark.parametrize("name", [EXPERTS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in EXPERTS[1:])])
def test_layouts_with_experts_round_as_one_rank(name: str) -> None:
    """Rows of an expert come in another order from several ranks: weight gradients in blocks of rows are left out."""
    found = compared(name, small(RECIPES["fp8-blockwise"], turned=False))
    assert max(found.loss, found.norm, found.gradient) <= EXACT


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_layouts_differ_by_rounding_at_most(recipe: str) -> None:
    """The recipes as they are, on widths shorter than their blocks: other blocks, so other rounding, no worse."""
    found = compared("dp tp ep edp", RECIPES[recipe])
    assert found.loss < 3e-3
    assert found.norm < {"nvfp4": 0.2}.get(recipe, 0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_travel_in_eight_bits_and_come_out_rounded(dtype: Any) -> None:
    x_SD = torch.randn(50, 256, dtype=dtype) * torch.rand(50, 1).mul(20).exp2().to(dtype)
    packed = pack(x_SD)
    assert (packed.dtype, packed.shape) == (torch.uint8, (50, 256 + 2))
    assert torch.equal(unpack(packed, dtype), quantize(x_SD, RECIPES["fp8-blockwise"].input).wide(dtype))
    assert pack(x_SD[:0]).shape == (0, 258)
    x_SD[3, 7] = math.inf
    assert not bool(unpack(pack(x_SD), dtype)[3].isfinite().all())


def _dispatch(rank: int, narrow: bool) -> tuple[Any, ...]:
    mesh = Mesh(Layout(gpus=2, ep=2), rank)
    dispatcher = AllToAllDispatcher(4, mesh.group("ep"), narrow=narrow)
    draw = torch.Generator().manual_seed(rank)
    x_TD = torch.randn(9, 256, generator=draw).requires_grad_()
    expert_TK = torch.rand(9, 4, generator=draw).topk(2).indices
    weight_TK = torch.rand(9, 2, generator=draw)
    x_RD, _, count_e, ticket = dispatcher.dispatch(x_TD, expert_TK, weight_TK)
    y_TD = dispatcher.combine(x_RD * 3.0, ticket)
    y_TD.backward(torch.ones_like(y_TD))
    return x_RD.detach(), count_e, y_TD.detach(), x_TD.grad


def test_rounding_before_the_exchange_is_rounding_behind_it() -> None:
    plain, narrow = run_ranks(2, _dispatch, False), run_ranks(2, _dispatch, True)
    for (x_RD, count_e, _, grad), (x8_RD, count8_e, _, grad8) in zip(plain, narrow, strict=True):
        assert torch.equal(count_e, count8_e)
        assert torch.equal(x8_RD, quantize(x_RD, RECIPES["fp8-blockwise"].input).wide())
        assert torch.equal(grad, grad8)  # gradients travel as they are


def test_experts_get_the_bits_they_would_have_made() -> None:
    """Rounded for the way in the blocks that experts round in: the layout's forward and gradients are one rank's."""
    case = Case("fp8 rows", "qwen3_moe", {"gpus": 2, "ep": 2}, spec={"hidden_size": 128})
    plan = replace(case, knobs={"precision": "fp8-blockwise", "fp8_dispatch": True}).plan
    recipe = RECIPES["fp8-blockwise"]
    # The products of weight gradients read rows in the same blocks, so that rounding them twice is rounding them once.
    recipe = replace(recipe, input_t=recipe.input, grad_t=recipe.grad)
    found = compare(plan, steps=1, options=replace(options_of(plan), recipe=recipe, expert_backend="loop"))
    assert (found.problems, found.near_ties) == ((), 0)
    assert max(found.loss, found.norm, found.gradient) <= EXACT, found.worst


@pytest.mark.parametrize("name", ["fp8-blockwise", "fp8-rowwise"])
def test_fused_experts_are_those_one_by_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' plain reference in their place. Weights that do not stay are made again, and the same."""
    experts = Experts(4, 64, 128)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.1)
    x_RD, weight_R = torch.randn(50, 64, requires_grad=True), torch.rand(50, requires_grad=True)
    count_E, grad = torch.tensor([10, 0, 30, 10]), torch.randn(50, 64)

    def run(keep: bool, fuses: bool) -> tuple[Any, ...]:
        monkeypatch.setattr(LowExperts, "fuses", lambda *given, **named: fuses)
        experts.low = LowExperts(RECIPES[name], keep)
        y_RD = experts(x_RD, weight_R, count_E)
        return (y_RD, *torch.autograd.grad(y_RD, (x_RD, weight_R, experts.gate_up, experts.down), grad))

    fused, again, each = run(True, True), run(False, True), run(True, False)
    assert all(torch.equal(one, other) for one, other in zip(fused, again, strict=True))
    # The reference rounds what is between its products to bf16, which moves some numbers by a step of e4m3.
    gaps = [(one - other).norm() / other.norm() for one, other in zip(fused, each, strict=True)]
    assert 0 < max(gaps) < 0.04
