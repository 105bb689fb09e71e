"""Squares that kernels sum as they store gradients: the norm takes them, or reads a gradient that has changed."""

from typing import Any

import pytest
import torch
from fake_cuda_graphs import StandIn
from small_gpu_model import SMALL, small_parts, small_plan
from tiny_models import spec_of
from torch import Tensor, nn

from threefold.engine.autograd.grad_squares import (
    GradSquares,
    grad_squares_of,
    request_grad_squares,
    requested_squares,
)
from threefold.engine.batch import Batch
from threefold.engine.data_parallel.single_rank import SingleRank
from threefold.engine.graphs.graphed_part import ChunkGraphs
from threefold.engine.graphs.scopes import ModelGraphs
from threefold.engine.kernels.availability import has_gluon_kernels
from threefold.engine.kernels.experts import fused_experts
from threefold.engine.kernels.experts.reference_steps import ReferenceSteps
from threefold.engine.model_options import Options
from threefold.engine.models.build import build_model
from threefold.engine.schedule.microbatch_runners import Sequential
from threefold.engine.step import train_step

HAS_KERNEL = torch.cuda.is_available() and has_gluon_kernels(torch.device("cuda"))


def stacked_model() -> tuple[nn.Module, SingleRank]:
    model = nn.Module()
    model.experts, model.bias = nn.Parameter(torch.zeros(2, 3, 4)), nn.Parameter(torch.zeros(4))
    return model, SingleRank(model)


def set_grads(model: nn.Module) -> None:
    model.experts.grad, model.bias.grad = torch.full((2, 3, 4), 2.0), torch.full((4,), 3.0)


def note(model: nn.Module, sums: list[float]) -> None:
    squares = requested_squares(model.experts)
    assert squares is not None
    squares.note(model.experts.grad, torch.tensor(sums))


def test_the_norm_takes_sums_that_a_kernel_left() -> None:
    model, data = stacked_model()
    data.begin_step(1)
    set_grads(model)
    assert float(data.grad_sum_of_squares()) == 24 * 4 + 4 * 9  # nobody has left any
    note(model, [100.0, 11.0])
    assert float(data.grad_sum_of_squares()) == 111 + 4 * 9


def scale(model: nn.Module) -> None:
    model.experts.grad.mul_(0.5)


def copy(model: nn.Module) -> None:
    model.experts.grad = model.experts.grad.clone().mul_(0.5)


@pytest.mark.parametrize("change", [scale, copy])
def test_a_gradient_that_changed_is_read(change: Any) -> None:
    model, data = stacked_model()
    data.begin_step(1)
    set_grads(model)
    note(model, [111.0])
    change(model)
    assert float(data.grad_sum_of_squares()) == 24 * 1 + 4 * 9


def test_sums_of_the_step_before_are_forgotten() -> None:
    model, data = stacked_model()
    data.begin_step(1)
    set_grads(model)
    note(model, [111.0])
    kept = model.experts.grad
    data.begin_step(1)
    model.experts.grad = kept  # another gradient may lie at the same address
    assert grad_squares_of(model.experts) is None


def test_several_passes_ask_for_no_sums() -> None:
    model, data = stacked_model()
    for passes, wanted in ((1, True), (2, False), (1, True)):
        data.begin_step(passes)
        assert (requested_squares(model.experts) is not None) == wanted
        assert requested_squares(model.bias) is None


def test_a_request_is_taken_back() -> None:
    parameter = nn.Parameter(torch.zeros(1, 1, 1))
    request_grad_squares(parameter, False)
    request_grad_squares(parameter, True)
    first = requested_squares(parameter)
    request_grad_squares(parameter, True)
    assert requested_squares(parameter) is not first
    request_grad_squares(parameter, False)
    assert requested_squares(parameter) is None


class NotingSteps(ReferenceSteps):
    """The reference, with weight gradients that leave the sums of their squares as the kernels do."""

    def up_grad(self, *args: Any, squares: Any = None) -> Any:
        return noted(super().up_grad(*args), squares)

    def down_grad(self, *args: Any, squares: Any = None) -> Any:
        return noted(super().down_grad(*args), squares)


def noted(grad: Tensor, squares: GradSquares | None) -> Tensor:
    if squares is not None:
        squares.note(grad, grad.square().sum(dim=(1, 2)))
    return grad


@pytest.mark.parametrize("graphs", [None, ("full_iteration",)], ids=["eager", "graph"])
@pytest.mark.parametrize("recompute", [(), ("moe",)], ids=str)
def test_every_step_takes_the_sums_of_its_own_gradients(
    graphs: tuple[str, ...] | None, recompute: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of one pass and of two in any order, with a stand-in for CUDA graphs."""
    monkeypatch.setattr(
        fused_experts, "_make_steps", lambda ctx, ends_E, num_rows: NotingSteps(ends_E, num_rows, False)
    )
    options = Options(expert_fusion=True, graphs=graphs or (), recompute=recompute)
    model = build_model(spec_of("qwen3_moe"), options=options)
    model_graphs = ModelGraphs(model, ChunkGraphs(StandIn) if graphs else None)
    data, runner = SingleRank(model), Sequential(model, model_graphs)
    experts = {name: p for name, p in model.named_parameters() if p.dim() == 3}
    assert experts
    for step, passes in enumerate((1, 1, 1, 2, 2, 1, 1, 2, 1)):
        tokens_BS = torch.randint(model.spec.vocab, (2, 12))
        data.begin_step(passes)
        runner.run([Batch(tokens_BS, tokens_BS.roll(step, 1)) for _ in range(passes)], [1 / passes] * passes)
        exact = sum(float(p.grad.double().square().sum()) for p in model.parameters())
        assert float(data.grad_sum_of_squares()) == pytest.approx(exact, rel=1e-5)  # sums in fp32
        if (
            passes == 1 and step < 3
        ):  # the graph of later passes adds to gradients in place, which are read from then on
            assert all(grad_squares_of(p) is not None for p in experts.values())
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.05 * p.grad


@pytest.mark.skipif(not HAS_KERNEL, reason="needs a Hopper GPU")
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(
    ("graphs", "recompute"),
    [([], []), ([], ["moe"]), (["full_iteration"], []), (["full_iteration"], ["moe"]), (["attn", "moe_router"], [])],
    ids=str,
)
def test_the_norm_on_a_gpu_is_that_of_the_gradients(graphs: list[str], recompute: list[str], passes: int) -> None:
    plan = small_plan(passes, {"knobs.graphs": graphs, "knobs.recompute": recompute})
    parts = small_parts(plan)
    for _ in range(5):
        tokens_BS = torch.randint(SMALL.vocab, (2, 128), device="cuda")
        result = train_step(parts, [Batch(tokens_BS, tokens_BS)] * passes, 1e-4, plan.job)
    model = parts.chunks[0]
    exact = sum(p.grad.double().square().sum() for p in model.parameters()).sqrt().item()
    assert result.grad_norm == pytest.approx(exact, rel=1e-5)  # sums in fp32, of values before they are rounded
    for name, p in model.named_parameters():
        if "experts" in name:
            assert (grad_squares_of(p) is not None) == (passes == 1), name
