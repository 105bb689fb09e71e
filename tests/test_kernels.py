"""The experts' kernels: the plain steps against the engine's own experts in fp64, the fast ones against the plain ones.

On a machine without a GPU the fast ones run where triton's interpreter is installed, on tiny sizes in fp32.

Shapes: T tokens, K experts of a token, R rows, D model dim, E experts, H expert dim.
"""

import importlib.util
import os
from dataclasses import fields, replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from threefold.engine.kernels import choose as chosen  # noqa: E402
from threefold.engine.kernels.choose import Choice, Shape  # noqa: E402
from threefold.engine.kernels.experts import fused_experts, grouped_experts  # noqa: E402
from threefold.engine.kernels.launch import Config  # noqa: E402
from threefold.engine.kernels.sort import Rows, sort_rows  # noqa: E402
from threefold.engine.moe.experts import Experts  # noqa: E402

HAS_TRITON = importlib.util.find_spec("triton") is not None
HAS_HOPPER = HAS_TRITON and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SMALL = Config(m=16, n=32, k=16, strip=16)
KINDS = [("silu", False), ("clamped swiglu", True)]
LOADS = ["spread", "empty experts", "one takes all", "one each"]


pytestmark = pytest.mark.usefixtures("one_thread")


def experts_of(num_tokens: int, top_k: int, num_experts: int, load: str) -> Any:
    """The experts of tokens: (T, K), each token's distinct but where one takes all."""
    if load == "one takes all":
        return torch.full((num_tokens, top_k), num_experts - 2)
    usable = num_experts // 2 if load == "empty experts" else num_experts
    chosen_TK = torch.rand(num_tokens, usable).topk(min(top_k, usable), dim=1).indices
    return chosen_TK[:, :1] if load == "one each" else chosen_TK


def module(num_experts: int, dim: int, expert_dim: int, activation: str, bias: bool) -> Any:
    experts = Experts(num_experts, dim, expert_dim, bias, activation, backend="loop")
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return experts


def parts_of(experts: Any) -> list[Any]:
    return [experts.gate_up, experts.down, experts.gate_up_bias, experts.down_bias]


def plain(experts: Any, x_TD: Any, weight_TK: Any, expert_TK: Any) -> Any:
    """Sorted, computed expert by expert and summed back by autograd's own operations."""
    order_R = expert_TK.flatten().argsort(stable=True)
    count_E = torch.bincount(expert_TK.flatten(), minlength=len(experts.down))
    y_RD = experts(x_TD[order_R // expert_TK.shape[1]], weight_TK.flatten()[order_R], count_E)
    return y_RD[order_R.argsort()].unflatten(0, expert_TK.shape).sum(dim=1)


def fused(experts: Any, x_TD: Any, weight_TK: Any, expert_TK: Any, activation: str, choice: Choice | None) -> Any:
    return fused_experts(x_TD, weight_TK, expert_TK, *parts_of(experts), activation, choice=choice)


def by_rows(experts: Any, x_TD: Any, weight_TK: Any, expert_TK: Any, activation: str, choice: Choice | None) -> Any:
    order_R = expert_TK.flatten().argsort(stable=True)
    count_E = torch.bincount(expert_TK.flatten(), minlength=len(experts.down))
    x_RD, weight_R = x_TD[order_R // expert_TK.shape[1]], weight_TK.flatten()[order_R]
    y_RD = grouped_experts(x_RD, weight_R, count_E, *parts_of(experts), activation, choice=choice)
    return y_RD[order_R.argsort()].unflatten(0, expert_TK.shape).sum(dim=1)


def gradients(y: Any, experts: Any, x_TD: Any, weight_TK: Any, slope: Any) -> list[Any]:
    return [y, *torch.autograd.grad(y, [x_TD, weight_TK, *experts.parameters()], slope)]


def far(found: Any, expected: Any) -> float:
    """Distance over length, nan where a value is."""
    found, expected = found.detach().double(), expected.detach().double()
    length = expected.norm()
    return float((found - expected).norm() / length if length else found.norm())


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_what_nobody_wrote_shows(dtype: Any) -> None:
    """On this device, and of every size: small ones come from other memory than large ones on a GPU."""
    like = torch.zeros(3, dtype=dtype, device="cuda" if HAS_HOPPER else "cpu")
    for size in (3, 1 << 22):
        for made in (torch.empty(size, dtype=dtype, device=like.device), like.new_empty(size), torch.empty_like(like)):
            assert made.float().isnan().all()


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(("activation", "bias"), KINDS)
@pytest.mark.parametrize("path", [fused, by_rows])
def test_plain_steps_equal_autograd(path: Any, activation: str, bias: bool, load: str) -> None:
    experts = module(6, 10, 7, activation, bias).double()
    expert_TK = experts_of(13, 3, 6, load)
    x_TD = torch.randn(13, 10, dtype=torch.float64, requires_grad=True)
    weight_TK = torch.rand(expert_TK.shape, dtype=torch.float64, requires_grad=True)
    slope = torch.randn(13, 10, dtype=torch.float64)
    found = gradients(path(experts, x_TD, weight_TK, expert_TK, activation, None), experts, x_TD, weight_TK, slope)
    expected = gradients(plain(experts, x_TD, weight_TK, expert_TK), experts, x_TD, weight_TK, slope)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)  # fp64 leaves about 1e-15


def test_no_rows_at_all() -> None:
    experts = module(4, 6, 5, "clamped swiglu", True).double()
    x_RD = torch.randn(0, 6, dtype=torch.float64, requires_grad=True)
    weight_R = torch.rand(0, dtype=torch.float64, requires_grad=True)
    count_E = torch.zeros(4, dtype=torch.long)
    y_RD = grouped_experts(x_RD, weight_R, count_E, *parts_of(experts), "clamped swiglu")
    y_RD.sum().backward()
    assert y_RD.shape == (0, 6)
    assert all(parameter.grad.abs().sum() == 0 for parameter in experts.parameters())


def test_rows_are_sorted_by_expert_and_keep_token_order() -> None:
    expert_TK = torch.tensor([[2, 0], [0, 3], [3, 2]])
    rows = sort_rows(expert_TK, 5)
    assert rows.slot_R.tolist() == [1, 2, 0, 5, 3, 4]
    assert rows.token_R.tolist() == [0, 1, 0, 2, 1, 2]
    assert rows.row_TK.tolist() == [[2, 0], [1, 4], [5, 3]]
    assert rows.ends_E.tolist() == [2, 2, 4, 6, 6]


def test_a_frozen_expert_gets_no_gradient() -> None:
    experts = module(4, 6, 5, "silu", False).double()
    experts.gate_up.requires_grad_(False)
    x_TD, expert_TK = torch.randn(3, 6, dtype=torch.float64), experts_of(3, 2, 4, "spread")
    fused(experts, x_TD, torch.rand(3, 2, dtype=torch.float64), expert_TK, "silu", None).sum().backward()
    assert experts.gate_up.grad is None
    assert experts.down.grad is not None


def test_only_the_input_and_fc1_are_kept() -> None:
    """Qwen3-30B-A3B in bf16 may keep 30,000 bytes a token: 2 * 2048 for x and 8 * 2 * 768 * 2 for FC1 are 28,672."""
    experts = module(4, 16, 8, "silu", False)
    expert_TK = experts_of(5, 2, 4, "spread")
    x_TD, weight_TK = torch.randn(5, 16, requires_grad=True), torch.rand(5, 2, requires_grad=True)
    kept: dict[int, int] = {}

    def note(tensor: Any) -> Any:
        kept[tensor.data_ptr()] = tensor.numel() * tensor.dtype.is_floating_point
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        fused(experts, x_TD, weight_TK, expert_TK, "silu", None)
    weights = experts.gate_up.numel() + experts.down.numel()
    assert sum(kept.values()) - weights == 5 * 16 + 5 * 2 * (2 * 8) + 5 * 2


def test_a_choice_is_kept_on_disk_and_found_again(tmp_path: Any, monkeypatch: Any) -> None:
    shape, other = Shape(1000, 8, 64, 32, gathered=True), Shape(1000, 8, 64, 32, gathered=False)
    monkeypatch.setattr(chosen, "cache_file", lambda device: tmp_path / "deep" / "experts.json")
    cuda = torch.device("cuda")
    for kept in (Choice(up=Config(n=64)), Choice(up_grad=SMALL)):
        chosen.save(cuda, shape, kept)
        assert chosen._measured(cuda) == {f"{shape.key} auto": kept}
    assert Shape(800, 8, 64, 32, gathered=True).key == shape.key  # both nearest to 1,024 rows
    assert other.key != shape.key
    (tmp_path / "deep" / "experts.json").write_text("{ broken")
    chosen._measured.cache_clear()
    assert chosen._measured(cuda) == {}
    chosen._measured.cache_clear()


def test_without_a_gpu_plain_torch_is_chosen() -> None:
    wide = torch.zeros(1, dtype=torch.float64)
    assert chosen.choose(Shape(8, 2, 16, 16, gathered=True), wide) is None


@pytest.mark.usefixtures("poisoned")
@pytest.mark.skipif(not INTERPRETED, reason="run by test_interpreter.py")
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(("activation", "bias"), KINDS)
@pytest.mark.parametrize("path", [fused, by_rows])
def test_interpreted(path: Any, activation: str, bias: bool, load: str) -> None:
    agree_interpreted(path, activation, bias, load, SMALL)


def agree_interpreted(path: Any, activation: str, bias: bool, load: str, config: Config) -> None:
    experts = module(6, 24, 40, activation, bias)
    expert_TK = experts_of(19, 3, 6, load)
    x_TD, weight_TK = torch.randn(19, 24, requires_grad=True), torch.rand(expert_TK.shape, requires_grad=True)
    slope, choice = torch.randn(19, 24), Choice(*[config] * 6)
    found = gradients(path(experts, x_TD, weight_TK, expert_TK, activation, choice), experts, x_TD, weight_TK, slope)
    expected = gradients(plain(experts, x_TD, weight_TK, expert_TK), experts, x_TD, weight_TK, slope)
    assert max(far(one, other) for one, other in zip(found, expected, strict=True)) < 1e-5  # fp32 sums of 40


@pytest.mark.usefixtures("poisoned")
@pytest.mark.skipif(not INTERPRETED, reason="run by test_interpreter.py")
@pytest.mark.parametrize("path", [fused, by_rows])
def test_interpreted_in_one_loop(path: Any) -> None:
    agree_interpreted(path, "clamped swiglu", True, "empty experts", replace(SMALL, flat=True))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.skipif(not INTERPRETED, reason="run by test_interpreter.py")
def test_interpreted_router_weights_may_lie_apart() -> None:
    """As a column of a wider tensor does."""
    experts, count_E = module(3, 24, 40, "silu", False), torch.tensor([4, 0, 5])
    x_RD, slope = torch.randn(9, 24, requires_grad=True), torch.randn(9, 24)
    weight_R = torch.rand(9, requires_grad=True)
    found, expected = (
        gradients(
            grouped_experts(x_RD, one, count_E, *parts_of(experts), choice=Choice(*[SMALL] * 6)),
            experts, x_RD, weight_R, slope,
        )
        for one in (torch.stack([weight_R, -weight_R], dim=1)[:, 0], weight_R)
    )  # fmt: skip
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.skipif(not INTERPRETED, reason="run by test_interpreter.py")
@pytest.mark.parametrize("counts", [[3], [0, 5, 2, 5, 0], [7, 1, 4] * 25])
def test_interpreted_experts_go_by_their_rows(counts: list[int]) -> None:
    from threefold.engine.kernels.tiles import order_of

    ends_E = torch.tensor(counts, dtype=torch.int32).cumsum(0).to(torch.int32)
    assert order_of(ends_E).tolist() == sorted(range(len(counts)), key=lambda expert: -counts[expert])


@pytest.mark.usefixtures("poisoned")
@pytest.mark.skipif(not (INTERPRETED or HAS_HOPPER), reason="needs a Hopper GPU or test_interpreter.py")
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts"), [(1, 1, 1), (128, 1, 3), (129, 1, 3), (43, 9, 200), (150, 9, 513)]
)
def test_interpreted_sort_by_counting(num_tokens: int, top_k: int, num_experts: int) -> None:
    """Up to one chunk of 128 rows and beyond, and beyond the 1,024 values that `take` brings back at a time."""
    from threefold.engine.kernels.counting import counting_sort
    from threefold.engine.kernels.elementwise import take

    device = "cuda" if HAS_HOPPER else "cpu"
    expert_TK = torch.randint(num_experts, (num_tokens, 2 * top_k), device=device)[:, ::2]
    weight_TK = torch.rand(top_k, num_tokens, device=device).T
    found, expected = (sort(expert_TK, num_experts, weight_TK) for sort in (counting_sort, sort_rows))
    for field in fields(Rows):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        assert one.dtype == other.dtype
        assert torch.equal(one, other), field.name
    assert torch.equal(take(found.weight_R, found.row_TK), weight_TK)
    assert found.token_R.data_ptr() % 16 == 0
    assert counting_sort(expert_TK, num_experts).weight_R is None


OURS = Choice(
    up=Config(n=128, stages=4),
    down=Config(flat=True),
    act_grad=Config(stages=4, strip=32),
    input_grad=Config(stages=4),
    up_grad=Config(m=256, n=128, stages=4),
    down_grad=Config(stages=4),
)
SIZES = [(300, 4, 8, 256, 192), (1000, 2, 5, 136, 72), (77, 1, 3, 64, 512), (600, 8, 16, 512, 256)]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(("activation", "bias"), KINDS)
@pytest.mark.parametrize("choice", [OURS, Choice()], ids=["ours", "grouped"])
@pytest.mark.parametrize("path", [fused, by_rows])
def test_on_a_gpu(path: Any, choice: Choice, activation: str, bias: bool, load: str) -> None:
    """In bf16, no further from fp64 than twice the engine's own experts in bf16 are."""
    for num_tokens, top_k, num_experts, dim, expert_dim in SIZES:
        exact = module(num_experts, dim, expert_dim, activation, bias).to("cuda", torch.bfloat16).double()
        narrow = module(num_experts, dim, expert_dim, activation, bias).to("cuda", torch.bfloat16)
        narrow.load_state_dict(exact.state_dict())
        expert_TK = experts_of(num_tokens, top_k, num_experts, load).cuda()
        x_TD = torch.randn(num_tokens, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight_TK = torch.rand(expert_TK.shape, device="cuda", requires_grad=True)
        slope = torch.randn_like(x_TD)
        found = gradients(path(narrow, x_TD, weight_TK, expert_TK, activation, choice), narrow, x_TD, weight_TK, slope)
        eager = gradients(plain(narrow, x_TD, weight_TK, expert_TK), narrow, x_TD, weight_TK, slope)
        wide = [tensor.detach().double().requires_grad_() for tensor in (x_TD, weight_TK)]
        expected = gradients(plain(exact, *wide, expert_TK), exact, *wide, slope.double())
        for one, usual, best in zip(found, eager, expected, strict=True):
            assert far(one, best) <= 2 * far(usual, best) + 1e-3


@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
def test_never_waits_for_the_gpu_and_repeats_itself() -> None:
    experts = module(8, 128, 64, "clamped swiglu", True).to("cuda", torch.bfloat16)
    expert_TK = experts_of(500, 3, 8, "spread").cuda()
    x_TD = torch.randn(500, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight_TK = torch.rand(500, 3, device="cuda", requires_grad=True)
    slope, count_E = torch.randn_like(x_TD), torch.bincount(expert_TK.flatten(), minlength=8)
    x_RD, weight_R = x_TD.repeat(3, 1), weight_TK.flatten()
    found = []
    for _ in range(3):  # the first compiles, and may wait
        y_RD = grouped_experts(x_RD, weight_R, count_E, *parts_of(experts), "clamped swiglu")
        y_TD = fused(experts, x_TD, weight_TK, expert_TK, "clamped swiglu", None)
        found.append([*gradients(y_TD, experts, x_TD, weight_TK, slope), y_RD])
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(one, other) for one, other in zip(found[1], found[2], strict=True))


@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("gathered", [True, False])
def test_a_tuned_shape_is_found_again(gathered: bool, tmp_path: Any, monkeypatch: Any) -> None:
    from threefold.engine.kernels.tune import tune

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    chosen._measured.cache_clear()
    shape, device = Shape(1024, 8, 256, 128, gathered), torch.device("cuda", 0)
    kept = tune(shape, 4, device)
    assert chosen.choose(shape, torch.zeros(1, device=device, dtype=torch.bfloat16)) == kept
    chosen._measured.cache_clear()


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next"])
def test_a_model_with_fused_experts_equals_one_without(family: str) -> None:
    """knobs.expert_fusion, in fp64 on the CPU: the reference steps in place of the kernels, the same wiring."""
    from tiny_models import spec_of

    from threefold.engine.models.build import build_model
    from threefold.engine.options import Options

    tokens = torch.arange(26).view(2, 13) * 5 % 67
    found = []
    plain = Options(aux_loss=0.01, expert_backend="loop")
    for options in (plain, replace(plain, expert_fusion=True)):
        model = build_model(spec_of(family), dtype=torch.float64, options=options)
        out = model(tokens, tokens.roll(-1, 1))
        out.loss.backward()
        found.append((out.loss.detach(), {name: p.grad for name, p in model.named_parameters()}))
    (loss, grads), (same, others) = found
    torch.testing.assert_close(same, loss, rtol=1e-12, atol=0)
    for name, grad in grads.items():
        torch.testing.assert_close(others[name], grad, rtol=1e-10, atol=1e-14, msg=name)
