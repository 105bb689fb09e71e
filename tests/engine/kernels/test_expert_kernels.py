"""Tests of the expert kernels: the reference steps against autograd in fp64, and the kernels against plain torch.

Without a GPU the Triton kernels run in Triton's interpreter, on tiny sizes in fp32 (see `test_interpreter.py`).

Shapes: T tokens, K experts of a token, R rows, D model dim, E experts, H expert dim.
"""

import importlib.util
import os
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from expert_cases import (
    LOADS,
    draw_experts,
    gradients,
    make_experts,
    parameters_of,
    relative_error,
    run_arrived,
    run_fused,
    run_grouped,
    run_plain,
)
from gluon_compile import blocks, compile_for_hopper, compile_triton, gluon_known

from threefold.engine.kernels.experts import kernel_choice
from threefold.engine.kernels.experts.fused_experts import grouped_experts
from threefold.engine.kernels.experts.kernel_choice import ExpertShape, KernelChoice
from threefold.engine.kernels.experts.sorted_rows import SortedRows, sort_rows
from threefold.engine.kernels.launch_config import GluonConfig, TritonConfig

HAS_TRITON = importlib.util.find_spec("triton") is not None
HAS_HOPPER = HAS_TRITON and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SMALL = TritonConfig(m=16, n=32, k=16, strip=16)
KINDS = [("silu", False), ("clamped swiglu", True)]
SLOW = ("one each", "one takes all")  # loads that the default suite leaves out where kernels are interpreted


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_unwritten_memory_is_nan(dtype: Any) -> None:
    """The fixture works here and at every size: a GPU takes small tensors from another pool than large ones."""
    like = torch.zeros(3, dtype=dtype, device="cuda" if HAS_HOPPER else "cpu")
    for size in (3, 1 << 22):
        for made in (torch.empty(size, dtype=dtype, device=like.device), like.new_empty(size), torch.empty_like(like)):
            assert made.float().isnan().all()


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(("activation", "bias"), KINDS)
@pytest.mark.parametrize("path", [run_fused, run_grouped, run_arrived])
def test_reference_steps_equal_autograd(path: Any, activation: str, bias: bool, load: str) -> None:
    experts = make_experts(6, 10, 7, activation, bias).double()
    expert_TK = draw_experts(13, 3, 6, load)
    x_TD = torch.randn(13, 10, dtype=torch.float64, requires_grad=True)
    weight_TK = torch.rand(expert_TK.shape, dtype=torch.float64, requires_grad=True)
    slope = torch.randn(13, 10, dtype=torch.float64)
    found = gradients(path(experts, x_TD, weight_TK, expert_TK, activation, None), experts, x_TD, weight_TK, slope)
    expected = gradients(run_plain(experts, x_TD, weight_TK, expert_TK), experts, x_TD, weight_TK, slope)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)  # fp64 leaves about 1e-15


def test_no_rows_at_all() -> None:
    experts = make_experts(4, 6, 5, "clamped swiglu", True).double()
    x_RD = torch.randn(0, 6, dtype=torch.float64, requires_grad=True)
    weight_R = torch.rand(0, dtype=torch.float64, requires_grad=True)
    count_E = torch.zeros(4, dtype=torch.long)
    y_RD = grouped_experts(x_RD, weight_R, count_E, *parameters_of(experts), "clamped swiglu")
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
    experts = make_experts(4, 6, 5, "silu", False).double()
    experts.gate_up.requires_grad_(False)
    x_TD, expert_TK = torch.randn(3, 6, dtype=torch.float64), draw_experts(3, 2, 4, "spread")
    run_fused(experts, x_TD, torch.rand(3, 2, dtype=torch.float64), expert_TK, "silu", None).sum().backward()
    assert experts.gate_up.grad is None
    assert experts.down.grad is not None


def test_only_the_input_and_fc1_output_are_saved() -> None:
    """Qwen3-30B-A3B in bf16 may save 30,000 bytes a token: 2 * 2048 for x and 8 * 2 * 768 * 2 for FC1 are 28,672."""
    experts = make_experts(4, 16, 8, "silu", False)
    expert_TK = draw_experts(5, 2, 4, "spread")
    x_TD, weight_TK = torch.randn(5, 16, requires_grad=True), torch.rand(5, 2, requires_grad=True)
    saved: dict[int, int] = {}

    def record(tensor: Any) -> Any:
        saved[tensor.data_ptr()] = tensor.numel() * tensor.dtype.is_floating_point
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        run_fused(experts, x_TD, weight_TK, expert_TK, "silu", None)
    weights = experts.gate_up.numel() + experts.down.numel()
    assert sum(saved.values()) - weights == 5 * 16 + 5 * 2 * (2 * 8) + 5 * 2


def test_a_saved_choice_is_found_again(tmp_path: Any, monkeypatch: Any) -> None:
    shape, other = ExpertShape(1000, 8, 64, 32, gathered=True), ExpertShape(1000, 8, 64, 32, gathered=False)
    monkeypatch.setattr(kernel_choice, "_cache_path", lambda device: tmp_path / "deep" / "experts.json")
    cuda = torch.device("cuda")
    for choice in (KernelChoice(up=TritonConfig(n=64)), KernelChoice(up_grad=SMALL)):
        kernel_choice.save_choice(cuda, shape, choice)
        assert kernel_choice._tuned_choices(cuda) == {f"{shape.key} auto": choice}
    assert ExpertShape(800, 8, 64, 32, gathered=True).key == shape.key  # both nearest to 1,024 rows
    assert other.key != shape.key
    (tmp_path / "deep" / "experts.json").write_text("{ broken")
    kernel_choice._tuned_choices.cache_clear()
    assert kernel_choice._tuned_choices(cuda) == {}
    kernel_choice._tuned_choices.cache_clear()


def test_without_a_gpu_plain_torch_is_chosen() -> None:
    x = torch.zeros(1, dtype=torch.float64)
    assert kernel_choice.choose_kernels(ExpertShape(8, 2, 16, 16, gathered=True), x) is None


@pytest.mark.usefixtures("poisoned")
@pytest.mark.skipif(not INTERPRETED, reason="run by test_interpreter.py")
@pytest.mark.parametrize("load", [pytest.param(load, marks=[pytest.mark.slow] * (load in SLOW)) for load in LOADS])
@pytest.mark.parametrize(("activation", "bias"), KINDS)
@pytest.mark.parametrize("path", [run_fused, run_grouped, run_arrived])
def test_interpreted(path: Any, activation: str, bias: bool, load: str) -> None:
    check_interpreted(path, activation, bias, load, SMALL)


def check_interpreted(path: Any, activation: str, bias: bool, load: str, config: TritonConfig) -> None:
    experts = make_experts(6, 24, 40, activation, bias)
    expert_TK = draw_experts(19, 3, 6, load)
    x_TD, weight_TK = torch.randn(19, 24, requires_grad=True), torch.rand(expert_TK.shape, requires_grad=True)
    slope, choice = torch.randn(19, 24), KernelChoice(*[config] * 6)
    found = gradients(path(experts, x_TD, weight_TK, expert_TK, activation, choice), experts, x_TD, weight_TK, slope)
    expected = gradients(run_plain(experts, x_TD, weight_TK, expert_TK), experts, x_TD, weight_TK, slope)
    assert max(relative_error(one, other) for one, other in zip(found, expected, strict=True)) < 1e-5  # fp32 sums of 40


@pytest.mark.usefixtures("poisoned")
@pytest.mark.skipif(not INTERPRETED, reason="run by test_interpreter.py")
@pytest.mark.parametrize("path", [run_fused, run_grouped, run_arrived])
def test_interpreted_flattened_loop(path: Any) -> None:
    check_interpreted(path, "clamped swiglu", True, "empty experts", replace(SMALL, flat=True))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.skipif(not INTERPRETED, reason="run by test_interpreter.py")
@pytest.mark.parametrize("load", LOADS)
def test_interpreted_half_tiles(load: str) -> None:
    """Loads of a few rows, for which FC1 and the backward of FC2 compute half a tile, and of more."""
    check_interpreted(run_fused, "silu", False, load, replace(SMALL, m=32))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.skipif(not INTERPRETED, reason="run by test_interpreter.py")
def test_interpreted_strided_router_weights() -> None:
    """The weights are a column of a larger tensor."""
    experts, count_E = make_experts(3, 24, 40, "silu", False), torch.tensor([4, 0, 5])
    x_RD, slope = torch.randn(9, 24, requires_grad=True), torch.randn(9, 24)
    weight_R = torch.rand(9, requires_grad=True)
    found, expected = (
        gradients(
            grouped_experts(x_RD, one, count_E, *parameters_of(experts), choice=KernelChoice(*[SMALL] * 6)),
            experts, x_RD, weight_R, slope,
        )
        for one in (torch.stack([weight_R, -weight_R], dim=1)[:, 0], weight_R)
    )  # fmt: skip
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.skipif(not INTERPRETED, reason="run by test_interpreter.py")
@pytest.mark.parametrize("counts", [[3], [0, 5, 2, 5, 0], [7, 1, 4] * 25])
def test_interpreted_experts_by_load(counts: list[int]) -> None:
    from threefold.engine.kernels.experts.tile_schedule import experts_by_load

    ends_E = torch.tensor(counts, dtype=torch.int32).cumsum(0).to(torch.int32)
    assert experts_by_load(ends_E).tolist() == sorted(range(len(counts)), key=lambda expert: -counts[expert])


@pytest.mark.usefixtures("poisoned")
@pytest.mark.skipif(not INTERPRETED, reason="run by test_interpreter.py")
@pytest.mark.parametrize("extra", [0, 3])
def test_interpreted_tile_table(extra: int) -> None:
    """Tiles of 8 rows cover each expert's rows once; only its last one may have up to `extra` more."""
    from threefold.engine.kernels.experts.tile_schedule import make_tile_table

    counts = [0, 1, 7, 8, 9, 11, 12, 0, 16, 19, 20, 40]
    ends_E = torch.tensor(counts, dtype=torch.int32).cumsum(0).to(torch.int32)
    made = make_tile_table(ends_E, sum(counts), 8, extra)
    expected = []
    for expert, (count, end) in enumerate(zip(counts, ends_E.tolist(), strict=True)):
        firsts = [first for first in range(end - count, end, 8) if first == end - count or end - first > extra]
        expected += [(expert, first, end) for first in firsts]
    assert [tuple(tile) for tile in made.table[:, : int(made.total)].T.tolist()] == expected


@pytest.mark.skipif(not gluon_known(), reason="needs a release of triton that the kernels are written for")
@pytest.mark.parametrize("capability", [90, 100])
def test_kernels_of_an_exchange_compile_without_a_gpu(capability: int) -> None:
    """Those that store received rows where they lie, and those that pack and unpack rows in FP8."""
    from threefold.engine.kernels.experts.grouped_gemm import _grouped_gemm
    from threefold.engine.kernels.fp8.packed_rows import _pack_tokens, _unpack_rows

    def tiles(*sizes: int) -> str:
        return f"tensordesc<bf16[{', '.join(map(str, sizes))}]>"

    kinds = {"a": tiles(128, 64), "w": tiles(1, 256, 64), "out": tiles(128, 128), "out_ptr": "*bf16"}
    kinds |= {"target_ptr": "*i32", "table_ptr": "*i32", "total_ptr": "*i32", "max_tiles": "i32"}
    sizes = {"K": 2048, "N": 7168, "BM": 128, "BN": 256, "BK": 64, "GROUP": 4}
    options = {"TRANSPOSED": True, "EVEN_N": True, "FLAT": True}
    compile_triton(_grouped_gemm, kinds, sizes | options, 8, capability)
    sizes, bytes_of_rows = {"D": 7168, "BLOCK": 128, "BLOCKS": 8}, {"value_ptr": "*fp8e4nv", "byte_ptr": "*u8"}
    compile_triton(
        _pack_tokens, {"x_ptr": "*bf16", "row_ptr": "*i64", **bytes_of_rows}, sizes | {"K": 8}, 4, capability
    )
    compile_triton(_unpack_rows, {"x_ptr": "*bf16", **bytes_of_rows}, sizes, 4, capability)


@pytest.mark.skipif(not gluon_known(), reason="needs a release of triton that the kernel is written for")
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("transposed", [True, False])
def test_row_gemms_compile_without_a_gpu(transposed: bool, stored: bool) -> None:
    from threefold.engine.kernels.experts.hopper.row_gemm import _row_gemm_kernel

    rows = {"rows": 256, "half_rows": 128, "extra_rows": 32, "w": 64, "out": 64}
    kinds = {name: blocks("bf16", size, 64) for name, size in rows.items()}
    kinds |= {"out_ptr": "*bf16", "target_ptr": "*i32", "table_ptr": "*i32", "total_ptr": "*i32", "max_tiles": "i32"}
    options = {"K": 768, "N": 2048, "GROUP": 1, "TRANSPOSED": transposed, "STORED": stored}
    compile_for_hopper(_row_gemm_kernel, kinds, options)


@pytest.mark.skipif(not gluon_known(), reason="needs a release of triton that the kernel is written for")
@pytest.mark.parametrize("sizes", [(1536, 2048), (256, 320)])
@pytest.mark.parametrize(("gathered", "parts"), [("left", 2), ("right", 2), ("right", 3)])
@pytest.mark.parametrize("adds", [False, True])
def test_weight_gradients_compile_without_a_gpu(adds: bool, gathered: str, parts: int, sizes: tuple[int, int]) -> None:
    """Gluon kernels cannot be interpreted."""
    from threefold.engine.kernels.experts.hopper.wgrad import _STAGES, _wgrad_kernel

    by_row = blocks("bf16", 64, 128 if gathered == "left" else 64)
    kinds = {"by_token": "*bf16", "by_row": by_row, "out": blocks("bf16", 64, 128)}
    kinds |= {"token_ptr": "*i32", "out_ptr": "*fp32" if adds else "*bf16", "ends_ptr": "*i32", "order_ptr": "*i32"}
    kinds |= {"num_experts": "i32", "squares_ptr": "*fp32"}
    options = {"PARTS": parts, "STAGES": _STAGES[parts], "GROUP": 4, "LEFT": gathered == "left", "GATHER": True}
    options |= {"ADD": adds, "SQUARES": not adds}
    compile_for_hopper(_wgrad_kernel, kinds, {"M": sizes[0], "N": sizes[1], **options})


@pytest.mark.usefixtures("poisoned")
@pytest.mark.skipif(not (INTERPRETED or HAS_HOPPER), reason="needs a Hopper GPU or test_interpreter.py")
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts"), [(1, 1, 1), (128, 1, 3), (129, 1, 3), (43, 9, 200), (150, 9, 513)]
)
def test_interpreted_counting_sort(num_tokens: int, top_k: int, num_experts: int) -> None:
    """Up to one chunk of 128 rows and beyond, and beyond the 1,024 values that `gather_values` moves at a time."""
    from threefold.engine.kernels.experts.counting_sort import counting_sort
    from threefold.engine.kernels.experts.row_kernels import gather_values

    device = "cuda" if HAS_HOPPER else "cpu"
    expert_TK = torch.randint(num_experts, (num_tokens, 2 * top_k), device=device)[:, ::2]
    weight_TK = torch.rand(top_k, num_tokens, device=device).T
    found, expected = (sort(expert_TK, num_experts, weight_TK) for sort in (counting_sort, sort_rows))
    for field in fields(SortedRows):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        assert one.dtype == other.dtype
        assert torch.equal(one, other), field.name
    assert torch.equal(gather_values(found.weight_R, found.row_TK), weight_TK)
    assert found.token_R.data_ptr() % 16 == 0
    assert counting_sort(expert_TK, num_experts).weight_R is None


OURS = KernelChoice(
    up=TritonConfig(n=128, stages=4),
    down=TritonConfig(flat=True),
    act_grad=TritonConfig(stages=4, strip=32),
    input_grad=TritonConfig(stages=4),
    up_grad=TritonConfig(m=256, n=128, stages=4),
    down_grad=TritonConfig(stages=4),
)
GLUON = replace(OURS, **dict.fromkeys(("down", "input_grad", "up_grad", "down_grad"), GluonConfig()))
SIZES = [(300, 4, 8, 256, 192), (1000, 2, 5, 136, 72), (77, 1, 3, 64, 512), (600, 8, 16, 512, 256)]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(("activation", "bias"), KINDS)
@pytest.mark.parametrize("choice", [OURS, GLUON, KernelChoice()], ids=["ours", "gluon", "grouped"])
@pytest.mark.parametrize("path", [run_fused, run_grouped, run_arrived])
def test_on_a_gpu(path: Any, choice: KernelChoice, activation: str, bias: bool, load: str) -> None:
    """The error in bf16 is at most twice that of the engine's unfused experts in bf16."""
    if choice.uses_gluon and bias:
        pytest.skip("weight gradients are the same with biases")
    for num_tokens, top_k, num_experts, dim, expert_dim in SIZES:
        if choice.uses_gluon and (dim % 128 or expert_dim % 64):
            continue
        exact = make_experts(num_experts, dim, expert_dim, activation, bias).to("cuda", torch.bfloat16).double()
        rounded = make_experts(num_experts, dim, expert_dim, activation, bias).to("cuda", torch.bfloat16)
        rounded.load_state_dict(exact.state_dict())
        expert_TK = draw_experts(num_tokens, top_k, num_experts, load).cuda()
        x_TD = torch.randn(num_tokens, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight_TK = torch.rand(expert_TK.shape, device="cuda", requires_grad=True)
        slope = torch.randn_like(x_TD)
        found = gradients(
            path(rounded, x_TD, weight_TK, expert_TK, activation, choice), rounded, x_TD, weight_TK, slope
        )
        eager = gradients(run_plain(rounded, x_TD, weight_TK, expert_TK), rounded, x_TD, weight_TK, slope)
        doubles = [tensor.detach().double().requires_grad_() for tensor in (x_TD, weight_TK)]
        expected = gradients(run_plain(exact, *doubles, expert_TK), exact, *doubles, slope.double())
        for one, usual, best in zip(found, eager, expected, strict=True):
            assert relative_error(one, best) <= 2 * relative_error(usual, best) + 1e-3


@pytest.mark.usefixtures("poisoned")
@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gathered", ["left", "right"])
def test_weight_gradients_in_gluon_equal_those_in_triton(gathered: str, dtype: Any) -> None:
    """Alone and added to a main gradient, with experts of no rows, of one, and of more than a block."""
    from threefold.engine.kernels.experts.grouped_gemm import grouped_wgrad
    from threefold.engine.kernels.experts.hopper import wgrad

    def randn(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device="cuda", dtype=torch.bfloat16)

    counts = torch.tensor([0, 1, 64, 130, 0, 17, 300], dtype=torch.int32, device="cuda")
    ends_E, order_E = counts.cumsum(0).to(torch.int32), torch.arange(7, dtype=torch.int32, device="cuda")
    num_rows, num_tokens = int(ends_E[-1]), 100
    token_R = torch.randint(num_tokens, (num_rows,), dtype=torch.int32, device="cuda")
    for width in (320, 384):
        sides = (randn(num_tokens, 256), randn(num_rows, width))
        sides = sides if gathered == "left" else (sides[1], sides[0])
        given = *sides, token_R, gathered, ends_E, order_E
        expected = grouped_wgrad(*given, TritonConfig(stages=3))
        for config in (GluonConfig(), GluonConfig(group=4)):
            squares_P = torch.full((wgrad.num_squares(torch.device("cuda")),), torch.nan, device="cuda")
            grad = wgrad.grouped_wgrad(*given, config, squares_P=squares_P)
            assert relative_error(grad, expected) < 1e-3
            # The squares are of values that are not rounded yet. Rounding to bf16 changes each by up to 0.8 %, up or
            # down; over 500,000 of them 1e-5 is left, most of it from the few experts with many rows.
            assert squares_P.sum().item() == pytest.approx(grad.double().square().sum().item(), rel=1e-4)
            assert torch.equal(wgrad.grouped_wgrad(*given, config), grad)
            start = torch.randn(expected.shape, device="cuda", dtype=dtype)
            main_grad = start.clone()
            assert wgrad.grouped_wgrad(*given, config, main_grad) is None
            assert relative_error(main_grad, start + expected.to(dtype)) < 1e-2


@pytest.mark.usefixtures("poisoned")
@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize(
    ("num_experts", "inner", "outer", "dtype", "config"),
    [
        (24, 192, 384, torch.bfloat16, GluonConfig(group=1)),
        (24, 256, 256, torch.float16, GluonConfig(group=4)),
        (23, 64, 1024, torch.bfloat16, GluonConfig(group=2)),
        (2, 256, 128, torch.bfloat16, GluonConfig(group=1)),
    ],
    ids=str,
)
def test_row_gemms_in_gluon_equal_those_in_triton(
    num_experts: int, inner: int, outer: int, dtype: Any, config: GluonConfig, transposed: bool
) -> None:
    """Experts whose rows end before, at and behind each size at which a tile is computed differently."""
    from threefold.engine.kernels.experts.grouped_gemm import grouped_gemm
    from threefold.engine.kernels.experts.hopper import row_gemm
    from threefold.engine.kernels.experts.tile_schedule import make_tile_table

    sizes = [0, 1, 31, 33, 64, 65, 127, 128, 129, 160, 161, 192, 255, 256, 257, 288, 289, 0, 384, 416, 417, 545, 800, 3]
    ends_E = torch.tensor(sizes, dtype=torch.int32, device="cuda").cumsum(0).to(torch.int32)
    ends_E = ends_E[:num_experts].contiguous()
    num_rows = int(ends_E[-1])
    a_RK = torch.randn(num_rows, inner, device="cuda", dtype=dtype)
    shape = (num_experts, outer, inner) if transposed else (num_experts, inner, outer)
    weight = torch.randn(shape, device="cuda", dtype=dtype)
    expected = grouped_gemm(a_RK, weight, make_tile_table(ends_E, num_rows, 128), transposed, TritonConfig(stages=3))
    tiles = make_tile_table(ends_E, num_rows, row_gemm.TILE_ROWS, row_gemm.EXTRA_ROWS)
    found = row_gemm.grouped_gemm(a_RK, weight, tiles, transposed, config)
    assert relative_error(found, expected) < 1e-3  # the same sums in another order, then rounded


@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
def test_never_waits_for_the_gpu_and_repeats_itself() -> None:
    experts = make_experts(8, 128, 64, "clamped swiglu", True).to("cuda", torch.bfloat16)
    expert_TK = draw_experts(500, 3, 8, "spread").cuda()
    x_TD = torch.randn(500, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight_TK = torch.rand(500, 3, device="cuda", requires_grad=True)
    slope, count_E = torch.randn_like(x_TD), torch.bincount(expert_TK.flatten(), minlength=8)
    x_RD, weight_R = x_TD.repeat(3, 1), weight_TK.flatten()
    found = []
    for _ in range(3):  # the first compiles, and may wait
        y_RD = grouped_experts(x_RD, weight_R, count_E, *parameters_of(experts), "clamped swiglu")
        y_TD = run_fused(experts, x_TD, weight_TK, expert_TK, "clamped swiglu", None)
        found.append([*gradients(y_TD, experts, x_TD, weight_TK, slope), y_RD])
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(one, other) for one, other in zip(found[1], found[2], strict=True))


@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("gathered", [True, False])
def test_a_tuned_shape_is_found_again(gathered: bool, tmp_path: Any, monkeypatch: Any) -> None:
    from threefold.engine.tune.expert_kernels import tune_experts

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernel_choice._tuned_choices.cache_clear()
    shape, device = ExpertShape(1024, 8, 256, 128, gathered), torch.device("cuda", 0)
    choice = tune_experts(shape, 4, device)
    assert kernel_choice.choose_kernels(shape, torch.zeros(1, device=device, dtype=torch.bfloat16)) == choice
    kernel_choice._tuned_choices.cache_clear()


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next"])
def test_a_model_with_fused_experts_equals_one_without(family: str) -> None:
    """knobs.expert_fusion, in fp64 on the CPU: the reference steps in place of the kernels, the same wiring."""
    from tiny_models import spec_of

    from threefold.engine.model_options import Options
    from threefold.engine.models.build import build_model

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
