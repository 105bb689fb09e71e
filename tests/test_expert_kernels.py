"""Which kernels experts run on: choices that fit together, kept and read again; quack's own where a GPU has them.

Shapes: T tokens, K experts of a token, R rows, D model dim, E experts, H expert dim.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from plans import build  # noqa: E402
from test_kernels import LOADS, by_rows, experts_of, far, fused, gradients, module, plain  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402

from threefold.engine.kernels import choose as chosen  # noqa: E402
from threefold.engine.kernels.choose import HALVED, STEPS, Choice, Shape, choose, default, require  # noqa: E402
from threefold.engine.kernels.launch import Config, CuteConfig  # noqa: E402
from threefold.engine.kernels.reference import Reference  # noqa: E402
from threefold.engine.kernels.sort import sort_rows  # noqa: E402
from threefold.engine.moe.layer import MoeLayer  # noqa: E402
from threefold.engine.options import Options  # noqa: E402
from threefold.findings import FindingsError  # noqa: E402
from threefold.plan.file import read_plan  # noqa: E402
from threefold.plan.parse import change  # noqa: E402
from threefold.rules.dispatch import expert_kernels_have_use  # noqa: E402
from threefold.search.neighbours import _remedies  # noqa: E402
from threefold.spec.model import MoeSpec  # noqa: E402

HAS_CUTE = torch.cuda.is_available() and chosen.cute_works(torch.device("cuda"))
CUTE = Choice(**dict.fromkeys(STEPS, CuteConfig()))
# Products of quack beside steps of ours: FC1's output then lies as ours.
BESIDE = Choice(up=Config(n=64), **dict.fromkeys(("down", "input_grad", "up_grad", "down_grad"), CuteConfig()))
QWEN = Shape(131072, 128, 2048, 768, gathered=True)
COMPARED = {
    "tokens": (fused, CUTE),
    "rows": (by_rows, CUTE),
    "tokens beside ours": (fused, BESIDE),
    "rows beside ours": (by_rows, BESIDE),
    "tokens in the tiles chosen for them": (fused, default(QWEN, "cute")),
    "rows in the tiles chosen for them": (by_rows, default(replace(QWEN, gathered=False), "cute")),
}


@pytest.mark.parametrize("step", HALVED)
def test_fc1_lies_one_way_for_all_its_steps(step: str) -> None:
    """Interleaved for one step and by halves for the next would mix gate with up."""
    with pytest.raises(ValueError, match="interleaved"):
        replace(CUTE, **{step: None})


@pytest.mark.parametrize("choice", [Choice(), CUTE, BESIDE, default(QWEN), default(QWEN, "torch")])
def test_a_choice_is_read_as_it_was_kept(choice: Choice) -> None:
    assert chosen._choice(json.loads(json.dumps(asdict(choice)))) == choice


def test_what_is_measured_depends_on_more_than_sizes() -> None:
    shapes = [QWEN, replace(QWEN, gathered=False), replace(QWEN, plain=False), replace(QWEN, num_rows=4096)]
    assert len({shape.key for shape in shapes}) == 4
    assert replace(QWEN, num_rows=131000).key == QWEN.key


def test_microbatches_around_a_fair_share_find_its_choice() -> None:
    """An exchange brings a little more than a fair share as often as a little less."""
    fair = Shape(32_768, 16, 2048, 768, gathered=False)
    assert {replace(fair, num_rows=rows).key for rows in (24_000, 32_767, 32_768, 32_769, 45_000)} == {fair.key}
    assert replace(fair, num_rows=47_000).key == replace(fair, num_rows=65_536).key != fair.key
    assert replace(fair, num_rows=0).key == replace(fair, num_rows=1).key


@pytest.mark.parametrize("kernels", ["torch", "triton", "cute", "auto"])
def test_experts_with_biases_or_clamps_never_run_on_quack(kernels: str) -> None:
    assert not default(replace(QWEN, plain=False), kernels).cute


def test_kernels_asked_for_by_name_are_refused_where_they_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chosen, "quack_version", lambda: None)
    chosen.cute_works.cache_clear()
    with pytest.raises(FindingsError, match="not installed") as caught:
        require("cute", torch.device("cuda"))
    [finding] = caught.value.findings
    assert finding.rule == "kernels-are-installed"
    assert "threefold[cute]" in finding.fix_text
    require("auto", torch.device("cuda"))
    chosen.cute_works.cache_clear()


@pytest.mark.parametrize("kernels", ["torch", "triton", "cute", "auto"])
def test_a_cpu_runs_plain_torch_whatever_is_asked(kernels: str) -> None:
    assert choose(QWEN, torch.empty(0, dtype=torch.float64), kernels) is None


@pytest.mark.parametrize(
    ("device", "dtype", "has_kernels", "fused"),
    [
        ("cuda", torch.bfloat16, True, True),
        ("cuda", torch.bfloat16, False, False),
        ("cuda", torch.float32, True, False),
        ("cpu", torch.float32, False, True),
    ],
)
def test_a_gpu_without_kernels_runs_grouped_products(
    device: str, dtype: Any, has_kernels: bool, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Far from one expert after another, with a wait for their counts; that is for devices without either."""
    monkeypatch.setattr(chosen, "works", lambda device: has_kernels)
    layer = MoeLayer(MoeSpec(num_experts=4, top_k=2, expert_dim=32), 64, "silu", Options(expert_fusion=True))
    with FakeTensorMode():
        x_BSD = torch.empty(1, 8, 64, device=device, dtype=dtype)
    assert layer.experts.fuses(x_BSD) == fused
    assert layer.in_one(x_BSD) == fused


def test_fusion_is_proposed_only_where_it_runs() -> None:
    """And its fix leaves nothing to be found."""
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
        assert finding.fix == fix
        assert not list(expert_kernels_have_use(change(plan, fix)))
    for chip, proposed in (("a100", False), ("h100", True), ("b200", True)):
        plan = build(fields | {"cluster.chip": chip})
        assert ({"knobs.expert_fusion": True} in _remedies(plan, "compute")) == proposed


def test_a_plan_knows_the_shape_of_its_experts() -> None:
    """By hand: 4096 tokens of 8 experts each, 128 experts over 16 ranks."""
    tune = pytest.importorskip("threefold.engine.kernels.tune", exc_type=ImportError)
    recipe = Path(__file__).parent.parent / "recipes" / "qwen3-30b-a3b-4k-16xh100-bf16-no-overlap.toml"
    plan = read_plan(str(recipe), []).plan
    assert plan is not None
    assert tune.shape_of(plan) == Shape(4096 * 8 * plan.job.micro_batch, 8, 2048, 768, gathered=False)
    alone = change(plan, {"cluster.gpus": 1, "layout.ep": 1, "job.micro_batch": 2, "job.global_batch": 2})
    assert tune.shape_of(alone) == Shape(2 * 4096 * 8, 128, 2048, 768, gathered=True)
    # 2 GiB of rows hold 65,536 tokens: 2,048 wide, in two bytes, to eight experts.
    long = change(alone, {"job.micro_batch": 1, "job.seq_len": 131_072})
    assert tune.shape_of(long).num_rows == 65_536 * 8
    spread = change(plan, {"job.seq_len": 131_072})
    assert tune.shape_of(spread).num_rows == 131_072 * 8


@pytest.mark.parametrize(
    ("factor", "alone", "spread"), [(0.5, 16_384, 16_384), (1.0, 32_768, 32_768), (1.5, 49_152, 32_768)]
)
def test_a_plan_with_a_capacity_has_rows_by_it(factor: float, alone: int, spread: int) -> None:
    """By hand: 4,096 tokens of 8 experts each are 32,768 copies, 256 for each of 128 experts. One rank fills up."""
    tune = pytest.importorskip("threefold.engine.kernels.tune", exc_type=ImportError)
    capacity = pytest.importorskip("threefold.engine.dispatch.capacity").Capacity(factor, 128)
    recipe = Path(__file__).parent.parent / "recipes" / "qwen3-30b-a3b-4k-16xh100-bf16-no-overlap.toml"
    fields = {"job.micro_batch": 1, "job.capacity_factor": factor}
    plan = change(read_plan(str(recipe), []).plan, fields)
    one = change(plan, {"cluster.gpus": 1, "layout.ep": 1, "job.global_batch": 1})
    assert tune.shape_of(one) == Shape(alone, 128, 2048, 768, gathered=False)
    assert tune.shape_of(plan) == Shape(spread, 8, 2048, 768, gathered=False)
    _, count_E = capacity.fill(torch.arange(32_768).view(4096, 8) % 128, torch.rand(4096, 8))
    assert int(count_E.sum()) == alone


class Mark:
    def __init__(self, ms: float) -> None:
        self.ms = ms

    def elapsed_time(self, other: "Mark") -> float:
        return other.ms - self.ms


def test_the_fastest_kernels_that_fit_together_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Milliseconds by hand: torch 3, ours 2 but for one FC2 that does not run, quack 1 but 9 for FC1's activation."""
    home = pytest.importorskip("threefold.engine.kernels.tune", exc_type=ImportError)
    kept: dict[str, Choice] = {}

    def cost(step: str, config: Any) -> float:
        if step == "down" and isinstance(config, Config) and config.flat:
            raise RuntimeError("out of resource: shared memory")
        return 3 if config is None else 2 if isinstance(config, Config) else 9 if step == "up" else 1

    def run(choice: Choice, timed: tuple[str, str]) -> tuple[Mark, Mark]:
        steps = STEPS if timed[0] != timed[1] else timed[:1]
        return Mark(0), Mark(sum(cost(step, getattr(choice, step)) for step in steps))

    monkeypatch.setattr(home, "_work", lambda *given: run)
    monkeypatch.setattr(home, "cute_works", lambda device: True)
    monkeypatch.setattr(home, "save", lambda device, shape, choice, kind="auto": kept.update({kind: choice}))
    monkeypatch.setattr(home.torch.cuda, "synchronize", lambda: None)
    best = home.tune(QWEN, 8, torch.device("cuda"))
    assert kept.keys() == {"torch", "triton", "cute", "auto"}
    assert best == kept["auto"]
    # FC1 and the gradient of its activation by ours, 2 + 2, the products by quack's, 4: less than 9 + 5 by quack alone.
    assert {step for step in STEPS if isinstance(getattr(best, step), Config)} == {"up", "act_grad"}
    assert not kept["triton"].cute
    assert kept["triton"].down == Config()
    assert kept["torch"] == Choice()


@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize("plain", [True, False])
def test_experts_with_biases_and_clamps_are_measured_with_them(
    plain: bool, gathered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the plain steps in place of a GPU's."""
    home = pytest.importorskip("threefold.engine.kernels.tune", exc_type=ImportError)
    seen = []

    class Noted(Reference):
        def __init__(self, ends_E: Any, num_rows: int, clamped: bool, choice: Choice, starts_F: Any) -> None:
            super().__init__(ends_E, num_rows, clamped)
            assert (starts_F is not None) == gathered

        def up(self, *given: Any) -> Any:
            seen.append((self.clamped, None if given[4] is None else tuple(given[4].shape)))
            return super().up(*given)

        def act_grad(self, *given: Any) -> Any:
            seen.append((self.clamped, None))
            return super().act_grad(*given)

    monkeypatch.setattr(home, "Steps", Noted)
    monkeypatch.setattr(home, "counting_sort", sort_rows)
    monkeypatch.setattr(home.torch.cuda, "Event", lambda **given: SimpleNamespace(record=lambda: None))
    work = home._work(Shape(24, 3, 16, 8, gathered, plain), 2, torch.device("cpu"))
    work(Choice(), (STEPS[0], STEPS[-1]))
    bias = None if plain else (3, 16)
    assert seen == [(not plain, bias), (not plain, bias), (not plain, None)]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.skipif(not HAS_CUTE, reason="quack-kernels on a Hopper GPU")
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(("path", "choice"), COMPARED.values(), ids=COMPARED)
@pytest.mark.parametrize(("num_tokens", "dim", "expert_dim"), [(333, 256, 128), (1000, 512, 192)])
def test_quack_agrees_with_fp64(
    path: Any, choice: Choice, load: str, num_tokens: int, dim: int, expert_dim: int
) -> None:
    """bf16 rounds results by 2e-3, and the activation before them."""
    experts = module(8, dim, expert_dim, "silu", False).cuda()
    expert_TK = experts_of(num_tokens, 3, 8, load).cuda()
    x_TD, slope = torch.randn(num_tokens, dim, device="cuda"), torch.randn(num_tokens, dim, device="cuda")
    weight_TK = torch.rand(expert_TK.shape, device="cuda")

    def inputs(dtype: Any) -> Any:
        kept = torch.float64 if dtype == torch.float64 else torch.float32
        x = x_TD.bfloat16().to(dtype).requires_grad_()
        return experts.bfloat16().to(dtype), x, weight_TK.to(kept).requires_grad_(), slope.bfloat16().to(dtype)

    exact, x, weight, grad = inputs(torch.float64)
    expected = gradients(plain(exact, x, weight, expert_TK), exact, x, weight, grad)
    rounded, x, weight, grad = inputs(torch.bfloat16)
    found = gradients(path(rounded, x, weight, expert_TK, "silu", choice), rounded, x, weight, grad)
    for one, other in zip(found, expected, strict=True):
        assert far(one, other) < 1e-2
