"""The FP8 experts: quantized values, the reference steps, and the kernels.

Quantized values are compared with all numbers of the format; the reference steps with exact arithmetic and fp64; the
kernels with the reference steps, bit for bit where sums are exact and closely where they are not. Without a GPU the
kernels run in triton's interpreter, on whole numbers, because it rounds to FP8 otherwise than a GPU does.

Shapes: T tokens, K experts of a token, R rows, D model dim, E experts, H expert dim, X = 2 H.
"""

import importlib.util
import math
import os
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from gluon_compile import blocks, compile_for_hopper, gluon_known

from threefold.engine.autograd.delayed_wgrad import WgradQueue
from threefold.engine.autograd.main_grad import attach_main_grad
from threefold.engine.kernels.experts.fused_experts import fused_experts, grouped_experts
from threefold.engine.kernels.experts.sorted_rows import sort_rows
from threefold.engine.kernels.fp8 import reference_steps as reference
from threefold.engine.kernels.fp8.fused_experts import (
    fp8_experts,
    fp8_experts_of_tokens,
    quantize_weights,
    supports_sizes,
)

HAS_TRITON = importlib.util.find_spec("triton") is not None
HAS_HOPPER = HAS_TRITON and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if HAS_HOPPER else "cpu"
RECIPES = ["blockwise", "rowwise"]
LOADS = {
    "spread": [130, 61, 128],
    "empty experts": [0, 140, 0, 33, 0],
    "one takes all": [0, 0, 300],
    "few": [9, 1, 35],
}
# A value in e4m3 is off by up to 1/16 of itself, 2.6 % in the mean; a product of two by 3.7 %, and two GEMMs with an
# activation between them by about 7 %.
NEAR = 0.1


pytestmark = pytest.mark.usefixtures("one_thread")


def far(found: Any, expected: Any) -> float:
    """The distance over the length of `expected`; nan where a value is nan."""
    found, expected = found.detach().double(), expected.detach().double()
    length = expected.norm()
    return float((found - expected).norm() / length if length else found.norm())


def made(counts: list[int], dim: int, half: int, device: str = "cpu") -> list[Any]:
    """The inputs x_RD, weight_R, gate_up_EXD and down_EDH, and the output gradient slope_RD."""

    def of(*sizes: int) -> Any:
        return torch.randn(*sizes, device=device, dtype=torch.bfloat16)

    rows = sum(counts)
    # Rows differ in magnitude, as tokens do.
    x_RD = (of(rows, dim) * torch.rand(rows, 1, device=device).exp()).to(torch.bfloat16)
    up, down = of(len(counts), 2 * half, dim) * dim**-0.5, of(len(counts), dim, half) * half**-0.5
    inputs = [x_RD, torch.rand(rows, device=device), up, down]
    return [tensor.detach().requires_grad_() for tensor in inputs] + [of(rows, dim)]


def gradients(y: Any, inputs: list[Any], slope: Any) -> list[Any]:
    return [y, *torch.autograd.grad(y, inputs, slope)]


def near(found: list[Any], expected: list[Any]) -> None:
    for at, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.shape == other.shape
        # The gradient of a router weight is one sum with terms of both signs, so its relative error is larger.
        assert far(one, other) < (2 * NEAR if at == 2 else NEAR)


def exact(counts: list[int], inputs: list[Any], slope: Any, clamped: bool = False) -> list[Any]:
    """The gradients of the engine's bf16 experts, computed in fp64."""
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    kind = "clamped swiglu" if clamped else "silu"
    y_RD = grouped_experts(wide[0], wide[1], torch.tensor(counts, device=slope.device), *wide[2:], activation=kind)
    return gradients(y_RD, wide, slope.double())


def all_e4m3() -> Any:
    """Every finite number of the format, from its definition: 4 bits of exponent (bias 7), 3 of fraction, one NaN."""
    found = []
    for code in range(127):
        exponent, fraction = code >> 3, code & 7
        found.append((1 + fraction / 8) * 2.0 ** (exponent - 7) if exponent else fraction / 8 * 2.0**-6)
    return torch.tensor(found, dtype=torch.float64)


def nearest_e4m3(x: Any) -> Any:
    """The nearest number of the format; of two equally near, the one whose code is even."""
    known = all_e4m3()
    off = (x.abs().double()[..., None] - known).abs()
    best = off.min(dim=-1, keepdim=True).values
    code = torch.arange(127)
    choice = torch.where(off == best, code + 1000 * (code % 2), 10**6).min(dim=-1).indices
    return known[choice] * x.double().sign()


@pytest.mark.parametrize("scale", [1.0, 1e-30, 3e4, 2.0**-140])
def test_rows_have_the_smallest_power_of_two_that_fits_and_the_nearest_values(scale: float) -> None:
    x_RK = (torch.randn(7, 300) * torch.rand(7, 300).exp2() * scale).float()
    fp8_rows = reference.quantize_rows(x_RK)
    assert fp8_rows.scale_CR.shape == (3, 7)
    for row, x in enumerate(x_RK):
        for block, part in enumerate(x.split(128)):
            by = float(fp8_rows.scale_CR[block, row])
            assert torch.frexp(torch.tensor(by)).mantissa == 0.5  # a power of two
            top = float(part.abs().max()) / by
            assert top <= 448
            assert top > 224 or by == 2.0**-126  # the smallest that is normal
            stored = fp8_rows.value_RK[row, block * 128 : (block + 1) * 128].double()
            assert torch.equal(stored, nearest_e4m3(part / by))


def test_blocks_of_zeros_stay_zeros_and_infinities_show() -> None:
    x_RK = torch.zeros(3, 256)
    x_RK[1, 130], x_RK[2, 5] = torch.inf, torch.nan
    fp8_rows = reference.quantize_rows(x_RK)
    wide = reference.dequantize_rows(fp8_rows)
    assert (fp8_rows.scale_CR[:, 0] == 1).all()
    assert (wide[0] == 0).all()
    assert not wide[1, 130].isfinite()
    assert wide[2, 5].isnan()
    assert (wide[2, 128:] == 0).all()


def test_weights_in_squares_are_the_same_numbers_both_ways() -> None:
    weight = torch.randn(2, 200, 300) * torch.rand(2, 200, 300).exp2()
    weight_fp8 = reference.quantize_weight(weight)
    assert weight_fp8.scale.shape == (2, 2, 3)
    assert torch.equal(weight_fp8.transposed_EIO, weight_fp8.value_EOI.mT)
    for e, o, i in [(0, 0, 0), (1, 1, 2), (1, 0, 1)]:
        part = weight[e, o * 128 : (o + 1) * 128, i * 128 : (i + 1) * 128]
        by = float(weight_fp8.scale[e, o, i])
        assert by == pytest.approx(float(part.abs().max()) / 448, rel=1e-6)
        stored = weight_fp8.value_EOI[e, o * 128 : (o + 1) * 128, i * 128 : (i + 1) * 128].double()
        assert torch.equal(stored, nearest_e4m3(part / by))
    transposed = reference.dequantize_weight(weight_fp8.transposed_EIO, weight_fp8.transposed_scale)
    assert torch.equal(transposed, reference.dequantize_weight(weight_fp8.value_EOI, weight_fp8.scale).mT)


@pytest.mark.parametrize("size", [1.0, 1e-28, 1e-36, 1e-37, 1e-38, 1e-42])
def test_the_precision_recipes_say_the_same(size: float) -> None:
    """engine/precision emulates FP8 for every device with its own code; both must produce the same numbers."""
    recipes = pytest.importorskip("threefold.engine.precision.recipes")
    quantize = pytest.importorskip("threefold.engine.precision.quantize").quantize
    x_RK = torch.randn(200, 256) * torch.rand(200, 1).exp2() * size
    for name, mine in [("fp8-blockwise", reference.quantize_rows), ("fp8-rowwise", reference.quantize_rows_rowwise)]:
        theirs, fp8_rows = quantize(x_RK, recipes.RECIPES[name].input), mine(x_RK)
        assert torch.equal(fp8_rows.scale_CR.T, theirs.scales)
        assert torch.equal(reference.dequantize_rows(fp8_rows), theirs.dequantize())
    weight_fp8 = reference.quantize_weight(x_RK[None])
    theirs = quantize(x_RK, recipes.RECIPES["fp8-blockwise"].weight)
    assert torch.equal(weight_fp8.scale[0], theirs.scales)
    assert torch.equal(reference.dequantize_weight(weight_fp8.value_EOI, weight_fp8.scale)[0], theirs.dequantize())


# 448 times a power of two: the smallest scale, a smaller one, about 1e-36, 1e-37 and 1e-38, a subnormal; and zero.
TINY = [*(448 * 2.0**power for power in (-93, -97, -128, -131, -135, -138)), 0.0]


@pytest.mark.parametrize("top", TINY)
def test_numbers_as_small_as_can_be_have_a_scale(top: float) -> None:
    """The scale is 2**-93 at least, and the values are the nearest under that scale."""
    by = max(top / 448, 2.0**-93) if top else 1.0
    x_RK = torch.rand(3, 256).mul(2).sub(1) * top
    x_RK[:, ::128] = top
    fp8_rows, weight_fp8 = reference.quantize_rows_rowwise(x_RK), reference.quantize_weight(x_RK[None])
    for value, scale in ((fp8_rows.value_RK, fp8_rows.scale_CR), (weight_fp8.value_EOI[0], weight_fp8.scale)):
        assert (scale == by).all()
        assert torch.equal(value.double(), nearest_e4m3(x_RK / by))


def test_columns_stay_within_an_expert_and_are_filled_up_by_zeros() -> None:
    counts = [130, 0, 60]
    x_RK = torch.randn(190, 24) + 3
    steps = reference.BlockwiseReferenceSteps(torch.tensor(counts).cumsum(0), 190, False)
    fp8_columns = steps.quantize_columns(x_RK, square=False)
    assert fp8_columns.value_KP.shape == (24, 4 * 128)  # 190 // 128 + 3 blocks hold any loads of the experts
    wide_PK = reference.dequantize_columns(fp8_columns)
    assert far(wide_PK[:130], x_RK[:130]) < 0.04  # one rounding
    assert far(wide_PK[256:316], x_RK[130:]) < 0.04
    assert (wide_PK[130:256] == 0).all()
    assert (wide_PK[316:384] == 0).all()
    assert torch.equal(fp8_columns.scale[2], reference.power_of_two_scale(x_RK[130:].abs().amax(dim=0))[0])


def test_columns_in_squares_share_a_scale() -> None:
    x_RK = torch.randn(190, 200) * torch.rand(200).mul(3).exp()
    steps = reference.BlockwiseReferenceSteps(torch.tensor([130, 60]).cumsum(0), 190, False)
    fp8_columns = steps.quantize_columns(x_RK, square=True)
    assert fp8_columns.scale.shape == (3, 2)
    for block, rows in enumerate([x_RK[:128], x_RK[128:130], x_RK[130:]]):
        for square, part in enumerate(rows.split(128, dim=1)):
            by = float(fp8_columns.scale[block, square])
            assert 224 < float(part.abs().max()) / by <= 448
            stored = fp8_columns.value_KP[square * 128 : square * 128 + part.shape[1], block * 128 :][:, : len(part)]
            assert torch.equal(stored.T.double(), nearest_e4m3(part / by))


def whole(*sizes: int) -> Any:
    """Whole numbers that FP8 represents exactly under any of their scales."""
    return torch.randint(-7, 8, sizes).to(torch.bfloat16)


@pytest.mark.parametrize("kind", [reference.BlockwiseReferenceSteps, reference.RowwiseReferenceSteps])
@pytest.mark.parametrize("counts", LOADS.values(), ids=LOADS)
def test_reference_gemms_of_whole_numbers_are_exact(counts: list[int], kind: Any) -> None:
    """Nothing is rounded, so the result depends only on scales and indices, and int64 gives the expected numbers."""
    rows, ends_E = sum(counts), torch.tensor(counts).cumsum(0)
    x_RK, y_RN, weight = whole(rows, 144), whole(rows, 160), whole(len(counts), 160, 144)
    if kind is reference.RowwiseReferenceSteps:  # its scales are fp32 numbers: rows of one magnitude make them 1
        x_RK, weight = x_RK.sign() * 448, weight.sign() * 448
    steps = kind(ends_E, rows, False)
    quantize = (
        reference.quantize_weight if kind is reference.BlockwiseReferenceSteps else reference.quantize_weight_rowwise
    )
    weight_fp8 = quantize(weight)
    fp8_rows, fp8_columns = steps.quantize(x_RK, None, True, square=True)
    found = steps.grouped_gemm(fp8_rows, weight_fp8.value_EOI, weight_fp8.scale)
    owner_R = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    expected = torch.einsum("rk,rnk->rn", x_RK.long(), weight.long()[owner_R])
    assert torch.equal(found, expected.to(torch.bfloat16))
    grad = steps.wgrad(steps.quantize_columns(y_RN, square=False), fp8_columns, torch.float32)
    for e, part in enumerate(steps.expert_rows):
        assert torch.equal(grad[e].long(), y_RN[part].long().T @ x_RK[part].long())


@pytest.mark.parametrize("clamped", [False, True])
@pytest.mark.parametrize("counts", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_reference_experts_are_near_fp64(recipe: Any, counts: list[int], clamped: bool) -> None:
    *inputs, slope = made(counts, 144, 128)
    y_RD = fp8_experts(inputs[0], inputs[1], torch.tensor(counts), *inputs[2:], None, recipe, clamped)
    found, expected = gradients(y_RD, inputs, slope), exact(counts, inputs, slope, clamped)
    near(found, expected)


@pytest.mark.parametrize("recipe", RECIPES)
def test_tokens_are_rows_sorted(recipe: Any) -> None:
    *inputs, slope = made([60, 0, 0], 144, 128)
    expert_TK = torch.rand(60, 3).topk(2, dim=1).indices
    x_TD, weight_TK = inputs[0], torch.rand(60, 2, requires_grad=True)
    y_TD = fp8_experts_of_tokens(x_TD, weight_TK, expert_TK, *inputs[2:], None, recipe)
    found = gradients(y_TD, [x_TD, weight_TK, *inputs[2:]], slope)
    order_R = expert_TK.flatten().argsort(stable=True)
    count_E = torch.bincount(expert_TK.flatten(), minlength=3)
    y_RD = fp8_experts(x_TD[order_R // 2], weight_TK.flatten()[order_R], count_E, *inputs[2:], None, recipe)
    again = gradients(y_RD[order_R.argsort()].unflatten(0, (60, 2)).sum(1), [x_TD, weight_TK, *inputs[2:]], slope)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
    wide = [tensor.detach().double().requires_grad_() for tensor in (x_TD, weight_TK, *inputs[2:])]
    exactly = gradients(fused_experts(wide[0], wide[1], expert_TK, *wide[2:]), wide, slope.double())
    near(found, exactly)


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_quantized_before_give_the_same(recipe: Any) -> None:
    counts = LOADS["spread"]
    *inputs, slope = made(counts, 144, 128)
    arguments = inputs[0], inputs[1], torch.tensor(counts), *inputs[2:]
    kept = quantize_weights(*inputs[2:], recipe)
    found = gradients(fp8_experts(*arguments, kept, recipe), inputs, slope)
    again = gradients(fp8_experts(*arguments, None, recipe), inputs, slope)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


def saved_bytes(work: Any) -> int:
    kept: dict[int, int] = {}

    def note(tensor: Any) -> Any:
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        work()
    return sum(kept.values())


def test_the_input_is_saved_in_one_byte() -> None:
    """Counted by hand: 256 rows are 2 blocks, and one more may be open; each has 128 rows of 144 bytes and 2 scales.
    FC1's output has 2 * 128 numbers of two bytes a row, the router weight one of four."""
    *inputs, _ = made([256], 144, 128)
    count_E, fp8_weights = torch.tensor([256]), quantize_weights(*inputs[2:])
    found = saved_bytes(lambda: fp8_experts(inputs[0], inputs[1], count_E, *inputs[2:], fp8_weights))
    assert found == 3 * (128 * 144 + 2 * 4) + 256 * (2 * 128 * 2 + 4)
    inputs[2].requires_grad_(False)  # then the backward does not need the input
    found = saved_bytes(lambda: fp8_experts(inputs[0], inputs[1], count_E, *inputs[2:], fp8_weights))
    assert found == 256 * (2 * 128 * 2 + 4)


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_rows_at_all(recipe: Any) -> None:
    *inputs, slope = made([0, 0], 144, 128)
    y_RD = fp8_experts(inputs[0], inputs[1], torch.tensor([0, 0]), *inputs[2:], None, recipe)
    found = gradients(y_RD, inputs, slope)
    assert found[0].shape == (0, 144)
    assert all((grad == 0).all() for grad in found[3:])


def test_frozen_experts_get_no_gradient() -> None:
    *inputs, slope = made(LOADS["spread"], 144, 128)
    inputs[2].requires_grad_(False)
    y_RD = fp8_experts(inputs[0], inputs[1], torch.tensor(LOADS["spread"]), *inputs[2:])
    y_RD.backward(slope)
    assert inputs[2].grad is None
    assert inputs[3].grad is not None


def two_microbatches(recipe: Any, frozen: bool, delay: Any) -> tuple[list[Any], list[Any]]:
    """The input gradients and the summed weight gradients of two microbatches: by rows, then by tokens."""
    torch.manual_seed(0)
    *inputs, slope = made([60, 0, 9], 144, 128, DEVICE)
    x, weight_R, *weights = inputs
    weights[0].requires_grad_(not frozen)
    weight_TK = torch.rand(69, 2, device=DEVICE, requires_grad=True)
    expert_TK = torch.rand(69, 3, device=DEVICE).topk(2, dim=1).indices
    count_E = torch.tensor([60, 0, 9], device=DEVICE)
    sums = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
    kept = [
        attach_main_grad(w, total, lambda _: None) for w, total in zip(weights, sums, strict=True) if w.requires_grad
    ]
    with delay or nullcontext():
        fp8_experts(x, weight_R, count_E, *weights, None, recipe).backward(slope)
        fp8_experts_of_tokens(x, weight_TK, expert_TK, *weights, None, recipe).backward(slope)
    assert kept
    assert all(weight.grad is None for weight in weights)
    if delay is not None:
        assert not any(total.any() for total in sums)
        delay.finish()
    return [x.grad, weight_R.grad, weight_TK.grad], sums


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_delayed_wgrad_into_main_grad_is_the_immediate_one(recipe: Any, frozen: bool) -> None:
    """Two microbatches are delayed together: what the first one saved is still intact when it is computed."""
    (inputs, sums), (inputs_, sums_) = (two_microbatches(recipe, frozen, delay) for delay in (None, WgradQueue()))
    assert all(torch.equal(one, other) for one, other in zip(inputs + sums, inputs_ + sums_, strict=True))
    assert [bool(total.any()) for total in sums] == [not frozen, True]


@pytest.mark.parametrize("recipe", RECIPES)
def test_delayed_wgrad_without_main_grad_is_the_immediate_one(recipe: Any) -> None:
    *inputs, slope = made([60, 0, 9], 144, 128, DEVICE)
    count_E = torch.tensor([60, 0, 9], device=DEVICE)
    expected = gradients(fp8_experts(inputs[0], inputs[1], count_E, *inputs[2:], None, recipe), inputs, slope)[3:]
    delay = WgradQueue()
    with delay:
        fp8_experts(inputs[0], inputs[1], count_E, *inputs[2:], None, recipe).backward(slope)
    assert inputs[2].grad is None
    delay.finish()
    assert all(torch.equal(weight.grad, grad) for weight, grad in zip(inputs[2:], expected, strict=True))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.skipif(not INTERPRETED, reason="run by test_interpreter.py")
def test_interpreted_router_weights_may_be_strided() -> None:
    """The router weights are a column of a wider tensor."""
    *inputs, slope = made([3], 16, 128)
    for weight in inputs[2:]:
        weight.requires_grad_(False)
    apart = torch.stack([inputs[1], -inputs[1]], dim=1)[:, 0]
    found, expected = (fp8_experts(inputs[0], one, torch.tensor([3]), *inputs[2:]) for one in (apart, inputs[1]))
    found, expected = gradients(found, inputs[:2], slope), gradients(expected, inputs[:2], slope)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


class Grids:
    """A stand-in for a kernel that records the grids it is launched with."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.seen.append(grid)
        return lambda *given, **more: None


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
def test_grids_hold_millions_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """16,777,216 rows, 131,072 blocks of them: CUDA's grids reach 2 ** 31 - 1 along the first axis, 65,535 beyond."""
    from threefold.engine.kernels.fp8 import blockwise_quantize as quantize
    from threefold.engine.kernels.fp8 import blockwise_swiglu as activation
    from threefold.engine.kernels.fp8.quantized_tensors import RowBlocks

    grids, rows, half = Grids(), 2**24, 256
    monkeypatch.setattr(quantize, "_quantize_rows_and_columns", grids)
    for name in ("_swiglu_fp8", "_swiglu_grad_rows", "_swiglu_grad_columns"):
        monkeypatch.setattr(activation, name, grids)

    def of(*sizes: int) -> Any:
        return torch.empty(*sizes, device="meta", dtype=torch.bfloat16)

    blocks = RowBlocks(of(3, 2**17 + 8), of(1), of(8))
    given = of(rows, half), of(rows, 2 * half), of(rows)
    quantize.quantize_rows_and_columns(given[0], None, blocks, True, True, square=True)
    activation.swiglu_fp8(*given[1:], False)
    _, amax_CR, _ = activation.swiglu_grad_rows(*given, False)
    activation.swiglu_grad_columns(*given, amax_CR, blocks, False, True, True)
    assert [math.prod(grid) for grid in grids.seen] == [2 * (2**17 + 8), 2 * 2**17, 2 * 2**19, 8 * (2**17 + 8)]
    assert all(size <= 65_535 for grid in grids.seen for size in grid[1:])


def test_which_sizes_fit() -> None:
    assert supports_sizes(7168, 2048)  # DeepSeek-V3
    assert supports_sizes(2048, 768)  # Qwen3-30B-A3B
    assert not supports_sizes(2880, 2880)  # GPT-OSS: a block of FC1 would hold columns of gate and up
    assert not supports_sizes(2056, 768)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_dry_run_saves_the_same_bytes(recipe: Any) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from threefold.engine.device import simulate

    *inputs, _ = made([190], 144, 128)
    real = saved_sizes(lambda: fp8_experts(inputs[0], inputs[1], torch.tensor([190]), *inputs[2:], None, recipe))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, simulate("cuda"):
        fake = [mode.from_tensor(tensor) for tensor in inputs]
        count_E = mode.from_tensor(torch.tensor([190]))
        rehearsed = saved_sizes(lambda: fp8_experts(fake[0], fake[1], count_E, *fake[2:], None, recipe))
        fp8_experts(fake[0], fake[1], count_E, *fake[2:], None, recipe).sum().backward()
    assert real == rehearsed


def saved_sizes(work: Any) -> list[Any]:
    kept: list[Any] = []

    def note(tensor: Any) -> Any:
        kept.append((tuple(tensor.shape), tensor.dtype))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        work()
    return kept


def same_bits(one: Any, other: Any) -> bool:
    return one.shape == other.shape and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def padded_rows_in_use(steps: Any, device: str) -> Any:
    """The indices among P of the rows that are in use."""
    return torch.cat([torch.arange(place.start, place.stop, device=device) for place in steps.padded_rows])


def steps_of(recipe: str, counts: list[int], clamped: bool, device: str) -> tuple[Any, Any]:
    """The GPU steps and the reference steps of a recipe."""
    from threefold.engine.kernels.fp8.gpu_steps import BlockwiseGpuSteps, RowwiseGpuSteps

    plain = reference.BlockwiseReferenceSteps if recipe == "blockwise" else reference.RowwiseReferenceSteps
    fast = BlockwiseGpuSteps if recipe == "blockwise" else RowwiseGpuSteps
    ends_E = torch.tensor(counts, device=device).cumsum(0).to(torch.int32)
    return fast(ends_E, sum(counts), clamped), plain(ends_E, sum(counts), clamped)


def check_quantized(recipe: str, counts: list[int], x_RK: Any, square: bool) -> None:
    """Compare quantized rows and columns, for rows as they are and for tokens in another order."""
    device = x_RK.device.type
    fast, plain = steps_of(recipe, counts, False, device)
    live = padded_rows_in_use(plain, device)
    owner_R = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    shuffled = sort_rows(owner_R[torch.randperm(len(owner_R))][:, None].to(device), len(counts))
    for rows in (None, shuffled):
        (fp8_rows, fp8_columns), (expected_rows, expected_columns) = (
            steps.quantize(x_RK, rows, True, square) for steps in (fast, plain)
        )
        assert same_bits(fp8_rows.value_RK, expected_rows.value_RK)
        assert same_bits(fp8_rows.scale_CR, expected_rows.scale_CR)
        assert same_bits(fp8_columns.value_KP[:, live], expected_columns.value_KP[:, live])
        assert same_bits(fp8_columns.scale[live[::128] // 128], expected_columns.scale[live[::128] // 128])
        rows_alone, nothing = fast.quantize(x_RK, rows, False, square)
        assert nothing is None
        assert same_bits(rows_alone.value_RK, expected_rows.value_RK)
        assert same_bits(rows_alone.scale_CR, expected_rows.scale_CR)


def check_swiglu(recipe: str, counts: list[int], grad_RH: Any, gate_up_RX: Any, weight_R: Any) -> None:
    """Compare closely: another order of operations may move a value to its FP8 neighbor; the interpreter truncates."""
    loose = 0.2 if INTERPRETED else 0.01
    for clamped in (False, True):
        both = steps_of(recipe, counts, clamped, grad_RH.device.type)
        live = padded_rows_in_use(both[1], grad_RH.device.type)
        assert far(*(reference.dequantize_rows(steps.swiglu(gate_up_RX, weight_R)) for steps in both)) < loose
        found, expected = (steps.swiglu_grad(grad_RH, gate_up_RX, weight_R, True, True) for steps in both)
        assert far(*(reference.dequantize_rows(one[0]) for one in (found, expected))) < loose
        for at in (1, 2):
            assert far(*(reference.dequantize_columns(one[at])[live] for one in (found, expected))) < loose
        assert far(found[3], expected[3]) < 1e-5  # fp32 sums


def check_kernels(counts: list[int], dim: int, half: int, of: Any, device: str) -> None:
    """Compare every kernel with its reference step, fed with the reference's results; `of` makes tensors."""
    from threefold.engine.kernels.fp8 import blockwise_quantize as quantize

    rows = sum(counts)
    x, grad, slope = of(rows, dim), of(rows, half), of(rows, dim)
    up, down = of(len(counts), 2 * half, dim), of(len(counts), dim, half)
    weight_R = torch.ones(rows, device=device) if INTERPRETED else torch.rand(rows, device=device)
    check_quantized("blockwise", counts, x, square=True)
    check_quantized("blockwise", counts, slope, square=False)
    fast, plain = steps_of("blockwise", counts, False, device)
    for weight in (up, down):
        found, expected = quantize.quantize_weight(weight), reference.quantize_weight(weight)
        assert same_bits(found.value_EOI, expected.value_EOI)
        assert same_bits(found.transposed_EIO, expected.transposed_EIO)
        assert same_bits(found.scale, expected.scale)
    up_fp8, down_fp8 = reference.quantize_weight(up), reference.quantize_weight(down)
    x_fp8, x_columns = plain.quantize(x, None, True, square=True)
    slope_fp8, slope_columns = plain.quantize(slope, None, True, square=False)
    act_fp8, act_columns = plain.quantize(grad, None, True, square=True)
    gate_up_RX = plain.grouped_gemm(x_fp8, up_fp8.value_EOI, up_fp8.scale)
    grad_fp8, grad_columns = plain.quantize(gate_up_RX, None, True, square=False)
    for given in (
        (x_fp8, up_fp8.value_EOI, up_fp8.scale),
        (act_fp8, down_fp8.value_EOI, down_fp8.scale),
        (slope_fp8, down_fp8.transposed_EIO, down_fp8.transposed_scale),
        (grad_fp8, up_fp8.transposed_EIO, up_fp8.transposed_scale),
    ):
        close(fast.grouped_gemm(*given), plain.grouped_gemm(*given))
    for given in ((slope_columns, act_columns), (grad_columns, x_columns)):
        expected = plain.wgrad(*given, torch.bfloat16)
        close(fast.wgrad(*given, torch.bfloat16), expected)
        for dtype in (torch.bfloat16, torch.float32):
            before = expected.to(dtype).roll(1, dims=1)
            total = before.clone()
            assert fast.wgrad(*given, torch.bfloat16, total) is None
            close(total.bfloat16(), (before.float() + plain.wgrad(*given, torch.float32)).bfloat16())
    check_swiglu("blockwise", counts, grad, (gate_up_RX / 64).to(torch.bfloat16), weight_R)


def close(found: Any, expected: Any) -> None:
    """Compare bf16 roundings of the same fp32 sums, neighbors 2**-8 apart beside a tie. The interpreter truncates."""
    assert found.dtype == expected.dtype == torch.bfloat16
    assert far(found, expected) < (6e-3 if INTERPRETED else 1e-3)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.skipif(not INTERPRETED, reason="run by test_interpreter.py")
@pytest.mark.parametrize(
    "counts",
    [pytest.param(counts, id=name, marks=() if name == "few" else pytest.mark.slow) for name, counts in LOADS.items()],
)
def test_interpreted(counts: list[int]) -> None:
    check_kernels(counts, 144, 128, whole, "cpu")


@pytest.mark.slow
@pytest.mark.usefixtures("poisoned")
@pytest.mark.skipif(not INTERPRETED, reason="run by test_interpreter.py")
def test_interpreted_rows_of_one_scale() -> None:
    """Each row has amax 448 and otherwise 448 divided by powers of two: scales are 1, and nothing is rounded."""
    from threefold.engine.kernels.fp8 import rowwise_kernels as rowwise

    def of(*sizes: int) -> Any:
        return (448.0 / 2 ** torch.randint(3, sizes) * (torch.randint(2, sizes) * 2 - 1)).to(torch.bfloat16)

    weight = of(3, 144, 256)
    weight[1, 5], weight[2, :, 7] = 0.0, 0.0
    found, expected = rowwise.quantize_weight(weight), reference.quantize_weight_rowwise(weight)
    for name in ("value_EOI", "transposed_EIO", "scale", "transposed_scale"):
        assert same_bits(getattr(found, name), getattr(expected, name))
    counts = [40, 0, 3]
    check_quantized("rowwise", counts, of(43, 144), square=True)
    for by in (64, 32):  # the larger numbers are clamped
        check_swiglu("rowwise", counts, of(43, 128) / 64, of(43, 256) / by, torch.ones(43))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.skipif(not (INTERPRETED or HAS_HOPPER), reason="needs a Hopper GPU or test_interpreter.py")
@pytest.mark.parametrize("top", TINY)
def test_interpreted_numbers_as_small_as_can_be(top: float) -> None:
    """A GPU gets any numbers; the interpreter only those that e4m3 represents exactly."""
    from threefold.engine.kernels.fp8 import blockwise_quantize as quantize
    from threefold.engine.kernels.fp8 import rowwise_kernels as rowwise
    from threefold.engine.kernels.fp8.gpu_steps import RowwiseGpuSteps

    part = torch.rand(1, 136, 144) if HAS_HOPPER else 0.5 ** torch.randint(3, (1, 136, 144))
    # Zeros have no sign here: the corrected division loses the sign of a zero.
    weight = (part * top * (torch.randint(2, part.shape) * 2 - 1) + 0.0).to(DEVICE)
    fp8_rows, expected_rows = rowwise.quantize_rows(weight[0, :9], None), reference.quantize_rows_rowwise(weight[0, :9])
    assert same_bits(fp8_rows.value_RK, expected_rows.value_RK)
    assert same_bits(fp8_rows.scale_CR, expected_rows.scale_CR)
    for found, expected in (
        (quantize.quantize_weight(weight), reference.quantize_weight(weight)),
        (rowwise.quantize_weight(weight), reference.quantize_weight_rowwise(weight)),
    ):
        for name in ("value_EOI", "transposed_EIO", "scale", "transposed_scale"):
            assert same_bits(getattr(found, name).contiguous(), getattr(expected, name).contiguous())
    steps = RowwiseGpuSteps(torch.tensor([5], dtype=torch.int32, device=DEVICE), 5, False)
    given = torch.ones(5, 256, device=DEVICE), torch.full((5,), top, device=DEVICE)
    made = steps.swiglu_grad(weight[0, :5, :128].contiguous(), *given, False, False)
    for fp8_rows in (steps.swiglu(*given), made[0]):
        assert reference.dequantize_rows(fp8_rows).isfinite().all()
        assert (fp8_rows.scale_CR >= 2.0**-93).all()


@pytest.mark.skipif(not gluon_known(), reason="needs a release of triton that the kernel is written for")
@pytest.mark.parametrize(
    ("wgrad", "rowwise", "adds", "stored"),
    [(False, False, False, False), (False, False, False, True), (False, True, False, False), (False, True, False, True),
     (True, False, False, False), (True, False, True, False)],
)  # fmt: skip
def test_hopper_gemm_compiles_without_a_gpu(wgrad: bool, rowwise: bool, adds: bool, stored: bool) -> None:
    """Gluon kernels cannot be interpreted."""
    from threefold.engine.kernels.fp8 import gpu_steps as steps
    from threefold.engine.kernels.fp8.hopper_gluon_kernel import grouped_gemm_kernel

    config = steps._HOPPER_WGRAD_CONFIG if wgrad else steps._HOPPER_CONFIG
    dtype = "fp32" if adds else "bf16"
    kinds = {
        "a": blocks("fp8e4nv", 64, 128),
        "a_scale_ptr": "*fp32",
        "w": blocks("fp8e4nv", 256, 128),
        "w_scale_ptr": "*fp32",
        "out": blocks(dtype, 64, 128),
        "out_ptr": f"*{dtype}",
        "target_ptr": "*i32",
        "table_ptr": "*i32",
        "total_ptr": "*i32",
        "max_tiles": "i32",
        "num_rows": "i32",
    }
    sizes = {"M": 512, "N": 768, "K": 1024, "SE": 48, "SN": 8, "SK": 1}
    options = {"STAGES": config.stages, "GROUP": config.group, "WGRAD": wgrad, "ROWWISE": rowwise, "ADD": adds}
    options["STORED"] = stored
    compile_for_hopper(grouped_gemm_kernel, kinds, sizes | options)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.skipif(not (INTERPRETED or HAS_HOPPER), reason="needs a Hopper GPU or test_interpreter.py")
@pytest.mark.parametrize("dim", [128, 1152])
def test_interpreted_rows_travel_in_fp8(dim: int) -> None:
    """Each token is stored in its rows but for a dropped copy, and comes out as its blocks of 128 are rounded."""
    from threefold.engine.dispatch.rows import sort_with_drops
    from threefold.engine.kernels.fp8.packed_rows import pack_tokens, unpack_rows

    expert_TK = torch.tensor([[0, 2], [1, -1], [2, 0]], device=DEVICE)
    whole = torch.randn(3, dim) if HAS_HOPPER else torch.randint(-8, 9, (3, dim)).float()
    x_TD = (whole * torch.tensor([2.0**-100, 1.0, 2.0**100])[:, None]).to(DEVICE)
    x_TD[1, :128] = 0
    rows, _ = sort_with_drops(expert_TK, 3)
    rows = rows.truncate(5)
    packed_SB, x_SD = torch.empty(5, dim + dim // 128, dtype=torch.uint8, device=DEVICE), torch.empty(5, dim).to(DEVICE)
    pack_tokens(x_TD, rows.row_TK, packed_SB)
    unpack_rows(packed_SB, x_SD)
    assert torch.equal(x_SD, reference.dequantize_rows(reference.quantize_rows(x_TD))[rows.token_R])


SIZES = [([130, 0, 60], 256, 128), ([0, 0, 700], 512, 256), ([1, 2, 3, 500], 144, 128), ([300] * 8, 1024, 512)]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(("counts", "dim", "half"), SIZES)
def test_every_kernel_on_a_gpu(counts: list[int], dim: int, half: int) -> None:
    def of(*sizes: int) -> Any:
        return torch.randn(*sizes, device="cuda", dtype=torch.bfloat16) * torch.rand(sizes[-1], device="cuda").exp2()

    check_kernels(counts, dim, half, lambda *sizes: of(*sizes).to(torch.bfloat16), "cuda")


@pytest.mark.usefixtures("poisoned")
@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
def test_rows_of_one_scale_on_a_gpu() -> None:
    from threefold.engine.kernels.fp8 import rowwise_kernels as rowwise

    counts = [130, 0, 60]
    *inputs, _ = made(counts, 384, 128, "cuda")
    fast, plain = steps_of("rowwise", counts, False, "cuda")
    check_quantized("rowwise", counts, inputs[0].detach(), square=True)
    fp8_rows = fast.quantize(inputs[0].detach(), None, False, square=True)[0]
    weight_fp8, expected_weight = (
        one(inputs[2].detach()) for one in (rowwise.quantize_weight, reference.quantize_weight_rowwise)
    )
    for name in ("value_EOI", "transposed_EIO", "scale", "transposed_scale"):
        assert same_bits(getattr(weight_fp8, name), getattr(expected_weight, name))
    gate_up_RX = plain.grouped_gemm(fp8_rows, weight_fp8.value_EOI, weight_fp8.scale)
    grad_RH = gate_up_RX[:, :128].contiguous()
    close(fast.grouped_gemm(fp8_rows, weight_fp8.value_EOI, weight_fp8.scale), gate_up_RX)
    check_swiglu("rowwise", counts, grad_RH, gate_up_RX, inputs[1].detach())


@pytest.mark.usefixtures("poisoned")
@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("clamped", [False, True])
@pytest.mark.parametrize(("counts", "dim", "half"), SIZES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_experts_on_a_gpu_are_near_fp64(recipe: Any, counts: list[int], dim: int, half: int, clamped: bool) -> None:
    *inputs, slope = made(counts, dim, half, "cuda")
    count_E = torch.tensor(counts, device="cuda")
    y_RD = fp8_experts(inputs[0], inputs[1], count_E, *inputs[2:], None, recipe, clamped)
    found, expected = gradients(y_RD, inputs, slope), exact(counts, inputs, slope, clamped)
    near(found, expected)


@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("recipe", RECIPES)
def test_long_sums_under_one_scale_or_many_keep_their_precision(recipe: Any) -> None:
    """All numbers have one sign, so nothing cancels and every lost bit shows: 8,192 columns, 32,768 rows. The same
    quantized values are multiplied in fp64; the difference is rounding to bf16, at most 2**-9 of each."""
    from threefold.engine.kernels.fp8.gpu_steps import BlockwiseGpuSteps, RowwiseGpuSteps

    rows, dim, half = 32768, 8192, 256
    ends_E = torch.tensor([rows], device="cuda", dtype=torch.int32)
    fast = {"blockwise": BlockwiseGpuSteps, "rowwise": RowwiseGpuSteps}[recipe](ends_E, rows, False)
    x = torch.rand(rows, dim, device="cuda").to(torch.bfloat16)
    weight_fp8 = quantize_weights(*(torch.rand(1, half, dim, device="cuda") for _ in range(2)), recipe).down
    x_fp8, x_columns = fast.quantize(x, None, True, square=True)
    y_columns = fast.quantize(x[:, :half].contiguous(), None, True, square=False)[1]
    y = fast.grouped_gemm(x_fp8, weight_fp8.value_EOI, weight_fp8.scale)
    wide = reference.dequantize_weight(weight_fp8.value_EOI, weight_fp8.scale)[0].double()
    expected = reference.dequantize_rows(x_fp8)[:1024].double() @ wide.T
    assert far(y[:1024], expected) < 2e-3
    assert abs(float((y[:1024].double() / expected).mean()) - 1) < 1e-3
    grad = fast.wgrad(y_columns, x_columns, torch.float32)[0]
    left, right = (reference.dequantize_columns(one)[:rows].double() for one in (y_columns, x_columns))
    assert far(grad, left.T @ right) < 1e-3


@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("recipe", RECIPES)
def test_never_waits_for_the_gpu_and_repeats_itself(recipe: Any) -> None:
    *inputs, slope = made([300, 0, 212], 256, 128, "cuda")
    weight_TK = torch.rand(512, 2, device="cuda", requires_grad=True)
    expert_TK = torch.rand(512, 3, device="cuda").topk(2, dim=1).indices
    count_E = torch.tensor([300, 0, 212], device="cuda")
    found = []
    for _ in range(3):  # the first compiles, and may wait
        y_RD = fp8_experts(inputs[0], inputs[1], count_E, *inputs[2:], None, recipe)
        y_TD = fp8_experts_of_tokens(inputs[0], weight_TK, expert_TK, *inputs[2:], None, recipe)
        by_token = gradients(y_TD, [inputs[0], weight_TK, *inputs[2:]], slope)
        found.append([*gradients(y_RD, inputs, slope), *by_token])
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(one, other) for one, other in zip(found[1], found[2], strict=True))
