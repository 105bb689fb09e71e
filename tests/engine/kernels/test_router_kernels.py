"""Tests of the fused router: balancing losses, the sort that begins in it, and the launch of its kernels.

Losses and gradients are compared with the plain forms of `moe/router.py` and `moe/balance.py` in fp64. Without a GPU
the tests run in Triton's interpreter, in fp32 (see `test_interpreter.py`).

Shapes: T tokens, D model dim, E experts, K experts of a token.
"""

import importlib.util
import itertools
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from threefold.engine.batch import Padding
from threefold.engine.kernels.availability import without_fused_kernels
from threefold.engine.kernels.elementwise import topk_router
from threefold.engine.model_options import Options
from threefold.engine.moe import balance
from threefold.engine.moe.layer import MoeLayer
from threefold.engine.moe.router import Router
from threefold.spec.model import MoeSpec

HAS_TRITON = importlib.util.find_spec("triton") is not None
HAS_GPU = HAS_TRITON and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
DEVICE = "cuda" if HAS_GPU else "cpu"
runs = pytest.mark.skipif(
    not (HAS_GPU or os.environ.get("TRITON_INTERPRET") == "1"), reason="needs a Hopper GPU or test_interpreter.py"
)
pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = {
    "softmax": MoeSpec(12, 3, 8),
    "softmax, unnormed": MoeSpec(12, 3, 8, norm_topk=False, scale=2.0),
    "sigmoid": MoeSpec(16, 4, 8, score="sigmoid", scale=2.5),
    "groups": MoeSpec(32, 3, 8, score="sigmoid", num_groups=4, top_groups=2, balance_bias=True),
    "a bias of the logits": MoeSpec(8, 2, 8, bias=True),
}
LARGE = {
    "Qwen3": MoeSpec(128, 8, 8),
    "DeepSeek-V3": MoeSpec(256, 8, 8, score="sigmoid", num_groups=8, top_groups=4, balance_bias=True, scale=2.5),
    "Qwen3-Next": MoeSpec(512, 10, 8),
}
ALL_KINDS = KINDS | (LARGE if HAS_GPU else {})
DIM = 16
LOSSES = ("aux", "seq_aux", "z")


def router_of(spec: MoeSpec, dtype: torch.dtype) -> Any:
    router = Router(spec, DIM).to(DEVICE)
    torch.nn.init.normal_(router.weight, std=DIM**-0.5)
    if router.balance_bias is not None:
        router.balance_bias.copy_(0.1 * torch.randn(spec.num_experts))
    if router.bias is not None:
        torch.nn.init.normal_(router.bias)
    return router.to(dtype)


def far(found: Any, expected: Any) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


def plain_results(
    router: Any, x_TD: Any, expert_TK: Any, losses: tuple[str, ...], sequences: int, padding: Padding | None = None
) -> list[Any]:
    """Router weights and losses of the plain form in fp64, with the same experts."""
    exact = Router(router.spec, DIM).to(DEVICE).double()
    exact.load_state_dict({key: value.double() for key, value in router.state_dict().items()})
    exact.choose_experts = lambda logits, scores: expert_TK
    wide = x_TD.detach().double().requires_grad_()
    routing = exact(wide, padding=padding)
    assert not routing.losses
    stats = balance.compute_router_stats(routing, sequences, losses, torch.zeros(()))
    return [wide, exact, [routing.weight_TK, *stats.losses.values()], stats]


@runs
@pytest.mark.parametrize(
    ("name", "losses", "pads"),
    [
        *((name, LOSSES, False) for name in ALL_KINDS),
        *((name, ("aux", "z"), False) for name in ALL_KINDS if name != "softmax, unnormed"),
        ("sigmoid", ("seq_aux",), False),
        ("softmax", ("z",), False),
        *((name, LOSSES, True) for name in ALL_KINDS),
        ("softmax, unnormed", ("aux",), True),
    ],
)
def test_interpreted_losses_and_gradients(name: str, losses: tuple[str, ...], pads: bool) -> None:
    """Sequences of whole programs, and for losses of the whole microbatch a number of tokens that is not."""
    spec, limit = ALL_KINDS[name], 4e-3 if HAS_GPU else 2e-5  # bf16 gradients on a GPU, else fp32
    tokens = topk_router.tokens_per_program(spec.num_experts, spec.top_k)
    num_tokens = 3 * 2 * tokens if "seq_aux" in losses else 2 * tokens + 5
    router = router_of(spec, torch.bfloat16 if HAS_GPU else torch.float32)
    x_TD = torch.randn(num_tokens, DIM).to(DEVICE, router.weight.dtype).requires_grad_()
    padding = None
    if pads:  # two ends of sequences and one that is padding alone; else only the first sequence is padded
        lengths = torch.tensor([num_tokens // 3 - 7, 0, 5] if "seq_aux" in losses else [num_tokens - 9])
        is_padding_BS = torch.arange(num_tokens // len(lengths)) >= lengths[:, None]
        padding = Padding(is_padding_BS.to(DEVICE), lengths.to(DEVICE))
    routing = router(x_TD, losses, 3, padding)
    assert set(routing.losses) == set(losses)
    found = [routing.weight_TK, *(routing.losses[one] for one in losses)]
    wide, exact, expected, stats = plain_results(router, x_TD, routing.expert_TK, losses, 3, padding)
    for one, other in zip(found, expected, strict=True):
        assert far(one, other) < 1e-4
    if padding is not None:
        assert not routing.weight_TK[padding.is_padding_BS.flatten()].any()
        assert int(stats.load_E.sum()) == int(padding.num_useful_B.sum()) * spec.top_k
    assert routing.load_E.tolist() == stats.load_E.tolist()
    assert float(routing.entropy) == pytest.approx(float(stats.entropy), rel=1e-4)
    for chosen in itertools.chain([range(len(found))], ([n] for n in range(1, len(found)))):
        slopes = [torch.randn_like(found[n]) for n in chosen]
        made = torch.autograd.grad([found[n] for n in chosen], [x_TD, *router.parameters()], slopes, retain_graph=True)
        wide_slopes = [slope.double() for slope in slopes]
        right = torch.autograd.grad(
            [expected[n] for n in chosen], [wide, *exact.parameters()], wide_slopes, retain_graph=True
        )
        assert all(far(one, other) < limit for one, other in zip(made, right, strict=True))


@runs
@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
def test_interpreted_gemm_inside_and_gradient_of_logits(name: str) -> None:
    """`route_tokens` is the GEMM and `route_logits`; gradients of the logits and of the tokens themselves are added."""
    router = router_of(KINDS[name], torch.bfloat16 if HAS_GPU else torch.float32)
    x_TD = torch.randn(70, DIM).to(DEVICE, router.weight.dtype).requires_grad_()
    options = router._router_options(70, ("aux",), 1)
    inside = topk_router.route_tokens(x_TD, router.weight, None, options)
    outside = topk_router.route_logits(x_TD.float() @ router.weight.float().t(), None, options)
    assert torch.equal(inside.expert_TK, outside.expert_TK)
    slopes = [torch.randn_like(inside.weight_TK), torch.randn_like(inside.logits_TE), torch.ones((), device=DEVICE)]
    slopes.append(torch.randn_like(x_TD))
    assert inside.x_TD is not None
    assert outside.x_TD is None
    assert topk_router.route_tokens(x_TD.detach(), router.weight, None, options).x_TD is None
    grads = [
        torch.autograd.grad(
            [made.weight_TK, made.logits_TE, made.losses["aux"], 3 * tokens_TD], [x_TD, router.weight], slopes
        )
        for made, tokens_TD in ((inside, inside.x_TD), (outside, x_TD))
    ]
    assert all(far(one, other) < (4e-3 if HAS_GPU else 1e-5) for one, other in zip(*grads, strict=True))


def test_losses_of_sequences_that_programs_would_cross_are_left_to_torch() -> None:
    assert topk_router.computes_losses(("seq_aux",), 4 * 16, 4, 128, 8)
    assert not topk_router.computes_losses(("seq_aux",), 4 * 17, 4, 128, 8)
    assert topk_router.computes_losses(("aux", "z"), 4 * 17, 4, 128, 8)
    assert not topk_router.computes_losses(("another",), 64, 1, 128, 8)


@runs
@pytest.mark.parametrize("name", ALL_KINDS)
def test_interpreted_sort_continues_what_the_router_began(name: str) -> None:
    from threefold.engine.kernels.experts.counting_sort import counting_sort, finish_sort
    from threefold.engine.kernels.experts.sorted_rows import sort_rows

    spec = ALL_KINDS[name]
    num_tokens = 3 * topk_router.tokens_per_program(spec.num_experts, spec.top_k) + 1
    router = router_of(spec, torch.float32)
    lengths = torch.tensor([num_tokens - 5], device=DEVICE)  # rows are sorted with those of padding among them
    padding = Padding(torch.arange(num_tokens, device=DEVICE)[None] >= lengths[:, None], lengths)
    routing = router(torch.randn(num_tokens, DIM, device=DEVICE), padding=padding)
    assert routing.starts is not None
    expected = sort_rows(routing.expert_TK, spec.num_experts, routing.weight_TK)
    for found in (
        finish_sort(routing.expert_TK, routing.weight_TK, routing.starts),
        counting_sort(routing.expert_TK, spec.num_experts, routing.weight_TK),
    ):
        for field in ("slot_R", "token_R", "row_TK", "ends_E", "starts_F", "weight_R"):
            assert torch.equal(getattr(found, field), getattr(expected, field)), field


@runs
def test_interpreted_layer_has_the_losses_of_the_plain_form() -> None:
    torch.manual_seed(0)
    layer = MoeLayer(MoeSpec(8, 2, 16), DIM, "silu", Options(aux_loss=1.0, z_loss=1.0)).to(DEVICE)
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    x_BSD = torch.randn(2, 9, DIM, device=DEVICE)
    fused = layer(x_BSD)[1]
    with without_fused_kernels():
        plain = layer(x_BSD)[1]
    assert list(fused.losses) == list(plain.losses) == ["aux", "z"]
    assert all(far(fused.losses[one], plain.losses[one]) < 1e-5 for one in fused.losses)


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
def test_arguments_of_one_kind_are_of_one_kind_for_triton() -> None:
    """Where `fast_launch` finds a compiled kernel by its key, Triton would have found the same one."""
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend

    from threefold.engine.kernels.fast_launch import TensorBlocks, launch_key

    backend = CUDABackend(GPUTarget("cuda", 90, 32))
    numbers = [0, 1, 2, 7, 16, 48, -1, -16, 2**31 - 1, 2**31 - 16, 2**31, 2**31 + 1, -(2**31), -(2**31) - 16, True, 0.5]
    whole = torch.zeros(64, 64)
    tensors = [whole, whole.view(-1)[1:], whole.view(-1)[4:], whole.bfloat16(), whole.long(), torch.nn.Parameter(whole)]
    blocks = [TensorBlocks(one, [16, n]) for one in (whole, whole.bfloat16()) for n in (16, 32)]
    arguments = [*numbers, None, *tensors, *blocks]
    seen: dict[Any, Any] = {}
    for given in [*itertools.product(arguments, tensors), *itertools.product(tensors, arguments)]:
        seen_by_triton = [one.descriptor() if isinstance(one, TensorBlocks) else one for one in given]
        theirs = [native_specialize_impl(backend, one, False, True, True) for one in seen_by_triton]
        assert seen.setdefault(launch_key(0, given, (False, False), {}), theirs) == theirs, given
    assert len(seen) > 100
    assert launch_key(0, (1, 7), (False, True), {}) != launch_key(0, (1, 8), (False, True), {})
    assert launch_key(0, (1,), (False,), {"A": 1}) != launch_key(0, (1,), (False,), {"A": 2})


class FakeParameter:
    def __init__(self, name: str) -> None:
        self.name, self.is_constexpr = name, name.isupper()


class FakeLauncher:
    """What Triton 3.6 makes for a compiled kernel, but for the launch itself: it keeps the arguments in a list."""

    launch_cooperative_grid, launch_pdl, global_scratch_size, profile_scratch_size = False, False, 0, 0

    def __init__(self, launched: list[Any], wraps: bool) -> None:
        def launcher(*args: Any) -> None:
            launched.append(args)

        def wrapper(*args: Any) -> None:
            raise AssertionError(f"descriptors are made by {launcher}")

        self.launch = wrapper if wraps else launcher


class FakeKernel:
    """Stands for a `triton.jit` function on a machine without a GPU."""

    def __init__(self, *names: str, descriptors: tuple[str, ...] = ()) -> None:
        self.params = [FakeParameter(name) for name in names]
        self.compiled: list[Any] = []  # the arguments of launches that went through Triton
        self.launched: list[Any] = []  # those of the others
        self.descriptors = descriptors

    def __getitem__(self, grid: Any) -> Any:
        def compile_and_launch(*args: Any, **named: Any) -> Any:
            self.compiled.append(args)
            run = FakeLauncher(self.launched, bool(self.descriptors))
            metadata = SimpleNamespace(tensordesc_meta=list(self.descriptors))
            return SimpleNamespace(run=run, metadata=metadata, function="function", packed_metadata="packed")

        return compile_and_launch


@pytest.fixture
def fake_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)


FIXED = 77, "function", False, False, None, None, "packed", None, None, None


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
@pytest.mark.usefixtures("fake_stream")
def test_a_compiled_kernel_is_found_again_and_gets_all_arguments() -> None:
    from threefold.engine.kernels.fast_launch import _FastKernel

    jit, x = FakeKernel("x", "n", "SIZE", "FLAG"), torch.zeros(4)
    kernel = _FastKernel(jit)
    kernel[(3,)](x, 5, 8, FLAG=True, num_warps=4)
    assert (len(jit.compiled), jit.launched) == (1, [])
    kernel[(9, 2)](x, 7, 8, FLAG=True, num_warps=4)
    assert len(jit.compiled) == 1
    assert jit.launched == [(9, 2, 1, *FIXED, x, 7, 8, True)]
    for other in ((x, 16, 8), (x, 5, 16), (x.double(), 5, 8)):
        kernel[(1,)](*other, FLAG=True, num_warps=4)
    kernel[(1,)](x, 5, 8, FLAG=False, num_warps=4)
    kernel[(1,)](x, 5, 8, FLAG=True, num_warps=8)
    assert (len(jit.compiled), len(jit.launched)) == (6, 1)


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
@pytest.mark.usefixtures("fake_stream")
def test_descriptors_are_made_once_for_an_address_and_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    from threefold.engine.kernels import fast_launch

    made: list[Any] = []

    def make_map(arg: Any, metadata: Any) -> tuple[Any, ...]:
        made.append((metadata, *arg.base.shape))
        return (f"map {len(made)}", *arg.base.shape, *arg.base.stride())

    monkeypatch.setattr(fast_launch, "_make_map", make_map)
    jit = FakeKernel("a", "n", "b", descriptors=("meta a", "meta b"))
    kernel, x = fast_launch._FastKernel(jit), torch.zeros(32, 16)

    def launch(a: Any, b: Any) -> None:
        kernel[(1,)](fast_launch.TensorBlocks(a, [8, 8]), 5, fast_launch.TensorBlocks(b, [16, 8]))

    launch(x, x)
    assert [type(arg).__name__ for arg in jit.compiled[0]] == ["TensorDescriptor", "int", "TensorDescriptor"]
    launch(x, x)
    launch(x, x)
    launch(x[:16], x)
    assert made == [("meta a", 32, 16), ("meta b", 32, 16), ("meta a", 16, 16)]
    last = ("map 3", 16, 16, 16, 1, 5, "map 2", 32, 16, 16, 1)
    assert [args[13:] for args in jit.launched] == [("map 1", 32, 16, 16, 1, 5, *last[6:])] * 2 + [last]
    kernel[(1,)](fast_launch.TensorBlocks(x, [8, 16]), 5, fast_launch.TensorBlocks(x, [16, 8]))
    assert len(jit.compiled) == 2  # another block is another kernel
