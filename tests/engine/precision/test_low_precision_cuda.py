"""Low precision by the device's kernels: quantized values as emulated bit for bit, GEMMs up to rounding.

Without a GPU the quantization kernels run in triton's interpreter, on whole numbers, because it rounds to FP8 otherwise
than a GPU does.

Shapes: M rows, K columns, T tokens, I and O dims in and out.
"""

import importlib.util
import math
import os
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from threefold.engine.autograd.delayed_wgrad import WgradQueue
from threefold.engine.dispatch.fp8_rows import pack_fp8, unpack_fp8
from threefold.engine.dispatch.rows import sort_by_expert
from threefold.engine.moe.experts import Experts
from threefold.engine.precision import low_precision_linear as linear
from threefold.engine.precision.low_precision_experts import LowPrecisionExperts
from threefold.engine.precision.low_precision_linear import low_precision_linear
from threefold.engine.precision.quantize import Quantized, quantize
from threefold.engine.precision.recipes import RECIPES
from threefold.engine.precision.scaled_mm_backends import EMULATED, choose_backend
from threefold.engine.precision.weight_cache import WeightCache

HAS_TRITON = importlib.util.find_spec("triton") is not None
HAS_HOPPER = HAS_TRITON and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BLOCKWISE = RECIPES["fp8-blockwise"]
NATIVE = ["fp8-blockwise", "fp8-rowwise", "fp8-cs"]
ROUNDED = 2e-3  # relative to the norm: both sides round their result to bf16, by half of 2 ** -8 at most


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


def same(found: Quantized, wanted: Quantized) -> bool:
    rows, columns = wanted.scales.shape
    return torch.equal(found.scales[:rows, :columns], wanted.scales) and torch.equal(
        found.dequantize(), wanted.dequantize()
    )


def check_blockwise(x_MK: Any) -> None:
    """Compare all quantized layouts of one matrix with emulation."""
    from threefold.engine.precision.scaled_mm_backends import BlockwiseBackend

    kernels = BlockwiseBackend()
    rows, squares = kernels.quantize_both(x_MK, BLOCKWISE.input, BLOCKWISE.input_t)
    again, transposed = kernels.quantize_both(x_MK, BLOCKWISE.grad, BLOCKWISE.grad_t)
    assert same(rows, quantize(x_MK, BLOCKWISE.input))
    assert same(squares, quantize(x_MK.T, BLOCKWISE.input_t))
    assert same(again, rows)
    assert same(transposed, quantize(x_MK.T, BLOCKWISE.grad_t))
    assert same(kernels.quantize_rows(x_MK, BLOCKWISE.input), rows)
    assert same(kernels.quantize_transposed(x_MK, BLOCKWISE.input_t), squares)
    assert same(kernels.quantize_transposed(x_MK, BLOCKWISE.grad_t), transposed)
    for made, wanted in zip(kernels.quantize_weight(x_MK, BLOCKWISE.weight), (x_MK, x_MK.T), strict=True):
        assert same(made, quantize(wanted, BLOCKWISE.weight))
    check_joined(x_MK)
    # The padding behind the last column or row is zeros, because GEMMs sum over it.
    for made in (rows, transposed, squares):
        assert not made.values[:, made.shape[1] :].to(torch.float32).any()


def check_joined(x_MK: Any) -> None:
    """Matrices quantized side by side are the quantized whole, cut where a block ends."""
    from threefold.engine.precision.scaled_mm_backends import BlockwiseBackend

    kernels = BlockwiseBackend()
    rows, transposed = kernels.quantize_joined(x_MK.split(128, dim=1), BLOCKWISE.grad, BLOCKWISE.grad_t)
    assert rows is not None
    assert transposed is not None
    assert same(rows, quantize(x_MK, BLOCKWISE.grad))
    assert same(transposed, quantize(x_MK.T, BLOCKWISE.grad_t))
    made, parts = kernels.quantize_weights(x_MK.split(128), BLOCKWISE.weight), x_MK.split(128)
    assert made.is_joined == (len(parts) > 1)
    assert same(made.transposed[0], quantize(x_MK.T, BLOCKWISE.weight))
    for one, part in zip(made.forward, parts, strict=True):
        assert same(one, quantize(part, BLOCKWISE.weight))
    for one in (rows, transposed, *made.transposed):
        assert not one.values[:, one.shape[1] :].to(torch.float32).any()


@pytest.mark.usefixtures("poisoned")
@pytest.mark.skipif(not INTERPRETED, reason="run by test_interpreter.py")
@pytest.mark.parametrize("shape", [(130, 140), (128, 256), (7, 300)])
def test_interpreted(shape: tuple[int, int]) -> None:
    """The numbers are exact in e4m3 under the scale of any block: 112 is a quarter of its largest number."""
    x_MK = torch.randint(-7, 8, shape).float() * torch.tensor([0.5, 1.0, 16.0])[torch.randint(3, shape)]
    x_MK[:, ::12] = 112.0
    x_MK[3] = 0.0
    check_blockwise(x_MK)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.skipif(not (INTERPRETED or HAS_HOPPER), reason="needs a Hopper GPU or test_interpreter.py")
@pytest.mark.parametrize(
    "power", [-93, -128, -138, *(pytest.param(power, marks=pytest.mark.slow) for power in (-97, -131, -135))]
)
def test_interpreted_numbers_as_small_as_can_be(power: int) -> None:
    """The amax gives a weight its smallest scale, less than that, about 1e-36, 1e-37 and 1e-38, and a subnormal."""
    x_MK = 448 * 2.0**power * 0.5 ** torch.randint(3, (130, 140))
    check_blockwise(x_MK.cuda() if HAS_HOPPER else x_MK)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("shape", [(512, 384), (128, 128), (1000, 576), (16, 16), (1, 2048), (333, 72)])
def test_blocks_are_rounded_as_emulated(shape: tuple[int, int]) -> None:
    x_MK = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    x_MK *= torch.randint(-40, 12, (shape[0], 1), device="cuda").to(torch.float32).exp2().to(torch.bfloat16)
    x_MK[:, :4] *= 100
    x_MK[0] = 0.0
    x_MK[-1, -1] = 448.0
    check_blockwise(x_MK)
    check_blockwise(x_MK[:, : shape[1] // 2])  # rows that are not contiguous with each other


@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("sizes", [(512, 384, 576), (4096, 2048, 768), (16, 16, 16), (144, 7168, 128)])
def test_gemms_are_the_emulated_ones(name: str, sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    T, I, O = sizes  # noqa: E741
    new = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(T, I, **new).mul_(torch.rand(T, 1, **new).mul_(8).exp2_()).requires_grad_()
    weight, grad = torch.randn(O, I, **new).requires_grad_(), torch.randn(T, O, **new)
    found = []
    for backend in (choose_backend(RECIPES[name], x, [weight]), EMULATED):
        monkeypatch.setattr(linear, "choose_backend", lambda *given, backend=backend: backend)
        y = low_precision_linear(x, weight, RECIPES[name])
        found.append((y, *torch.autograd.grad(y, (x, weight), grad)))
    assert choose_backend(RECIPES[name], x, [weight]) is not EMULATED
    for native, emulated in zip(*found, strict=True):
        assert float((native - emulated).float().norm() / emulated.float().norm()) < ROUNDED


@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("heights", [(512, 128, 128), (256, 576), (192, 64)])
def test_layers_that_share_an_input_are_the_emulated_ones(
    heights: tuple[int, ...], delayed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Joined where every height but the last holds whole blocks; gradients of weights at once or from a queue.

    Emulation rounds the input's gradient of each layer to bf16, and every sum of them; the kernels round once.
    """
    new = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(512, 384, **new).requires_grad_()
    weights = [torch.randn(height, 384, **new).requires_grad_() for height in heights]
    grads = [torch.randn(512, height, **new) for height in heights]
    found = []
    for backend in (choose_backend(BLOCKWISE, x, weights), EMULATED):
        monkeypatch.setattr(linear, "choose_backend", lambda *given, backend=backend: backend)
        layers = [(weight, linear.LinearPrecision(BLOCKWISE, WeightCache())) for weight in weights]
        queue = WgradQueue()
        with queue if delayed else nullcontext():
            outs = linear.low_precision_linears(x, layers)
        torch.autograd.backward(outs, grads)
        queue.finish()
        found.append((x.grad, *outs, *(weight.grad for weight in weights)))
        x.grad = None
        for weight in weights:
            weight.grad = None
    for n, (native, emulated) in enumerate(zip(*found, strict=True)):
        error = float((native - emulated).float().norm() / emulated.float().norm())
        assert error < (ROUNDED if n else 2 * ROUNDED)


@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("name", NATIVE)
def test_long_sums_hold(name: str) -> None:
    """A sum of 32,768 numbers of one sign: with 14 bits the error would be a hundred times as large."""
    x = torch.rand(128, 32_768, device="cuda", dtype=torch.bfloat16)
    weight = torch.rand(128, 32_768, device="cuda", dtype=torch.bfloat16)
    recipe = RECIPES[name]
    exact = quantize(x, recipe.input).dequantize().double() @ quantize(weight, recipe.weight).dequantize().double().T
    found = low_precision_linear(x, weight, recipe).double()
    assert float(((found - exact) / exact).mean().abs()) < 1e-3


@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_infinities_and_nan_stay_visible(name: str, bad: float) -> None:
    x, weight = (torch.randn(size, 256, device="cuda", dtype=torch.bfloat16) for size in (64, 128))
    x[3, 5] = bad
    y = low_precision_linear(x, weight, RECIPES[name])
    assert not bool(y[3].isfinite().any())
    assert name == "fp8-cs" or bool(y[:3].isfinite().all())


@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("name", ["fp8-blockwise", "fp8-rowwise"])
def test_fused_experts_match_experts_one_by_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = Experts(8, 256, 128).to("cuda", torch.bfloat16)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.06)
    experts.low_precision = LowPrecisionExperts(RECIPES[name])
    count_E = torch.tensor([100, 0, 128, 1, 300, 17, 400, 54], device="cuda")
    x_RD = torch.randn(1000, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight_R = torch.rand(1000, device="cuda", requires_grad=True)
    grad = torch.randn(1000, 256, device="cuda", dtype=torch.bfloat16)

    def run() -> tuple[Any, ...]:
        y_RD = experts(x_RD, weight_R, count_E)
        return (y_RD, *torch.autograd.grad(y_RD, (x_RD, weight_R, experts.gate_up, experts.down), grad))

    assert experts.fuses(x_RD)
    fused = run()
    monkeypatch.setattr(LowPrecisionExperts, "can_fuse", lambda *given, **named: False)
    # Run one by one, experts round the activation to bf16 first, which moves a few numbers by a step of e4m3.
    for found, wanted in zip(fused, run(), strict=True):
        assert float((found - wanted).float().norm() / wanted.float().norm()) < 0.02


@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
def test_fp8_rows_are_packed_as_emulated() -> None:
    x_SD = torch.randn(77, 512, device="cuda", dtype=torch.bfloat16)
    rows = [sort_by_expert(torch.arange(77, device=device)[:, None], 77)[0] for device in ("cuda", "cpu")]
    packed, found = pack_fp8(x_SD, rows[0]), torch.empty_like(x_SD)
    assert torch.equal(packed.cpu(), pack_fp8(x_SD.cpu(), rows[1]))
    unpack_fp8(packed, found)
    assert torch.equal(found, quantize(x_SD, BLOCKWISE.input).dequantize(torch.bfloat16))
