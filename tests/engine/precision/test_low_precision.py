"""Low precision: formats against all their values, GEMMs against fp64, what is saved, how often weights are quantized.

Shapes: M rows, K columns, T tokens, I and O dims in and out.
"""

import math
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from threefold.engine.autograd.delayed_wgrad import WgradQueue
from threefold.engine.autograd.recompute import recompute_output
from threefold.engine.precision import low_precision_linear as linear
from threefold.engine.precision.emulated_backend import EmulatedBackend, QuantizedWeights
from threefold.engine.precision.float_formats import E2M1, E4M3, E5M2, decode, encode, next_power_of_two
from threefold.engine.precision.low_precision_linear import (
    LinearPrecision,
    LowPrecisionLinear,
    low_precision_linear,
    low_precision_linears,
)
from threefold.engine.precision.quantize import (
    HADAMARD_SIZE,
    QuantSpec,
    hadamard_matrix,
    hadamard_transform,
    quantize,
)
from threefold.engine.precision.recipes import RECIPES
from threefold.engine.precision.scaled_mm_backends import swizzle_scales
from threefold.engine.precision.weight_cache import WeightCache, mark_weights_changed

FORMATS = {"e4m3": E4M3, "e5m2": E5M2, "e2m1": E2M1}
SIDES = ("input", "weight", "grad", "input_t", "grad_t")
_NAMED = {f"{recipe.name} {side}": getattr(recipe, side) for recipe in RECIPES.values() for side in SIDES}
SPECS = {name: spec for spec, name in {spec: name for name, spec in reversed(_NAMED.items())}.items()}


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def all_values(name: str) -> list[float]:
    """The numbers >= 0 of a format in order of their codes, decoded by hand from sign, exponent and mantissa."""
    exponent_bits, mantissa_bits, bias = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15), "e2m1": (2, 1, 1)}[name]
    # The largest codes of e4m3 and e5m2 are not-a-number or infinity.
    codes = {"e4m3": 0x7F, "e5m2": 0x7C, "e2m1": 8}[name]
    found = []
    for code in range(codes):
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        whole = 1.0 if exponent else 0.0
        found.append((whole + mantissa / 2**mantissa_bits) * 2.0 ** (max(exponent, 1) - bias))
    assert exponent_bits + mantissa_bits + 1 in (8, 4)
    return found


def nearest_of(values: list[float], x: float) -> float:
    """To the nearest number; ties to the even code; nothing above the largest."""
    size = min(abs(x), values[-1])
    best = min(range(len(values)), key=lambda code: (abs(values[code] - size), code % 2))
    return math.copysign(values[best], x)


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_is_to_the_nearest_of_all_values(name: str) -> None:
    form, values = FORMATS[name], all_values(name)
    assert values[-1] == form.max_value
    middles = [(a + b) / 2 for a, b in pairwise(values)]
    near = [value * factor for value in (*values, *middles) for factor in (1 - 2**-20, 1.0, 1 + 2**-20)]
    given = torch.tensor([*near, form.max_value * 4, *torch.randn(300).tolist(), *(torch.randn(300) * 50).tolist()])
    given = torch.cat([given, -given])
    wanted = torch.tensor([nearest_of(values, x) for x in given.tolist()])
    assert torch.equal(form.round_nearest(given), wanted)
    assert torch.equal(decode(encode(given, form), form, len(given)), wanted)


@pytest.mark.parametrize("name", FORMATS)
def test_every_value_of_the_format_survives_encoding(name: str) -> None:
    form = FORMATS[name]
    values = torch.tensor(all_values(name))
    values = torch.cat([values, -values])
    assert torch.equal(decode(encode(values, form), form, len(values)), values)
    assert torch.equal(form.round_stochastic(values), values)  # nothing to choose


@pytest.mark.parametrize("name", FORMATS)
def test_stochastic_rounding_has_the_right_mean(name: str) -> None:
    form, draws = FORMATS[name], 40_000
    values = all_values(name)
    for low, block_rows, part in ((values[1], values[2], 0.3), (values[3], values[4], 0.75), (0.0, values[1], 0.1)):
        x = low + part * (block_rows - low)
        rounded = form.round_stochastic(torch.full((draws,), x))
        assert set(rounded.unique().tolist()) <= {low, block_rows}
        spread = (block_rows - low) * math.sqrt(part * (1 - part) / draws)
        assert abs(float(rounded.double().mean()) - x) < 5 * spread  # five standard deviations


def test_next_power_of_two() -> None:
    given = [1.0, 1.0001, 2.0, 3.0, 0.75, 2.0**-20, 448.0]
    assert next_power_of_two(torch.tensor(given)).tolist() == [1.0, 2.0, 2.0, 4.0, 1.0, 2.0**-20, 512.0]


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("shape", [(20, 300), (129, 40), (1, 16), (3, 5), (0, 64), (7, 0)])
def test_quantized_is_near_and_has_the_scales_of_its_spec(name: str, shape: tuple[int, int]) -> None:
    spec = SPECS[name]
    x_MK = torch.randn(shape) * torch.logspace(-4, 4, max(1, shape[1]))[: shape[1]]
    made = quantize(x_MK, spec)
    wanted = hadamard_transform(x_MK) if spec.hadamard else x_MK
    assert made.dequantize().shape == wanted.shape
    if not x_MK.numel():
        return
    scales = made.scales.float() * (1.0 if made.global_scale is None else made.global_scale)
    if spec.scale in ("power", "e8m0"):
        assert torch.equal(torch.frexp(scales)[0], torch.full_like(scales, 0.5))
    # Each block is checked by hand: the scale that its amax needs, and the error of each number.
    block_rows, wide = (block or size for block, size in zip(spec.block, wanted.shape, strict=True))
    step = {"e4m3": 2**-4, "e5m2": 2**-3, "e2m1": 2**-2}[spec.format.name] * (2 if spec.stochastic else 1)
    for m in range(0, wanted.shape[0], block_rows):
        for k in range(0, wanted.shape[1], wide):
            block, scale = wanted[m : m + block_rows, k : k + wide], float(scales[m // block_rows, k // wide])
            needed = float(block.abs().max()) / spec.format.max_value
            if spec.scale == "fp32":
                assert scale == pytest.approx(needed, rel=1e-6)
            elif spec.scale == "e4m3":  # the scale is rounded itself, and never to zero
                assert scale == pytest.approx(
                    max(needed, float(made.global_scale) * 2**-9), rel=2**-4, abs=float(made.global_scale) * 2**-10
                )
            else:
                assert needed <= scale < 2 * needed or scale == 2.0**-126
            smallest = scale * 2.0 ** (spec.format.min_exponent - spec.format.mantissa_bits)
            off = (made.dequantize()[m : m + block_rows, k : k + wide] - block).abs()
            cut = (block.abs() - spec.format.max_value * scale).clamp(
                min=0
            )  # saturated where the scale itself was rounded down
            assert bool((off <= step * block.abs() + smallest + cut).all())


@pytest.mark.parametrize("name", ["fp8-blockwise input", "fp8-blockwise input_t", "mxfp8 input"])
def test_quantizing_twice_changes_nothing(name: str) -> None:
    """With power-of-two scales bf16 represents the quantized numbers exactly; quantizing them again keeps all bits."""
    x_MK = torch.randn(130, 384) * torch.rand(130, 1).exp2()
    once = quantize(x_MK, SPECS[name])
    assert torch.equal(once.dequantize(torch.bfloat16).float(), once.dequantize())
    assert torch.equal(quantize(once.dequantize(torch.bfloat16), SPECS[name]).dequantize(), once.dequantize())


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_infinities_and_nan_stay_visible(name: str, bad: float) -> None:
    x_MK = torch.randn(20, 256)
    x_MK[3, 5] = bad
    wide = quantize(x_MK, SPECS[name]).dequantize()
    assert not bool(wide[3].isfinite().all())
    if SPECS[name].block[0] == 1 and SPECS[name].scale != "e4m3":
        assert bool(wide[4:].isfinite().all())


@pytest.mark.parametrize("name", SPECS)
def test_zeros_and_the_smallest_numbers(name: str) -> None:
    spec = SPECS[name]
    assert not quantize(torch.zeros(5, 64), spec).dequantize().any()
    tiny = torch.full((5, 64), 1e-42)
    assert bool(quantize(tiny, spec).dequantize().isfinite().all())


def test_hadamard_is_orthogonal_and_cancels() -> None:
    matrix = torch.tensor(hadamard_matrix(), dtype=torch.float64)
    assert matrix.shape == (HADAMARD_SIZE, HADAMARD_SIZE)
    assert torch.allclose(matrix @ matrix.T, torch.eye(HADAMARD_SIZE, dtype=torch.float64), atol=1e-15)
    assert set(matrix.abs().unique().tolist()) == {0.25}
    assert len({tuple(row) for row in hadamard_matrix()}) == HADAMARD_SIZE
    a, b = torch.randn(6, 40, dtype=torch.float64), torch.randn(9, 40, dtype=torch.float64)
    assert torch.allclose(hadamard_transform(a) @ hadamard_transform(b).T, a @ b.T, atol=1e-12)
    spike = torch.zeros(1, HADAMARD_SIZE)
    spike[0, 3] = 8.0
    assert hadamard_transform(spike).abs().tolist() == [[2.0] * HADAMARD_SIZE]


def test_scales_are_ordered_as_blackwell_reads_them() -> None:
    """cuBLAS: inside a tile of 128 x 4, row r and column c are number (r % 32) * 16 + (r // 32) * 4 + c."""
    scales = torch.arange(130 * 5).remainder(251).to(torch.uint8).view(130, 5).view(torch.float8_e4m3fn)
    flat, plain = swizzle_scales(scales).view(torch.uint8), scales.view(torch.uint8)
    assert flat.numel() == 256 * 8
    for r, c in ((0, 0), (1, 0), (33, 2), (127, 3), (128, 4), (129, 1)):
        tile = r // 128 * 2 + c // 4
        assert int(flat[tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4]) == int(plain[r, c])


def near(found: Any, wanted: Any) -> float:
    return float(((found - wanted).norm() / wanted.norm()).detach())


# Relative error of a GEMM of normal numbers: two roundings of a quarter of a step each; more if stochastic.
NOISE = {"fp8-blockwise": 0.045, "fp8-rowwise": 0.045, "fp8-cs": 0.08, "mxfp8": 0.045, "nvfp4": 0.25}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("sizes", [(64, 256, 128), (37, 200, 24), (1, 3, 5)])
def test_three_gemms_of_a_layer(name: str, sizes: tuple[int, int, int]) -> None:
    """They are near the fp64 results, and exactly the product of their quantized sides."""
    recipe, (T, I, O) = RECIPES[name], sizes  # noqa: E741
    x, weight = torch.randn(T, I, requires_grad=True), torch.randn(O, I, requires_grad=True)
    grad = torch.randn(T, O)
    y = low_precision_linear(x, weight, recipe)
    x_grad, weight_grad = torch.autograd.grad(y, (x, weight), grad)
    wide = [value.detach().double() for value in (x, weight, grad)]
    if T > 1:
        for found, wanted in (
            (y, wide[0] @ wide[1].T),
            (x_grad, wide[2] @ wide[1]),
            (weight_grad, wide[2].T @ wide[0]),
        ):
            assert near(found, wanted) < NOISE[name]
    exact = (
        quantize(x.detach(), recipe.input).dequantize().double()
        @ quantize(weight.detach(), recipe.weight).dequantize().double().T
    )
    assert torch.allclose(y.double(), exact, rtol=1e-5, atol=1e-4 * float(exact.abs().max()))  # summed in fp32
    if name != "nvfp4":  # its gradients are rounded stochastically
        transposed = quantize(weight.detach().T, recipe.weight).dequantize().double()
        exact = quantize(grad, recipe.grad).dequantize().double() @ transposed.T
        assert torch.allclose(x_grad.double(), exact, rtol=1e-5, atol=1e-4 * float(exact.abs().max()))
        assert recipe.grad_t is not None
        assert recipe.input_t is not None
        exact = (
            quantize(grad.T, recipe.grad_t).dequantize().double()
            @ quantize(x.detach().T, recipe.input_t).dequantize().double().T
        )
        assert torch.allclose(weight_grad.double(), exact, rtol=1e-5, atol=1e-4 * float(exact.abs().max()))


def test_sums_are_taken_in_fp32() -> None:
    """The sum of 32,768 equal numbers would stop growing at 256 in bf16."""
    x, weight = torch.full((2, 32_768), 1.0, dtype=torch.bfloat16), torch.full((3, 32_768), 0.5, dtype=torch.bfloat16)
    assert low_precision_linear(x, weight, RECIPES["fp8-blockwise"]).tolist() == [[16_384.0] * 3] * 2


def test_stochastic_gradients_are_right_on_average() -> None:
    recipe = RECIPES["nvfp4"]
    x, weight = torch.randn(32, 64, requires_grad=True), torch.randn(16, 64)
    y, grad = low_precision_linear(x, weight, recipe), torch.randn(32, 16)
    mean = torch.stack([torch.autograd.grad(y, x, grad, retain_graph=True)[0] for _ in range(200)]).mean(0)
    exact = grad @ quantize(weight, recipe.weight).dequantize()
    assert near(mean, exact) < 0.02  # one draw is off by 0.12, the mean of 200 by a fourteenth of that


def test_layers_that_share_an_input_save_it_once_in_eight_bits() -> None:
    recipe = RECIPES["fp8-blockwise"]
    plain = [nn.Linear(256, 128, bias=False, dtype=torch.bfloat16) for _ in range(3)]
    layers = [LowPrecisionLinear(linear, recipe) for linear in plain]
    saved: list[Any] = []

    def keep(tensor: Any) -> Any:
        saved.append(tensor)
        return tensor

    x = torch.randn(2, 64, 256, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        low_precision_linears(x, [(low.weight, low.precision) for low in layers])
    mine = [t for t in saved if not isinstance(t, nn.Parameter)]
    assert sorted(str(t.dtype) for t in mine) == ["torch.float32", "torch.float8_e4m3fn"]
    assert (
        sum(t.numel() * t.element_size() for t in mine) == 128 * 256 + 4 * 2
    )  # values, and a scale for each 128 x 128


def test_a_recomputed_input_is_not_saved() -> None:
    recipe, norm = RECIPES["fp8-blockwise"], nn.LayerNorm(256)
    layer = LowPrecisionLinear(nn.Linear(256, 128, bias=False), recipe)
    results = []
    for on in (False, True):
        x = torch.randn(40, 256, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with recompute_output(norm, x, enabled=on) as y:
            out = layer(y)
        layer.weight.grad = None
        out.square().sum().backward()
        results.append((out.detach(), x.grad, layer.weight.grad))
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


def test_weights_are_quantized_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = EmulatedBackend.quantize_weight
    monkeypatch.setattr(EmulatedBackend, "quantize_weight", lambda self, *given: made.append(1) or real(self, *given))
    layer = LowPrecisionLinear(nn.Linear(32, 16), RECIPES["mxfp8"])
    x = torch.randn(4, 32, requires_grad=True)
    for _ in range(3):  # microbatches, forward and backward
        layer(x).sum().backward()
    assert len(made) == 1
    before = layer(x)
    with torch.no_grad():
        layer.weight.mul_(2.0)  # autograd counts this write
    assert not torch.equal(layer(x), before)
    assert len(made) == 2
    layer.weight.data.copy_(layer.weight.data * 2)  # autograd does not count this write
    mark_weights_changed()
    layer(x)
    assert len(made) == 3
    layer.precision.cache.enabled = False
    layer(x).sum().backward()
    assert len(made) == 5


class JoiningBackend(EmulatedBackend):
    """Emulation that joins the weights of layers with one input, as the kernels of Hopper do."""

    def quantize_weights(self, weights: Any, spec: QuantSpec) -> QuantizedWeights:
        made = super().quantize_weights(weights, spec)
        return QuantizedWeights(made.forward, (quantize(torch.cat(list(weights)).T, spec),))


@pytest.mark.parametrize("frozen", [(), (1,), (0, 1, 2)])
@pytest.mark.parametrize("delayed", [False, True])
def test_a_joined_backward_is_that_of_each_layer(
    frozen: tuple[int, ...], delayed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heights that hold whole blocks, so that the same numbers share a scale; fp32 sums in another order."""
    x = torch.randn(160, 256, requires_grad=True)
    heights, recipe = (256, 128, 72), RECIPES["fp8-blockwise"]
    weights = [torch.randn(height, 256, requires_grad=n not in frozen) for n, height in enumerate(heights)]
    grads = [torch.randn(160, height) for height in heights]
    found = []
    for backend in (JoiningBackend(), EmulatedBackend()):
        monkeypatch.setattr(linear, "choose_backend", lambda *given, backend=backend: backend)
        layers = [(weight, LinearPrecision(recipe, WeightCache())) for weight in weights]
        queue = WgradQueue()
        with queue if delayed else nullcontext():
            outs = low_precision_linears(x, layers)
        torch.autograd.backward(outs, grads)
        queue.finish()
        found.append([*outs, *(tensor.grad for tensor in (x, *weights))])
        for tensor in (x, *weights):
            tensor.grad = None
    for joined, each in zip(*found, strict=True):
        assert (joined is None) == (each is None)
        if joined is not None:
            torch.testing.assert_close(joined, each, atol=2e-4, rtol=0)  # sums of 456 products up to 16, 2 ** -24 each
