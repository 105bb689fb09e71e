"""The output layer in low precision (`knobs.fp8_output`), emulated: against fp32, by hand, and over layouts.

Shapes: T tokens, D model dim, V vocabulary.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle_layouts import BASE, FOUR, FSDP, MTP1, TIED, Case, case
from plans import build
from tiny_models import spec_of

from threefold.engine.build import build as build_parts
from threefold.engine.build import options_of
from threefold.engine.layers.cross_entropy import IGNORE, cross_entropy_sum, reference
from threefold.engine.layers.head_gemms import HeadPrecision
from threefold.engine.precision.emulated_backend import EmulatedBackend
from threefold.engine.precision.quantize import QuantSpec, quantize
from threefold.engine.precision.recipes import RECIPES, Recipe
from threefold.engine.precision.weight_cache import WeightCache
from threefold.engine.step import train_step
from threefold.engine.verify.oracle import compare_with_one_rank, synthetic_batch

RECIPE, ROWS = RECIPES["fp8-blockwise"], RECIPES["fp8-rowwise"]
EIGHT_BITS = ["fp8-blockwise", "fp8-rowwise", "fp8-cs", "mxfp8"]


def precision(recipe: Recipe = RECIPE, logits: Recipe | None = None) -> HeadPrecision:
    return HeadPrecision(recipe, WeightCache(), logits=logits)


def drawn(num_tokens: int = 300, dim: int = 256, vocab: int = 1000) -> tuple[Any, Any, Any]:
    draw = torch.Generator().manual_seed(0)
    x_TD = torch.randn(num_tokens, dim, generator=draw).requires_grad_()
    weight_VD = (0.05 * torch.randn(vocab, dim, generator=draw)).requires_grad_()
    labels_T = torch.randint(vocab, (num_tokens,), generator=draw)
    labels_T[::7] = IGNORE
    return x_TD, weight_VD, labels_T


def gap(found: Any, wanted: Any) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("name", EIGHT_BITS)
def test_loss_and_gradients_are_near_fp32(name: str, softcap: float | None) -> None:
    """e4m3 has three bits behind the point and e5m2 two: an element is off by 2.6 % or 5 % in the mean."""
    x_TD, weight_VD, labels_T = drawn()
    wanted = reference(x_TD, weight_VD, labels_T, softcap)
    found = cross_entropy_sum(x_TD, weight_VD, labels_T, None, None, softcap, precision(RECIPES[name]))
    assert found.item() == pytest.approx(wanted.item(), rel=1e-3)
    of_both = [torch.autograd.grad(loss, (x_TD, weight_VD)) for loss in (found, wanted)]
    gaps = [gap(low, wide) for low, wide in zip(*of_both, strict=True)]
    assert min(gaps) > 0
    assert max(gaps) < 0.05
    assert not of_both[0][0][::7].any()  # ignored tokens


def test_gradients_are_those_of_quantized_matrices() -> None:
    """Every matrix is rounded once, from the numbers that the step before made: logits, softmax, both gradients."""
    x_TD, weight_VD, labels_T = drawn(256)
    found = cross_entropy_sum(x_TD, weight_VD, labels_T, 128, None, None, precision(RECIPE, ROWS))
    x_grad, weight_grad = torch.autograd.grad(found, (x_TD, weight_VD))
    x_8, weight_8 = (quantize(given.detach(), ROWS.weight).dequantize() for given in (x_TD, weight_VD))
    logits_TV = (x_8 @ weight_8.T).requires_grad_()
    loss = torch.nn.functional.cross_entropy(logits_TV, labels_T, ignore_index=IGNORE, reduction="sum")
    assert found.item() == pytest.approx(loss.item(), rel=1e-6)
    (grad_TV,) = torch.autograd.grad(loss, logits_TV)
    assert RECIPE.input_t is not None
    assert RECIPE.grad_t is not None
    columns_VT, x_DT = quantize(grad_TV.T, RECIPE.grad_t), quantize(x_TD.detach().T, RECIPE.input_t)
    weight_DV = quantize(weight_VD.detach().T, replace(RECIPE.weight, scale="power"))
    # A softmax whose last bit differs may round to the neighbor in e4m3, one number of thousands.
    assert gap(x_grad, quantize(grad_TV, RECIPE.grad).dequantize() @ weight_DV.dequantize().T) < 1e-3
    assert gap(weight_grad, columns_VT.dequantize() @ x_DT.dequantize().T) < 1e-3


def test_small_probabilities_survive_in_blocks() -> None:
    """At the start of a training all probabilities of 150,000 tokens are near 7e-6, beside gradients of -1: blocks have
    scales for both, one scale a row has not. So the recipe with scales a row takes blocks in the head."""
    grad_TV = torch.full((4, 151_936), 1 / 151_936)
    grad_TV[:, 5] -= 1
    in_blocks, in_rows = (quantize(grad_TV, RECIPES[name].grad).dequantize() for name in EIGHT_BITS[:2])
    away = slice(128, None)
    assert gap(in_blocks[:, away], grad_TV[:, away]) < 0.04
    assert gap(in_rows[:, away], grad_TV[:, away]) > 0.3
    plan = build({**BASE, "knobs.precision": "fp8-rowwise", "knobs.fp8_output": True})
    parts = build_parts(replace(plan, model=spec_of("llama")), with_data=False)
    assert parts.model.head_precision.recipe is RECIPE
    assert parts.model.head_precision.logits is ROWS


@pytest.mark.parametrize("frozen", ["head", "rest"])
def test_only_the_gradients_that_are_wanted_are_made(frozen: str) -> None:
    x_TD, weight_VD, labels_T = drawn(64, 32, 96)
    left, right = (x_TD, weight_VD.detach()) if frozen == "head" else (x_TD.detach(), weight_VD)
    wanted = torch.autograd.grad(
        cross_entropy_sum(x_TD, weight_VD, labels_T, precision=precision()), (x_TD, weight_VD)
    )[frozen == "rest"]
    cross_entropy_sum(left, right, labels_T, precision=precision()).backward()
    trained = x_TD if frozen == "head" else weight_VD
    assert torch.equal(trained.grad, wanted)
    with torch.no_grad():
        assert cross_entropy_sum(x_TD, weight_VD, labels_T, precision=precision()).isfinite()


def test_weight_gradients_in_the_dtype_of_the_weight() -> None:
    """A recipe may leave weight gradients alone."""
    x_TD, weight_VD, labels_T = drawn(256)
    recipe = replace(RECIPE, input_t=None, grad_t=None)
    loss = cross_entropy_sum(x_TD, weight_VD, labels_T, 128, None, None, precision(recipe))
    wide = torch.autograd.grad(reference(x_TD, weight_VD, labels_T), weight_VD)
    assert gap(*torch.autograd.grad(loss, weight_VD), *wide) < 0.03


def test_the_weight_is_quantized_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two microbatches and two MTP depths share the head, whose embedding is tied."""
    plan = build({**BASE, "job.micro_batch": 2, "knobs.precision": "fp8-blockwise", "knobs.fp8_output": True})
    plan = replace(plan, model=spec_of("deepseek_v3", num_nextn_predict_layers=2, tie_word_embeddings=True))
    parts = build_parts(plan, dtype=torch.float32, with_data=False)
    head, seen = parts.model.head_weight, []
    plain = EmulatedBackend.quantize_rows

    def quantize_rows(self: EmulatedBackend, x_MK: Any, spec: QuantSpec) -> Any:
        seen.extend([spec] if x_MK.data_ptr() == head.data_ptr() else [])
        return plain(self, x_MK, spec)

    monkeypatch.setattr(EmulatedBackend, "quantize_rows", quantize_rows)
    batches = [synthetic_batch(plan, 0, m, 0) for m in range(plan.num_microbatches)]
    losses = [train_step(parts, batches, 1e-3, plan.job).loss for _ in range(2)]
    assert len(batches) == 2
    assert seen.count(ROWS.weight) == 2
    assert losses[1] < losses[0]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_model_trains_near_the_fp32_one_with_its_head(family: str) -> None:
    """After three steps the loss is within two thousandths of the same run in fp32."""
    losses = {}
    for name, output in (("fp32", False), ("fp8-blockwise", False), ("fp8-blockwise", True)):
        plan = build({**BASE, "knobs.precision": name, "knobs.fp8_output": output})
        plan = replace(plan, model=spec_of(family))
        parts = build_parts(plan, dtype=torch.float32, with_data=False)
        batches = [synthetic_batch(plan, 0, 0, 0)]
        losses[name, output] = [train_step(parts, batches, 1e-3, plan.job).loss for _ in range(3)]
    wide, without, with_head = losses.values()
    assert with_head != without
    assert with_head == pytest.approx(wide, rel=2e-3)


def small() -> Recipe:
    """Blocks of four, so that the shards of tiny models hold whole blocks."""

    def cut(spec: QuantSpec | None) -> QuantSpec:
        assert spec is not None
        return replace(spec, block=(1 if spec.block[0] == 1 else 4, 4))

    return Recipe(
        RECIPE.name, *(cut(getattr(RECIPE, side)) for side in ("input", "weight", "grad", "input_t", "grad_t"))
    )


WHOLE = {"vocab_size": 64}
LAYOUTS = [
    case("tp pp", "llama", 4, tp=2, pp=2, spec=WHOLE),
    case("tp, mtp, tied", "deepseek_v3", 2, tp=2, spec={**WHOLE, **MTP1, **TIED, "kv_lora_rank": 16, "v_head_dim": 8}),
    case("dp tp, vpp", "qwen3", 4, tp=2, pp=2, vpp=2, spec={**WHOLE, **FOUR}),
    case("fsdp tp", "llama", 4, tp=2, knobs=FSDP, spec=WHOLE),
]


@pytest.mark.parametrize(
    "layout",
    [*LAYOUTS[:2], *(pytest.param(one, marks=pytest.mark.slow) for one in LAYOUTS[2:])],
    ids=lambda one: one.name,
)
def test_layouts_round_the_head_as_one_rank(layout: Case) -> None:
    """Gradients parameter by parameter. Sums in another order move numbers by 1e-15, and few to another of e4m3."""
    plan = layout.plan
    options = replace(options_of(plan), recipe=small(), fp8_output=True, expert_backend="loop")
    options = replace(options, cache_quantized_weights=plan.knobs.data_parallel == "zero1")
    found = compare_with_one_rank(plan, steps=1, options=options)
    assert found.problems == ()
    assert max(found.loss, found.norm, found.gradient) <= 1e-5, found.worst


def test_a_rank_without_rows_of_the_vocabulary() -> None:
    """Blocks of 128 are longer than the shards: other blocks round otherwise, but not worse."""
    plan = case("tp", "llama", 4, tp=4, spec={"vocab_size": 9}).plan
    options = replace(options_of(plan), recipe=RECIPE, fp8_output=True)
    found = compare_with_one_rank(plan, steps=1, options=options)
    assert found.problems == ()
    assert found.loss < 3e-3
    assert found.norm < 0.05
