"""Tests of the choice of expert kernels: valid choices, the tuned cache, the measurement, and quack's kernels on a GPU.

Shapes: T tokens, K experts of a token, R rows, D model dim, E experts, H expert dim.
"""

import json
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expert_cases import (
    LOADS,
    draw_experts,
    gradients,
    make_experts,
    relative_error,
    run_fused,
    run_grouped,
    run_plain,
)
from plans import build
from repository import ROOT
from torch._subclasses import FakeTensorMode

from threefold.engine.kernels import availability
from threefold.engine.kernels.experts import kernel_choice
from threefold.engine.kernels.experts.kernel_choice import (
    FC1_OUTPUT_STEPS,
    STEPS,
    ExpertShape,
    KernelChoice,
    choose_kernels,
    default_choice,
    require_kernels,
)
from threefold.engine.kernels.experts.reference_steps import ReferenceSteps
from threefold.engine.kernels.experts.sorted_rows import sort_rows
from threefold.engine.kernels.launch_config import CuteConfig, GluonConfig, TritonConfig
from threefold.engine.model_options import Options
from threefold.engine.moe.layer import MoeLayer
from threefold.findings import FindingsError
from threefold.plan.file import read_plan
from threefold.plan.parse import change
from threefold.rules.all import advice
from threefold.rules.knobs.dispatch import expert_kernels_have_use
from threefold.spec.model import MoeSpec

HAS_CUTE = torch.cuda.is_available() and availability.has_cute_kernels(torch.device("cuda"))
CUTE = KernelChoice(**dict.fromkeys(STEPS, CuteConfig()))
# GEMMs of quack beside kernels of ours, whose layout FC1's output then has.
MIXED = KernelChoice(
    up=TritonConfig(n=64), **dict.fromkeys(("down", "input_grad", "up_grad", "down_grad"), CuteConfig())
)
QWEN = ExpertShape(131072, 128, 2048, 768, gathered=True)
COMPARED = {
    "tokens": (run_fused, CUTE),
    "rows": (run_grouped, CUTE),
    "tokens beside ours": (run_fused, MIXED),
    "rows beside ours": (run_grouped, MIXED),
    "tokens in the tiles chosen for them": (run_fused, default_choice(QWEN, "cute")),
    "rows in the tiles chosen for them": (run_grouped, default_choice(replace(QWEN, gathered=False), "cute")),
}


@pytest.mark.parametrize("step", FC1_OUTPUT_STEPS)
def test_all_steps_have_the_same_layout_of_fc1_output(step: str) -> None:
    """If FC1's output were interleaved for one step and in halves for the next, gate and up would be mixed."""
    with pytest.raises(ValueError, match="interleaved"):
        replace(CUTE, **{step: None})


IN_GLUON = default_choice(QWEN, has_gluon=True)


@pytest.mark.parametrize(
    "choice", [KernelChoice(), CUTE, MIXED, IN_GLUON, default_choice(QWEN), default_choice(QWEN, "torch")]
)
def test_a_choice_survives_json(choice: KernelChoice) -> None:
    assert kernel_choice._parse_choice(json.loads(json.dumps(asdict(choice)))) == choice


def test_keys_differ_by_more_than_sizes() -> None:
    shapes = [QWEN, replace(QWEN, gathered=False), replace(QWEN, plain=False), replace(QWEN, num_rows=4096)]
    assert len({shape.key for shape in shapes}) == 4
    assert replace(QWEN, num_rows=131000).key == QWEN.key


def test_row_counts_near_a_balanced_load_share_a_key() -> None:
    """An exchange brings a little more than a balanced load as often as a little less."""
    balanced = ExpertShape(32_768, 16, 2048, 768, gathered=False)
    assert {replace(balanced, num_rows=rows).key for rows in (24_000, 32_767, 32_768, 32_769, 45_000)} == {balanced.key}
    assert replace(balanced, num_rows=47_000).key == replace(balanced, num_rows=65_536).key != balanced.key
    assert replace(balanced, num_rows=0).key == replace(balanced, num_rows=1).key


def test_steps_run_in_gluon_where_it_runs_and_takes_the_sizes() -> None:
    in_gluon = {step for step in STEPS if isinstance(getattr(IN_GLUON, step), GluonConfig)}
    assert in_gluon == {"down", "input_grad", "up_grad", "down_grad"}
    assert IN_GLUON.kinds == {"triton"}
    assert not default_choice(QWEN).uses_gluon
    assert not default_choice(ExpertShape(64, 4, 64, 32, gathered=True), has_gluon=True).uses_gluon
    odd = default_choice(replace(QWEN, dim=2040), has_gluon=True)
    assert [step for step in STEPS if isinstance(getattr(odd, step), GluonConfig)] == ["up_grad"]
    assert not default_choice(QWEN, "torch", has_gluon=True).uses_gluon
    odd = default_choice(replace(QWEN, expert_dim=736), has_gluon=True)  # 736 is no multiple of 64, twice that is
    assert [step for step in STEPS if isinstance(getattr(odd, step), GluonConfig)] == [
        "input_grad",
        "up_grad",
        "down_grad",
    ]
    with pytest.raises(ValueError, match="only down, input_grad, up_grad, down_grad"):
        KernelChoice(up=GluonConfig())


@pytest.mark.parametrize("kernels", ["torch", "triton", "cute", "auto"])
def test_experts_with_biases_or_clamps_never_run_on_quack(kernels: str) -> None:
    assert not default_choice(replace(QWEN, plain=False), kernels).uses_cute


def test_kernels_that_are_not_installed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (availability, kernel_choice):
        monkeypatch.setattr(module, "quack_version", lambda: None)
    availability.has_cute_kernels.cache_clear()
    with pytest.raises(FindingsError, match="not installed") as caught:
        require_kernels("cute", torch.device("cuda"))
    [finding] = caught.value.findings
    assert finding.rule == "kernels-are-installed"
    assert "threefold[cute]" in finding.fix_text
    require_kernels("auto", torch.device("cuda"))
    availability.has_cute_kernels.cache_clear()


@pytest.mark.parametrize("kernels", ["torch", "triton", "cute", "auto"])
def test_a_cpu_runs_plain_torch_whatever_is_asked(kernels: str) -> None:
    assert choose_kernels(QWEN, torch.empty(0, dtype=torch.float64), kernels) is None


@pytest.mark.parametrize(
    ("device", "dtype", "has_kernels", "fused"),
    [
        ("cuda", torch.bfloat16, True, True),
        ("cuda", torch.bfloat16, False, False),
        ("cuda", torch.float32, True, False),
        ("cpu", torch.float32, False, True),
    ],
)
def test_a_gpu_without_our_kernels_runs_torch_grouped_gemm(
    device: str, dtype: Any, has_kernels: bool, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference loops over experts and waits for their counts, so a GPU must never fall back to it."""
    monkeypatch.setattr(kernel_choice, "has_triton_kernels", lambda device: has_kernels)
    layer = MoeLayer(MoeSpec(num_experts=4, top_k=2, expert_dim=32), 64, "silu", Options(expert_fusion=True))
    with FakeTensorMode():
        x_BSD = torch.empty(1, 8, 64, device=device, dtype=dtype)
    assert layer.experts.fuses(x_BSD) == fused
    assert layer.runs_fused(x_BSD) == fused


def test_fusion_is_proposed_only_where_it_runs() -> None:
    """The fix of the finding leads to a plan without findings."""
    fields = {"model": "qwen3-30b-a3b", "target": "threefold", "layout.ep": 8, "cluster.gpus": 8, "job.seq_len": 4096}
    named = {"knobs.expert_fusion": True, "knobs.expert_kernels": "triton"}
    for chip, more, fix in [
        ("a100", {"knobs.expert_fusion": True}, {"knobs.expert_fusion": None}),
        ("a100", named, dict.fromkeys(named)),
        ("a100", {"knobs.expert_kernels": "triton"}, {"knobs.expert_kernels": None}),
        ("h100", {"knobs.expert_kernels": "triton"}, {"knobs.expert_fusion": True}),
    ]:
        plan = build(fields | {"cluster.chip": chip} | more)
        [finding] = expert_kernels_have_use(plan)
        assert next(filter(None, (finding.fix, *finding.fixes))) == fix
        assert not list(expert_kernels_have_use(change(plan, fix)))
    for chip, proposed in (("a100", False), ("h100", True), ("b200", True)):
        plan = build(fields | {"cluster.chip": chip, "cluster.gpus": 64, "job.global_batch": 512})
        pieces = [piece.changes for piece in advice(plan, most=20)]
        assert ({"knobs.expert_fusion": True} in pieces) == proposed


def test_a_plan_knows_the_shape_of_its_experts() -> None:
    """By hand: 4096 tokens of 8 experts each, 128 experts over 16 ranks."""
    tune = pytest.importorskip("threefold.engine.tune.expert_kernels", exc_type=ImportError)
    recipe = ROOT / "recipes" / "qwen3-30b-a3b-4k-16xh100-bf16-no-overlap.toml"
    plan = read_plan(str(recipe), []).plan
    assert plan is not None
    assert tune.expert_shape_of(plan) == ExpertShape(4096 * 8 * plan.job.micro_batch, 8, 2048, 768, gathered=False)
    alone = change(plan, {"cluster.gpus": 1, "layout.ep": 1, "job.micro_batch": 2, "job.global_batch": 2})
    assert tune.expert_shape_of(alone) == ExpertShape(2 * 4096 * 8, 128, 2048, 768, gathered=True)
    # 2 GiB of rows hold 65,536 tokens: 2,048 wide, in two bytes, to eight experts.
    long = change(alone, {"job.micro_batch": 1, "job.seq_len": 131_072})
    assert tune.expert_shape_of(long).num_rows == 65_536 * 8
    spread = change(plan, {"job.seq_len": 131_072})
    assert tune.expert_shape_of(spread).num_rows == 131_072 * 8


@pytest.mark.parametrize(
    ("factor", "alone", "spread"),
    [
        (0.5, 16_384, 16_384),
        (1.0, 32_768, 32_768),
        (1.5, 49_152, 32_768),
        (65_536.0, 524_288, 32_768),  # every expert can take all 4,096 tokens, and no more arrive
    ],
)
def test_capacity_limits_the_rows_of_a_plan(factor: float, alone: int, spread: int) -> None:
    """By hand: 4,096 tokens of 8 experts each are 32,768 copies, 256 for each of 128 experts. One rank fills up."""
    tune = pytest.importorskip("threefold.engine.tune.expert_kernels", exc_type=ImportError)
    capacity = pytest.importorskip("threefold.engine.dispatch.capacity").Capacity(factor, 128)
    recipe = ROOT / "recipes" / "qwen3-30b-a3b-4k-16xh100-bf16-no-overlap.toml"
    fields = {"job.micro_batch": 1, "job.capacity_factor": factor}
    plan = change(read_plan(str(recipe), []).plan, fields)
    one = change(plan, {"cluster.gpus": 1, "layout.ep": 1, "job.global_batch": 1})
    assert tune.expert_shape_of(one) == ExpertShape(alone, 128, 2048, 768, gathered=False)
    assert tune.expert_shape_of(plan) == ExpertShape(spread, 8, 2048, 768, gathered=False)
    _, count_E = capacity.sort_and_pad(torch.arange(32_768).view(4096, 8) % 128, torch.rand(4096, 8))
    assert int(count_E.sum()) == alone


class FakeEvent:
    """A CUDA event at a given millisecond."""

    def __init__(self, ms: float) -> None:
        self.ms = ms

    def elapsed_time(self, other: "FakeEvent") -> float:
        return other.ms - self.ms


def test_the_fastest_kernels_that_fit_together_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step takes 3 ms with torch, 2 with ours and 1 with quack, but FC1 takes 9 with quack, and one config of ours
    for FC2 fails."""
    tuning = pytest.importorskip("threefold.engine.tune.expert_kernels", exc_type=ImportError)
    kept: dict[str, KernelChoice] = {}

    def cost(step: str, config: Any) -> float:
        if step == "down" and isinstance(config, TritonConfig) and config.flat:
            raise RuntimeError("out of resource: shared memory")
        if isinstance(config, GluonConfig):
            return 1.5 if step == "up_grad" else 8
        return 3 if config is None else 2 if isinstance(config, TritonConfig) else 9 if step == "up" else 1

    def run(choice: KernelChoice, timed: tuple[str, str]) -> tuple[FakeEvent, FakeEvent]:
        steps = STEPS if timed[0] != timed[1] else timed[:1]
        return FakeEvent(0), FakeEvent(sum(cost(step, getattr(choice, step)) for step in steps))

    monkeypatch.setattr(tuning, "_make_workload", lambda *given: run)
    monkeypatch.setattr(tuning, "has_cute_kernels", lambda device: True)
    monkeypatch.setattr(tuning, "has_gluon_kernels", lambda device: True)
    monkeypatch.setattr(tuning, "save_choice", lambda device, shape, choice, kind="auto": kept.update({kind: choice}))
    monkeypatch.setattr(tuning.torch.cuda, "synchronize", lambda: None)
    best = tuning.tune_experts(QWEN, 8, torch.device("cuda"))
    assert kept.keys() == {"torch", "triton", "cute", "auto"}
    assert best == kept["auto"]
    # Ours for FC1 and its activation backward takes 2 + 2, quack for the four GEMMs takes 4: less than quack's 9 + 5.
    assert {step for step in STEPS if isinstance(getattr(best, step), TritonConfig)} == {"up", "act_grad"}
    assert not kept["triton"].uses_cute
    assert kept["triton"].down == TritonConfig()
    assert [step for step in STEPS if isinstance(getattr(kept["triton"], step), GluonConfig)] == ["up_grad"]
    assert kept["torch"] == KernelChoice()


@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize("plain", [True, False])
def test_experts_with_biases_and_clamps_are_measured_with_them(
    plain: bool, gathered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference steps stand in for those of a GPU."""
    tuning = pytest.importorskip("threefold.engine.tune.expert_kernels", exc_type=ImportError)
    seen = []

    class RecordingSteps(ReferenceSteps):
        def __init__(self, ends_E: Any, num_rows: int, clamped: bool, choice: KernelChoice, starts_F: Any) -> None:
            super().__init__(ends_E, num_rows, clamped)
            assert (starts_F is not None) == gathered

        def up(self, *given: Any) -> Any:
            seen.append((self.clamped, None if given[4] is None else tuple(given[4].shape)))
            return super().up(*given)

        def act_grad(self, *given: Any) -> Any:
            seen.append((self.clamped, None))
            return super().act_grad(*given)

    monkeypatch.setattr(tuning, "GpuSteps", RecordingSteps)
    monkeypatch.setattr(tuning, "counting_sort", sort_rows)
    monkeypatch.setattr(tuning.torch.cuda, "Event", lambda **given: SimpleNamespace(record=lambda: None))
    work = tuning._make_workload(ExpertShape(24, 3, 16, 8, gathered, plain), 2, torch.device("cpu"))
    work(KernelChoice(), (STEPS[0], STEPS[-1]))
    bias = None if plain else (3, 16)
    assert seen == [(not plain, bias), (not plain, bias), (not plain, None)]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.skipif(not HAS_CUTE, reason="quack-kernels on a Hopper GPU")
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(("path", "choice"), COMPARED.values(), ids=COMPARED)
@pytest.mark.parametrize(("num_tokens", "dim", "expert_dim"), [(333, 256, 128), (1000, 512, 192)])
def test_quack_agrees_with_fp64(
    path: Any, choice: KernelChoice, load: str, num_tokens: int, dim: int, expert_dim: int
) -> None:
    """bf16 rounds results by 2e-3, and the activation before them."""
    experts = make_experts(8, dim, expert_dim, "silu", False).cuda()
    expert_TK = draw_experts(num_tokens, 3, 8, load).cuda()
    x_TD, slope = torch.randn(num_tokens, dim, device="cuda"), torch.randn(num_tokens, dim, device="cuda")
    weight_TK = torch.rand(expert_TK.shape, device="cuda")

    def inputs(dtype: Any) -> Any:
        weight_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        x = x_TD.bfloat16().to(dtype).requires_grad_()
        return experts.bfloat16().to(dtype), x, weight_TK.to(weight_dtype).requires_grad_(), slope.bfloat16().to(dtype)

    exact, x, weight, grad = inputs(torch.float64)
    expected = gradients(run_plain(exact, x, weight, expert_TK), exact, x, weight, grad)
    rounded, x, weight, grad = inputs(torch.bfloat16)
    found = gradients(path(rounded, x, weight, expert_TK, "silu", choice), rounded, x, weight, grad)
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, other) < 1e-2
