"""Tests of the elementwise kernels against formulas in fp64: norms, rotary embedding, router, SwiGLU, permutation.

Without a GPU they run in Triton's interpreter, on tiny sizes in fp32 (see `test_interpreter.py`). In a run without
either, the plain torch forms are compared.

Shapes: B batch, S sequence, T tokens, D model dim, H heads, d head dim, E experts, K experts of a token, R rows.
"""

import importlib.util
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from gluon_compile import compile_triton, gluon_known

from threefold.engine.autograd.grad_squares import grad_squares_of, request_grad_squares
from threefold.engine.dispatch import rows as permuted
from threefold.engine.kernels.availability import runs_fused, without_fused_kernels
from threefold.engine.layers import embedding, rope
from threefold.engine.layers import norm as norms
from threefold.engine.moe import balance
from threefold.engine.moe.router import Router
from threefold.spec.model import MoeSpec

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_GPU = HAS_TRITON and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
DEVICE = "cuda" if HAS_GPU else "cpu"
NARROW = torch.bfloat16 if HAS_GPU else torch.float32  # the interpreter truncates to bf16 and does not round
# Root-mean-square rounding of bf16 is 1 / 600; fp32 sums of some thousand numbers stay within 1e-5.
FAR = 4e-3 if HAS_GPU else 1e-5
runs = pytest.mark.skipif(not (HAS_GPU or INTERPRETED), reason="needs a Hopper GPU or test_interpreter.py")


pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")


def leaf(*shape: int, dtype: Any = None) -> Any:
    made = torch.randn(*shape, dtype=torch.float64).to(dtype or NARROW)
    return made.to(DEVICE).requires_grad_()


def far(found: Any, expected: Any) -> float:
    """The norm of the difference over the norm of the expected tensor; nan if any value is nan."""
    found, expected = found.detach().double(), expected.detach().double()
    length = expected.norm()
    return float((found - expected).norm() / length if length else found.norm())


def compare(ours: Callable[..., Any], exact: Callable[..., Any], given: list[Any], limit: float = FAR) -> None:
    """Compare results and their gradients with those of `exact` on fp64 copies of the inputs."""
    found = _each(ours(*given))
    doubles = [x.detach().double().requires_grad_() for x in given]
    expected = _each(exact(*doubles))
    slopes = [torch.randn_like(x) for x in found]
    made = torch.autograd.grad(found, given, slopes)
    right = torch.autograd.grad(expected, doubles, [slope.double() for slope in slopes])
    for one, best in zip([*found, *made], [*expected, *right], strict=True):
        assert one.shape == best.shape
        assert far(one, best) < limit


def _each(made: Any) -> list[Any]:
    return [made] if isinstance(made, torch.Tensor) else list(made)


def rms(x: Any, weight: Any, eps: float, centered: bool) -> Any:
    scale = (x.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    return x * scale * (weight + 1 if centered else weight)


def norm_of(dim: int, centered: bool) -> Any:
    module = norms.RMSNorm(dim, 1e-5, zero_centered=centered).to(DEVICE, NARROW)
    torch.nn.init.normal_(module.weight, 0.0 if centered else 1.0, 0.3)
    return module


SIZES = [(7, 48), (1, 16)] if not HAS_GPU else [(1031, 2048), (300, 2880), (64, 7168), (1, 512), (777, 100)]


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("kind", ["norm", "through", "add"])
def test_norm(kind: str, centered: bool) -> None:
    for num_rows, dim in SIZES:
        module = norm_of(dim, centered)
        x, y = leaf(1, num_rows, dim), leaf(1, num_rows, dim)

        def ours(x: Any, y: Any, weight: Any, module: Any = module) -> Any:
            assert runs_fused(x) == (HAS_GPU or INTERPRETED)
            if kind == "norm":
                return module(x) + 0 * y
            return module(x, y, return_residual=True) if kind == "add" else (*module(x, return_residual=True), 2 * y)

        def exact(x: Any, y: Any, weight: Any) -> Any:
            if kind == "norm":
                return rms(x, weight, 1e-5, centered) + 0 * y
            if kind == "through":
                return x, rms(x, weight, 1e-5, centered), 2 * y
            # The sum is stored, and normed as it was stored.
            total = x + y
            return total, rms(total + (total.to(NARROW).double() - total).detach(), weight, 1e-5, centered)

        compare(ours, exact, [x, y, module.weight])


def test_norm_of_a_slice_and_with_one_gradient_only() -> None:
    wide, module = leaf(5, 40), norm_of(24, False)
    compare(lambda x, w: module(x[:, :24]), lambda x, w: rms(x[:, :24], w, 1e-5, False), [wide, module.weight])
    x, y = leaf(5, 24), leaf(5, 24)
    total, normed = module(x, y, return_residual=True)
    assert torch.equal(torch.autograd.grad(total, x, torch.ones_like(total))[0], torch.ones_like(x))
    total, normed = module(x, y, return_residual=True)
    grads = torch.autograd.grad(normed, (x, y), torch.ones_like(normed))
    assert torch.equal(*grads)


def rotated(x_BSHd: Any, weight: Any, angle_BSF: Any, interleaved: bool, centered: bool) -> Any:
    """RMSNorm and rotary embedding in complex numbers."""
    if weight is not None:
        x_BSHd = rms(x_BSHd, weight, 1e-5, centered)
    freqs = angle_BSF.shape[-1]
    part = x_BSHd[..., : 2 * freqs]
    one, two = (part[..., 0::2], part[..., 1::2]) if interleaved else part.chunk(2, dim=-1)
    turned = torch.complex(one, two) * torch.polar(torch.ones_like(angle_BSF), angle_BSF)[:, :, None]
    return torch.cat([turned.real, turned.imag, x_BSHd[..., 2 * freqs :]], dim=-1)


HEADS = [(2, 3, 4, 16, 8), (1, 5, 1, 24, 3), (2, 2, 3, 24, 4)]
if HAS_GPU:
    HEADS = [(2, 300, 32, 128, 64), (3, 33, 4, 128, 64), (2, 65, 16, 256, 32), (1, 77, 5, 96, 20)]
    HEADS += [(2, 50, 16, 192, 32), (1, 1, 1, 64, 32)]


@runs
@pytest.mark.parametrize("normed", [None, False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_norm_and_rotate(interleaved: bool, normed: bool | None) -> None:
    from threefold.engine.kernels.elementwise.rotary import RotaryOptions, norm_and_rotate

    for batch, length, heads, dim, freqs in HEADS:
        angle = torch.rand(batch, length, freqs, device=DEVICE, dtype=torch.float64) * 100
        table = angle.cos().float(), angle.sin().float()
        options = RotaryOptions(interleaved, 1e-5, bool(normed))
        # The second half of every head is a gate, which is not rotated.
        x = leaf(batch, length, heads, 2 * dim)
        given = [x] if normed is None else [x, norm_of(dim, normed).weight]

        def ours(x: Any, weight: Any = None, dim: int = dim, table: Any = table, options: Any = options) -> Any:
            return norm_and_rotate(x[..., :dim], weight, table, options)

        def exact(x: Any, weight: Any = None, dim: int = dim, angle: Any = angle) -> Any:
            return rotated(x[..., :dim], weight, angle, interleaved, bool(normed))

        compare(ours, exact, given)


@pytest.mark.skipif(not INTERPRETED, reason="run by test_interpreter.py")
@pytest.mark.parametrize("normed", [False, True])
def test_head_strides_beyond_32_bits(normed: bool, tmp_path: Path) -> None:
    """The last of three heads starts beyond 2 ** 31 numbers, in a sparse file that is mapped into memory."""
    from threefold.engine.kernels.elementwise.rotary import RotaryOptions, norm_and_rotate

    apart = 2**30 + 64
    numbers = torch.from_file(str(tmp_path / "heads"), shared=True, size=2 * apart + 64, dtype=torch.float16)
    far_off = numbers.as_strided((1, 2, 3, 8), (0, 8, apart, 1))
    near = torch.randn(1, 2, 3, 8).half()
    far_off.copy_(near)
    weight = torch.ones(8, requires_grad=True) if normed else None
    angle = torch.rand(1, 2, 4)
    found = []
    for given in (far_off, near):
        x = given.detach().requires_grad_()
        out = norm_and_rotate(x, weight, (angle.cos(), angle.sin()), RotaryOptions(eps=1e-5))
        found.append((out, *torch.autograd.grad(out, [x] if weight is None else [x, weight], given)))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@runs
def test_heads_have_the_layout_of_the_plain_form() -> None:
    x, norm = leaf(2, 5, 3, 16), norm_of(16, False)
    table = rope.rope_tables(torch.arange(5, device=DEVICE).expand(2, 5), 8, 1e4, None)
    found = rope.norm_and_rotate_heads(x, norm, table)
    with without_fused_kernels():
        plain = rope.norm_and_rotate_heads(x, norm, table)
    assert found.shape == plain.shape == (2, 3, 5, 16)
    assert found.transpose(1, 2).is_contiguous()
    assert far(found, plain) < 2 * FAR  # the plain form rounds more often
    heads = leaf(2, 5, 3, 20).transpose(1, 2)[..., 7:15]
    found = rope.rotate(heads, table, pairs=True)
    with without_fused_kernels():
        plain = rope.rotate(heads, table, pairs=True)
    assert far(found, plain) < 2 * FAR


@runs
def test_silu_mul() -> None:
    for shape in [(3, 5)] if not HAS_GPU else [(1000, 2048), (7, 333)]:
        from threefold.engine.kernels.elementwise.silu_mul import silu_mul

        compare(silu_mul, lambda gate, up: gate * gate.sigmoid() * up, [leaf(*shape), leaf(*shape)])


KINDS = {
    "softmax": MoeSpec(12, 3, 8),
    "softmax, unnormed": MoeSpec(12, 3, 8, norm_topk=False, scale=2.0),
    "softmax, one": MoeSpec(5, 1, 8, norm_topk=False),
    "sigmoid": MoeSpec(16, 4, 8, score="sigmoid", scale=2.5),
    "sigmoid, unnormed": MoeSpec(6, 6, 8, score="sigmoid", norm_topk=False),
    "groups": MoeSpec(16, 3, 8, score="sigmoid", num_groups=4, top_groups=2, balance_bias=True),
    "softmax, groups and bias": MoeSpec(8, 2, 8, num_groups=4, top_groups=2, balance_bias=True),
}
LARGE = {
    "Qwen3": MoeSpec(128, 8, 8),
    "DeepSeek-V3": MoeSpec(256, 8, 8, score="sigmoid", num_groups=8, top_groups=4, balance_bias=True, scale=2.5),
    "GPT-OSS": MoeSpec(32, 4, 8, bias=True),
    "sixty": MoeSpec(60, 4, 8, norm_topk=False),
    "Qwen3-Next": MoeSpec(512, 10, 8),
}
ALL_KINDS = KINDS | (LARGE if HAS_GPU else {})


def router_of(spec: MoeSpec, dim: int, forced: bool = False) -> Any:
    router = Router(spec, dim, forced).to(DEVICE)
    torch.nn.init.normal_(router.weight, std=dim**-0.5)
    if router.balance_bias is not None:
        router.balance_bias.copy_(0.1 * torch.randn(spec.num_experts))
    return router.to(NARROW)


def chosen_by_hand(row: list[float], spec: MoeSpec) -> list[int]:
    """The K best experts, best first; the lower expert wins a tie. Groups are ranked by the sum of their best two."""
    size = spec.num_experts // spec.num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(spec.num_groups)]
    value = {g: sum(sorted((row[e] for e in groups[g]), reverse=True)[:2]) for g in range(spec.num_groups)}
    best = sorted(value, key=lambda g: (-value[g], g))[: spec.top_groups]
    allowed = [e for g in sorted(best) for e in groups[g]] if spec.num_groups > 1 else range(spec.num_experts)
    return sorted(allowed, key=lambda e: (-row[e], e))[: spec.top_k]


def scores(logits: Any, spec: MoeSpec) -> Any:
    return logits.softmax(dim=-1) if spec.score == "softmax" else logits.sigmoid()


@runs
@pytest.mark.parametrize("name", ALL_KINDS)
def test_chosen_experts_and_weights(name: str) -> None:
    spec = ALL_KINDS[name]
    for num_tokens in (37,) if not HAS_GPU else (1, 1037):
        from threefold.engine.kernels.elementwise.topk_router import route_logits

        router = router_of(spec, 8)
        logits = torch.randn(num_tokens, spec.num_experts, device=DEVICE).requires_grad_()
        if spec.score == "softmax" and not spec.balance_bias:
            # Logits are compared here: with few values, zeros of both signs among them, most rows have ties.
            logits = (torch.randint(-9, 9, logits.shape, device=DEVICE) / 4 * logits.detach().sign()).requires_grad_()
        made = route_logits(logits, router.balance_bias, router._router_options(num_tokens))
        score = scores(logits.detach().float(), spec)
        compared = logits.detach() if spec.score == "softmax" else score
        if router.balance_bias is not None:
            compared = score + router.balance_bias
        by_hand = [chosen_by_hand(row, spec) for row in compared.tolist()]
        assert made.expert_TK.tolist() == by_hand
        assert made.load_E.tolist() == numpy.bincount(numpy.ravel(by_hand), minlength=spec.num_experts).tolist()
        wide = logits.detach().double().requires_grad_()
        weight = scores(wide, spec).gather(1, made.expert_TK)
        weight = (weight / weight.sum(dim=1, keepdim=True) if spec.norm_topk else weight) * spec.scale
        slope = torch.randn_like(made.weight_TK)
        assert far(made.weight_TK, weight) < 1e-5  # fp32 either way
        (found,) = torch.autograd.grad(made.weight_TK, logits, slope)
        (best,) = torch.autograd.grad(weight, wide, slope.double())
        assert far(found, best) < 1e-5 if best.abs().max() > 1e-12 else found.abs().max() < 1e-6
        share = scores(wide.detach(), spec)
        share = share / share.sum(dim=1, keepdim=True)
        assert float(made.entropy) == pytest.approx(float(-(share * share.log()).sum(dim=1).mean()), rel=1e-4)


@runs
@pytest.mark.parametrize("name", ALL_KINDS)
def test_the_first_of_equal_experts_are_chosen(name: str) -> None:
    from threefold.engine.kernels.elementwise.topk_router import route_logits

    spec = ALL_KINDS[name]
    logits = torch.full((3, spec.num_experts), -0.7, device=DEVICE)
    bias = torch.zeros(spec.num_experts, device=DEVICE) if spec.balance_bias else None
    made = route_logits(logits, bias, router_of(spec, 8)._router_options(3))
    assert made.expert_TK.tolist() == [list(range(spec.top_k))] * 3


@pytest.mark.parametrize("name", ALL_KINDS)
def test_router(name: str) -> None:
    """The whole router with its losses, against the plain form in fp64 with the same experts."""
    spec, dim = ALL_KINDS[name], 24 if not HAS_GPU else 2048
    router, x = router_of(spec, dim), leaf(40 if not HAS_GPU else 4 * 1000, dim)
    exact = router_of(spec, dim).double()
    exact.load_state_dict({key: value.double() for key, value in router.state_dict().items()})

    def through(router: Any, x: Any, expert_TK: Any = None) -> Any:
        if expert_TK is not None:
            router.choose_experts = lambda logits, scores: expert_TK
        routing = router(x)
        measured = balance.compute_router_stats(routing, 4, ("aux", "seq_aux", "z"), torch.zeros(()))
        return routing, [routing.weight_TK, *measured.losses.values()], measured

    routing, found, measured = through(router, x)
    wide = x.detach().double().requires_grad_()
    _, expected, best = through(exact, wide, routing.expert_TK)
    slopes = [torch.randn_like(one) for one in found]
    made = torch.autograd.grad(found, [x, *router.parameters()], slopes)
    right = torch.autograd.grad(expected, [wide, *exact.parameters()], [s.double() for s in slopes])
    assert far(routing.logits_TE, exact.logits(wide)) < 1e-5  # fp32 sums of exact products
    for one, other in zip(found, expected, strict=True):
        assert far(one, other) < 1e-4
    for one, other in zip(made, right, strict=True):
        assert far(one, other) < FAR if other.abs().max() > 1e-12 else one.abs().max() < 1e-5
    assert torch.equal(measured.load_E, best.load_E)
    assert float(measured.entropy) == pytest.approx(float(best.entropy), rel=1e-4)


def test_forced_balance_and_nan_inputs() -> None:
    spec = KINDS["softmax"]
    router, x = router_of(spec, 16, forced=True), leaf(20, 16)
    router.expert_group_rank = 3
    found = router(x)
    with without_fused_kernels():
        plain = router(x)
    assert torch.equal(found.expert_TK, plain.expert_TK)
    assert far(found.weight_TK, plain.weight_TK) < FAR
    router.forced_balance = False
    routing = router(torch.full_like(x, float("nan")))
    assert 0 <= int(routing.expert_TK.min()) <= int(routing.expert_TK.max()) < spec.num_experts
    assert bool(routing.weight_TK.isnan().all())


@pytest.mark.parametrize("bias", [False, True])
def test_shared_input_linears(bias: bool) -> None:
    """Also with a `main_grad`, and where only two of three results are used."""
    from threefold.engine.autograd.linear import shared_input_linears

    widths, dim = ((6, 3, 5), 8) if not HAS_GPU else ((256, 64, 72), 512)
    made = [torch.nn.Linear(dim, width, bias=bias).to(DEVICE, NARROW) for width in widths]
    parameters = [p for linear in made for p in linear.parameters()]

    def ours(x: Any, *given: Any) -> Any:
        return shared_input_linears(x, [linear.weight for linear in made], [linear.bias for linear in made])

    def exact(x: Any, *given: Any) -> Any:
        step = 2 if bias else 1
        return [x @ given[n * step].T + (given[n * step + 1] if bias else 0) for n in range(3)]

    compare(ours, exact, [leaf(2, 7, dim), *parameters])
    made[0].weight._threefold_main_grad = torch.ones(made[0].weight.shape, device=DEVICE)
    x = leaf(4, dim)
    slope = torch.randn(4, widths[0], device=DEVICE, dtype=NARROW)
    assert torch.autograd.grad(ours(x)[0], made[0].weight, slope, allow_unused=True) == (None,)
    assert far(made[0].weight._threefold_main_grad, 1 + slope.double().T @ x.double()) < FAR
    first, _, last = ours(x)
    (found,) = torch.autograd.grad([first, last], x, [torch.ones_like(first), torch.ones_like(last)])
    assert far(found, made[0].weight.double().sum(0).expand(4, -1) + made[2].weight.double().sum(0)) < FAR


@pytest.mark.parametrize("drops", [False, True])
def test_rows(drops: bool) -> None:
    """Sort by expert, permute and sum back, against loops on the host."""
    num_tokens, top_k, num_experts, dim = (11, 3, 5, 70) if not HAS_GPU else (1001, 8, 60, 2880)
    chosen = torch.rand(num_tokens, num_experts).topk(top_k, dim=1).indices
    if drops:
        chosen[torch.rand(chosen.shape) < 0.3] = -1
        chosen[num_tokens // 2] = -1
    sort = permuted.sort_with_drops if drops else permuted.sort_by_expert
    rows, count_E = sort(chosen.to(DEVICE), num_experts)
    copies = sorted((e, t * top_k + k) for t, row in enumerate(chosen.tolist()) for k, e in enumerate(row) if e >= 0)
    assert count_E.tolist() == [sum(e == expert for e, _ in copies) for expert in range(num_experts)]
    assert rows.slot_R[: len(copies)].tolist() == [slot for _, slot in copies]
    rows = rows.truncate(len(copies))
    x, y = leaf(num_tokens, dim), leaf(len(copies), dim)
    token_R = torch.tensor([slot // top_k for _, slot in copies], device=DEVICE)
    compare(lambda x: rows.permute_tokens(x), lambda x: x[token_R], [x])
    compare(lambda y: rows.unpermute_sum(y), lambda y: y.new_zeros(num_tokens, dim).index_add(0, token_R, y), [y])


def test_padding_rows_are_zeros() -> None:
    slot_R, row_TK = torch.tensor([2, -1, 0, -1], device=DEVICE), torch.tensor([[2], [-1], [0]], device=DEVICE)
    rows, x, y = permuted.RowMap(slot_R, row_TK, padded=True), leaf(3, 80), leaf(4, 80)
    kept = torch.tensor([1.0, 0, 1], device=DEVICE, dtype=NARROW)[:, None]
    assert torch.equal(rows.permute_tokens(x), torch.stack([x[2], 0 * x[0], x[0], 0 * x[0]]))
    assert torch.equal(rows.unpermute_sum(y), y[[2, 0, 0]] * kept)


def test_without_a_gpu_plain_torch_runs() -> None:
    assert not runs_fused(torch.zeros(1, dtype=torch.float64))
    assert not runs_fused(torch.zeros(0))
    with without_fused_kernels():
        assert not runs_fused(torch.zeros(1))


@runs
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next"])
@pytest.mark.parametrize(
    "recompute",
    [
        pytest.param((), id="none", marks=pytest.mark.slow),
        pytest.param(("layernorm", "moe"), id="some"),
        pytest.param(("full",), id="full", marks=pytest.mark.slow),
    ],
)
def test_a_model_is_the_same_with_fused_kernels(family: str, recompute: tuple[str, ...]) -> None:
    """Loss and gradients in fp32, in which attention has a plain form on every device."""
    from tiny_models import spec_of

    from threefold.engine.model_options import Options
    from threefold.engine.models.build import build_model

    tokens = (torch.arange(26).view(2, 13) * 5 % 67).to(DEVICE)
    options = Options(aux_loss=0.01, z_loss=0.001, expert_backend="loop", recompute=recompute)
    found = []
    for off in (False, True):
        model = build_model(spec_of(family), dtype=torch.float32, device=DEVICE, options=options)
        with without_fused_kernels() if off else nullcontext():
            out = model(tokens, tokens.roll(-1, 1))
            out.loss.backward()
        grads = {name: p.grad for name, p in model.named_parameters()}
        found.append((out.loss.detach(), out.aux["entropy_L"], out.aux["load_LE"], grads))
    (loss, entropy, load, grads), (same, others_entropy, others_load, others) = found
    torch.testing.assert_close(loss, same, rtol=1e-6, atol=0)  # fp32 sums in another order
    torch.testing.assert_close(entropy, others_entropy, rtol=1e-5, atol=0)
    assert torch.equal(load, others_load)
    for name, grad in grads.items():
        # Gradients below 1e-6 are differences of far larger numbers.
        assert (grad - others[name]).norm() < 1e-4 * others[name].norm() + 1e-8, name


TOKENS = {
    "all different": list(range(90)),
    "drawn": [7 * n * n % 23 for n in range(200)],
    "runs over blocks": [3] * 10 + [5] * 200 + [1] * 54 + [96] * 64 + [0] * 3,
    "a run fills whole blocks": [4] * 64 + [9] * 128 + [2],
    "one token": [0],
    "all equal": [95] * 130,
}


@runs
@pytest.mark.parametrize(("kind", "dim"), [*((kind, 33) for kind in TOKENS), ("runs over blocks", 2050)])
def test_embedding_grad(kind: str, dim: int) -> None:
    """Rows of equal tokens are summed, all others are zeros, and the sums of squares are those of the gradient."""
    tokens = TOKENS[kind]
    order = torch.randperm(len(tokens))
    tokens_BS = torch.tensor(tokens, device=DEVICE)[order.to(DEVICE)].view(1, -1)
    weight_VD = torch.nn.Parameter(leaf(97, dim).detach())
    request_grad_squares(weight_VD, True)
    out_BSD, slope_BSD = embedding.embed(tokens_BS, weight_VD), leaf(1, len(tokens), dim).detach()
    assert torch.equal(out_BSD, weight_VD[tokens_BS])
    out_BSD.backward(slope_BSD)
    expected_VD = torch.zeros(97, dim, dtype=torch.float64, device=DEVICE)
    expected_VD.index_add_(0, tokens_BS[0], slope_BSD[0].double())
    assert far(weight_VD.grad, expected_VD) < FAR
    assert not weight_VD.grad[expected_VD.eq(0).all(1)].any()
    squares = grad_squares_of(weight_VD)
    if runs_fused(weight_VD):
        assert squares is not None
        assert squares.sum().item() == pytest.approx(weight_VD.grad.double().square().sum().item(), rel=1e-5)


@pytest.mark.skipif(not gluon_known(), reason="needs a release of triton that kernels were written for")
def test_embedding_kernels_compile_without_a_gpu() -> None:
    """Triton 3.6 cannot compile a `while` around a tensor, which its interpreter runs."""
    from threefold.engine.kernels.elementwise import embedding_triton

    sizes = {"D": 2050, "POSITIONS": 64, "COLUMNS": 2048}
    tensors = {"grad_ptr": "*bf16", "out_ptr": "*bf16", "part_ptr": "*fp32", "squares_ptr": "*fp32"}
    kinds = {**tensors, "sorted_ptr": "*i32", "order_ptr": "*i64", "T": "i32"}
    compile_triton(embedding_triton._sum_embedding_runs, kinds, sizes, num_warps=8)
    del kinds["grad_ptr"], kinds["order_ptr"]
    compile_triton(embedding_triton._sum_embedding_parts, kinds, sizes, num_warps=8)
