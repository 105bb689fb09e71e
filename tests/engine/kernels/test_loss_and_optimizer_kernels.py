"""Tests of the loss and optimizer kernels against plain torch in fp64, in Triton's interpreter or on a GPU.

Shapes: C tokens, D model dim, V vocabulary.
"""

import os
from typing import Any

import pytest
import torch

from threefold.engine.kernels.loss_and_optimizer.adamw_triton import adamw_step
from threefold.engine.kernels.loss_and_optimizer.cross_entropy_triton import (
    cross_entropy_in_place,
    scale_and_cast,
    softmax_grad_in_place,
    softmax_statistics,
)
from threefold.engine.kernels.loss_and_optimizer.sum_of_squares_triton import sum_of_squares
from threefold.engine.layers.cross_entropy import IGNORE, cross_entropy_sum, reference
from threefold.engine.optim.adamw import AdamW
from threefold.engine.optim.param_remainders import join_master, store_master

ON_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
DEVICE = "cuda" if ON_GPU else "cpu"
# `test_interpreter.py` runs the tests whose names begin with test_interpreted.
runs = pytest.mark.skipif(
    not (ON_GPU or os.environ.get("TRITON_INTERPRET") == "1"), reason="needs a GPU or triton's interpreter"
)
NARROW = torch.bfloat16 if ON_GPU else torch.float16  # the interpreter cuts to bf16 instead of rounding
STORED = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 1e-6}  # half a unit in the last place
DTYPES = [NARROW, torch.float32]
MIXES = {
    "narrow": (NARROW,) * 4,
    "master": (NARROW, NARROW, torch.float32, torch.float32),
    "wide gradient": (NARROW, torch.float32, torch.float32, NARROW),
    "wide": (torch.float32,) * 4,
}


pytestmark = pytest.mark.usefixtures("poisoned")


def drawn(num_tokens: int, vocab: int, dtype: Any, spread: float = 4.0) -> tuple[Any, Any]:
    logits_CV = (spread * torch.randn(num_tokens, vocab, device=DEVICE)).to(dtype)
    labels_C = torch.randint(vocab, (num_tokens,), device=DEVICE)
    labels_C[::5] = IGNORE
    return logits_CV, labels_C


@runs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 7, 128, 1000, 9001])
def test_interpreted_cross_entropy(vocab: int, dtype: Any) -> None:
    logits_CV, labels_C = drawn(11, vocab, dtype)
    wide = logits_CV.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(wide, labels_C, ignore_index=IGNORE, reduction="none")
    expected.sum().backward()
    loss_C = cross_entropy_in_place(logits_CV, labels_C, IGNORE)
    assert torch.allclose(loss_C.double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.allclose(logits_CV.double(), wide.grad, atol=1e-6, rtol=2 * STORED[dtype])
    assert not logits_CV[labels_C == IGNORE].any()


@runs
def test_interpreted_cross_entropy_of_a_sure_token() -> None:
    """p rounds to 1 in bf16; its gradient p - 1 must not round to 0."""
    logits_CV = torch.zeros(1, 16, dtype=NARROW, device=DEVICE)
    logits_CV[0, 3] = 9.0
    sure = torch.softmax(logits_CV.double(), -1)[0, 3]
    cross_entropy_in_place(logits_CV, torch.tensor([3], device=DEVICE), IGNORE)
    assert logits_CV[0, 3].item() == pytest.approx(sure.item() - 1, rel=4e-3)


@runs
@pytest.mark.parametrize("scale", [1.0, 0.3, 0.0])
def test_interpreted_cross_entropy_scales_its_gradient(scale: float) -> None:
    """A scale of 0 counts as 1: gradients that were multiplied by 0 could not be scaled to anything else."""
    logits_CV, labels_C = drawn(11, 1000, torch.float32)
    expected_CV, scaled_CV, given = logits_CV.clone(), logits_CV.clone(), torch.tensor(scale, device=DEVICE)
    expected_C = cross_entropy_in_place(expected_CV, labels_C, IGNORE)
    assert torch.equal(cross_entropy_in_place(scaled_CV, labels_C, IGNORE, given), expected_C)
    torch.testing.assert_close(scaled_CV, expected_CV * (scale or 1.0))
    _, sum_C, _ = softmax_statistics(logits_CV, labels_C)
    log_sum_C = logits_CV.amax(1) + sum_C.log()
    softmax_grad_in_place(logits_CV, labels_C, log_sum_C.masked_fill(labels_C == IGNORE, float("inf")), given)
    torch.testing.assert_close(logits_CV, scaled_CV, atol=1e-6, rtol=1e-5)


@runs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [None, 0.25, 0.0])
def test_interpreted_scale_and_cast(scale: float | None, dtype: Any) -> None:
    """The result is rounded once: the factor is not rounded to the dtype of the result first."""
    x_VD, factor = torch.randn(191, 333, device=DEVICE), torch.tensor(1 / 3, device=DEVICE)
    before = None if scale is None else torch.tensor(scale, device=DEVICE)
    expected_VD = x_VD.double() * factor.double() / (scale or 1.0)
    out_VD = scale_and_cast(x_VD, factor, before, dtype)
    assert out_VD.dtype == dtype
    assert (out_VD is x_VD) == (dtype == torch.float32)
    assert torch.allclose(out_VD.double(), expected_VD, atol=1e-7, rtol=STORED[dtype])
    assert scale_and_cast(x_VD[:0], factor, before, dtype).shape == (0, 333)


@runs
def test_interpreted_scale_leaves_what_has_its_scale() -> None:
    x_VD, scale = torch.randn(91, 333, device=DEVICE), torch.tensor(1 / 3, device=DEVICE)
    before_VD = x_VD.clone()
    assert scale_and_cast(x_VD, scale.clone(), scale, x_VD.dtype) is x_VD
    assert torch.equal(x_VD, before_VD)
    assert scale_and_cast(x_VD, scale * torch.nan, scale, x_VD.dtype).isnan().all()


@runs
def test_interpreted_sharded_vocabulary() -> None:
    """The shards of three ranks, of which one is empty, reduced as the ranks do."""
    logits_CV, labels_C = drawn(9, 700, NARROW)
    whole_CV = logits_CV.clone()
    loss_C = cross_entropy_in_place(whole_CV, labels_C, IGNORE)
    bounds = [(0, 300), (300, 300), (300, 700)]
    parts = [logits_CV[:, a:b].contiguous() for a, b in bounds]
    seen = [softmax_statistics(part, labels_C - a) for part, (a, _) in zip(parts, bounds, strict=True)]
    top_C = torch.stack([top for top, _, _ in seen]).amax(0)
    log_sum_C = top_C + sum(total * (top - top_C).exp() for top, total, _ in seen).log()
    found_C = log_sum_C - sum(picked for _, _, picked in seen)
    for part, (a, _) in zip(parts, bounds, strict=True):
        softmax_grad_in_place(part, labels_C - a, log_sum_C)
    counted = labels_C != IGNORE
    assert torch.allclose(found_C[counted], loss_C[counted], atol=1e-5)
    assert torch.allclose(torch.cat(parts, 1)[counted].float(), whole_CV[counted].float(), atol=1e-6, rtol=8e-3)


@runs
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("size", [1, 2047, 5000])
def test_interpreted_adamw(size: int, mix: str) -> None:
    """One step from the middle of a run against the formula in fp64."""
    value_dtype, grad_dtype, master_dtype, state_dtype = MIXES[mix]
    value = torch.randn(size, device=DEVICE).to(value_dtype)
    master = value if master_dtype == value_dtype else value.to(master_dtype)
    first = (0.1 * torch.randn(size, device=DEVICE)).to(state_dtype)
    second = (0.1 * torch.rand(size, device=DEVICE)).to(state_dtype)
    grad, factor = torch.randn(size, device=DEVICE).to(grad_dtype), torch.tensor(0.37, device=DEVICE)
    rate, decay, betas, eps, steps = 1e-2, 0.1, (0.9, 0.95), 1e-8, 3
    g, w = grad.double() * factor.double(), master.double()
    m = betas[0] * first.double() + (1 - betas[0]) * g
    v = betas[1] * second.double() + (1 - betas[1]) * g * g
    spread = (v / (1 - betas[1] ** steps)).sqrt() + eps
    w = w * (1 - rate * decay) - rate * (m / (1 - betas[0] ** steps)) / spread
    settings = {"lr": rate, "decay": decay, "betas": betas, "eps": eps, "steps": steps}
    adamw_step(value, grad, master, first, second, factor, **settings)
    for found, expected, dtype in ((first, m, state_dtype), (second, v, state_dtype), (master, w, master_dtype)):
        # Sums of fp32 numbers of size 1, then rounded: on the edge between two neighbors, to either.
        assert torch.allclose(found.double(), expected, atol=1e-6, rtol=1e-6 + 2 * STORED[dtype])
    assert torch.equal(value, master.to(value_dtype))


@runs
@pytest.mark.parametrize("state_dtype", [torch.float32, NARROW])
@pytest.mark.parametrize("size", [1, 2047, 5000])
def test_interpreted_adamw_with_remainders_is_adamw_with_fp32_masters(size: int, state_dtype: Any) -> None:
    """Bit for bit over some steps but for ties: masters, the weights that they round to, and moments."""
    torch.manual_seed(0)
    weight = torch.randn(size, device=DEVICE).bfloat16()
    master, remainder = weight.float(), torch.zeros(size, device=DEVICE, dtype=torch.int16)
    moments = [[torch.zeros(size, device=DEVICE, dtype=state_dtype) for _ in range(2)] for _ in range(2)]
    copy, factor = weight.clone(), torch.tensor(0.37, device=DEVICE)
    tied = torch.zeros(size, device=DEVICE, dtype=torch.bool)
    for steps in range(1, 5):
        grad = torch.randn(size, device=DEVICE).to(NARROW)
        settings = {"lr": 1e-2, "decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "steps": steps}
        adamw_step(copy, grad, master, *moments[0], factor, **settings)
        adamw_step(weight, grad, remainder, *moments[1], factor, **settings)
        # A master in the middle between an even weight and the next one is stored one unit smaller.
        tied |= (master.view(torch.int32) & 0x1FFFF) == 0x8000
        units = join_master(weight, remainder).view(torch.int32) - master.view(torch.int32)
        assert torch.equal(weight, master.bfloat16())
        assert not units[~tied].any()
        assert units.abs().max() <= 2
    assert all(torch.equal(one, two) for one, two in zip(*moments, strict=True))


@runs
@pytest.mark.parametrize("kind", ["fp32", "masters", "remainders", "narrow"])
def test_interpreted_adamw_of_many_tensors_is_that_of_each(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors in one launch, beside some of odd sizes, one at no multiple of 16 bytes and one that is large."""
    torch.manual_seed(0)
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16 if kind == "remainders" else NARROW
    shapes = [(3, 16), (7,), (1040,), (16,), (60, 64), (1,), (64, 64), (5, 208)]
    before = [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]
    before.append(torch.randn(33, device=DEVICE).to(dtype)[1:])
    grads = [torch.randn(x.shape, device=DEVICE).to(dtype) for x in before]
    settings = {"master": kind != "narrow", "store_param_remainders": kind == "remainders"}
    weights: list[list[torch.nn.Parameter]] = []
    states = []
    for largest in (4096, 0):
        monkeypatch.setattr("threefold.engine.kernels.loss_and_optimizer.many_tensors.LARGE_NUMEL", largest)
        base = before[-1].clone().new_zeros(33)
        base[1:] = before[-1]
        weights.append([torch.nn.Parameter(x.clone()) for x in before[:-1]] + [torch.nn.Parameter(base[1:])])
        made = AdamW(((f"w{n}", p) for n, p in enumerate(weights[-1])), 0.1, **settings)  # type: ignore[arg-type]
        for steps in range(3):
            for p, grad in zip(weights[-1], grads, strict=True):
                p.grad = grad * (steps + 1)
            made.step(1e-2, torch.tensor(0.5, device=DEVICE))
        states.append(made.state_dict())
    for one, two, start in zip(*weights, before, strict=True):
        assert torch.equal(one, two)
        assert not torch.equal(one, start)
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@runs
def test_interpreted_adamw_rounds_masters_to_even_weights() -> None:
    """1 and 2 grow to the middle between them and their neighbors above, which int16 remainders do not reach."""
    weight = torch.tensor([1.0, -1.0, 2.0, 0.0, float("inf"), float("nan"), 1.5], device=DEVICE).bfloat16()
    remainder = torch.zeros(7, device=DEVICE, dtype=torch.int16)
    before, zero = weight.clone(), torch.zeros(7, device=DEVICE)
    settings = {"lr": 1.0, "decay": -(2.0**-8), "betas": (0.9, 0.95), "eps": 1e-8, "steps": 1}
    adamw_step(weight, zero, remainder, zero.clone(), zero.clone(), torch.tensor(1.0, device=DEVICE), **settings)
    expected, left = before.clone(), torch.zeros_like(remainder)
    store_master(before.float() * (1 + 2.0**-8), expected, left)
    assert torch.equal(weight.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert torch.equal(remainder[:5], left[:5])
    assert torch.equal(weight[:5], before[:5])
    assert remainder[:5].tolist() == [32767, 32767, 32767, 0, 0]
    assert weight[6] > 1.5
    assert remainder[6] == -(2**14)
    assert torch.equal(join_master(weight, remainder).isnan(), before.isnan())


@runs
def test_interpreted_adamw_in_fp64_is_torch_s() -> None:
    """The kernel computes in fp32, so fp64 weights must not use it."""
    weight = torch.nn.Parameter(torch.randn(6, 5, device=DEVICE, dtype=torch.float64))
    same = torch.nn.Parameter(weight.detach().clone())
    ours = AdamW([("weight", weight)], weight_decay=0.1)
    theirs = torch.optim.AdamW([same], lr=1e-2, betas=ours.betas, eps=ours.eps, weight_decay=0.1)
    for _ in range(2):
        weight.grad = torch.randn_like(weight)
        same.grad = weight.grad.clone()
        ours.step(1e-2)
        theirs.step()
    torch.testing.assert_close(weight, same, rtol=1e-12, atol=1e-14)


@runs
def test_interpreted_adamw_changes_nothing_if_the_factor_is_nan() -> None:
    kept = [torch.rand(100, device=DEVICE) for _ in range(3)]
    kept += [torch.rand(100, device=DEVICE).bfloat16(), torch.arange(100, device=DEVICE, dtype=torch.int16)]
    before = [x.clone() for x in kept]
    settings = {"lr": 0.1, "decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "steps": 1}
    value, first, second, weight, remainder = kept
    factor = torch.tensor(float("nan"), device=DEVICE)
    adamw_step(value, torch.ones_like(value), value, first, second, factor, **settings)
    adamw_step(weight, torch.ones_like(value), remainder, first, second, factor, **settings)
    assert all(torch.equal(x, old) for x, old in zip(kept, before, strict=True))


@runs
@pytest.mark.parametrize("size", [0, 1, 100_001])
def test_interpreted_squares(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [torch.randn(n, device=DEVICE).to(NARROW) for n in (size, 80, 4096, 4097, 12_000)]
    parts += [torch.randn(33, device=DEVICE), torch.randn(33, device=DEVICE)[1:], torch.randn(4992, device=DEVICE)]
    expected = sum(part.double().square().sum() for part in parts)
    for largest in (2**26, 5000, 0):  # tensors that are launched together, some of them, none
        monkeypatch.setattr("threefold.engine.kernels.loss_and_optimizer.many_tensors.LARGE_NUMEL", largest)
        assert sum_of_squares(parts).item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.skipif(not ON_GPU, reason="needs a Hopper GPU")
@pytest.mark.parametrize("expected", [None, 1.0, 1 / 257, 7.0])
@pytest.mark.parametrize("chunk", [64, 200, 4096])
def test_loss_on_a_gpu(chunk: int, expected: float | None) -> None:
    """The error in bf16 is at most twice that of the loss with all logits in memory."""
    torch.manual_seed(0)
    x_CD = torch.randn(300, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight_VD = (0.1 * torch.randn(5003, 128, device="cuda")).to(torch.bfloat16).requires_grad_()
    labels_C = torch.randint(5003, (300,), device="cuda")
    labels_C[::7] = IGNORE
    exact = [x.detach().double().requires_grad_() for x in (x_CD, weight_VD)]
    wanted = torch.autograd.grad(reference(*exact, labels_C), exact)
    plain = torch.autograd.grad(reference(x_CD, weight_VD, labels_C), (x_CD, weight_VD))
    hint = None if expected is None else torch.tensor(expected, device="cuda")
    loss = cross_entropy_sum(x_CD, weight_VD, labels_C, chunk, expected_grad=hint)
    found = [257 * grad for grad in torch.autograd.grad(loss / 257, (x_CD, weight_VD))]

    def far(one: Any, other: Any) -> float:
        return float((one.double() - other).norm() / other.norm())

    for mine, theirs, truth in zip(found, plain, wanted, strict=True):
        assert far(mine, truth) < 2 * far(theirs, truth) + 1e-4
