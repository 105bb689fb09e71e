"""The routed experts of one rank as one autograd Function, which saves only its input and FC1's output.

`moe/experts.py` calls `fused_experts` where all experts are on this rank, and `grouped_experts` on rows that a
dispatcher has already sorted by expert. The router weight multiplies a row before FC2, so that neither FC2's output nor
the gathered rows have to be saved. `_make_steps` picks the kernels: `GpuSteps`, or `ReferenceSteps` where there are
none.

Shapes: T tokens, K experts of a token, R rows (token copies sorted by expert), D model dim, E experts, H expert dim,
X = 2 H.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from threefold.engine.autograd.delayed_wgrad import WgradTarget, compute_or_delay, wgrad_targets
from threefold.engine.autograd.grad_squares import requested_squares
from threefold.engine.context import count_event
from threefold.engine.kernels.availability import has_triton_kernels
from threefold.engine.kernels.elementwise.topk_router import ChunkStarts
from threefold.engine.kernels.experts.kernel_choice import ExpertShape, KernelChoice, choose_kernels
from threefold.engine.kernels.experts.reference_steps import ReferenceSteps
from threefold.engine.kernels.experts.sorted_rows import SortedRows, expert_of_rows, sort_rows

IS_CLAMPED = {"silu": False, "clamped swiglu": True}  # name -> whether it is clamped


def fused_experts(
    x_TD: Tensor,
    weight_TK: Tensor,
    expert_TK: Tensor,
    gate_up_EXD: Tensor,
    down_EDH: Tensor,
    gate_up_bias_EX: Tensor | None = None,
    down_bias_ED: Tensor | None = None,
    activation: str = "silu",
    choice: KernelChoice | str | None = None,
    starts: ChunkStarts | None = None,
) -> Tensor:
    """Tokens in, tokens out: each token through its K experts, weighted and summed. The host never waits for the
    device.

    `choice` is a `KernelChoice` or the kind of kernels to choose from (see `kernel_choice.py`); None means "auto".
    `starts` come from a router that has counted the copies of each expert.
    """
    num_experts = len(gate_up_EXD)
    rows = sort_by_expert(expert_TK, num_experts, weight_TK, starts)
    parameters, targets = wgrad_targets(x_TD, gate_up_EXD, down_EDH)
    clamped = IS_CLAMPED[activation]
    y_TD = _Experts.apply(x_TD, weight_TK, *parameters, gate_up_bias_EX, rows.ends_E, rows, clamped, choice, targets)
    if down_bias_ED is None:
        return y_TD
    return _add_bias(y_TD, weight_TK, expert_TK, down_bias_ED)


def grouped_experts(
    x_RD: Tensor,
    weight_R: Tensor,
    count_E: Tensor,
    gate_up_EXD: Tensor,
    down_EDH: Tensor,
    gate_up_bias_EX: Tensor | None = None,
    down_bias_ED: Tensor | None = None,
    activation: str = "silu",
    choice: KernelChoice | str | None = None,
    order: SortedRows | None = None,
) -> Tensor:
    """Rows in, weighted rows out: the first count_E[0] rows belong to expert 0, and so on; the counts add up to all
    rows. With `order` the rows lie as it says, and so do those of the result."""
    weight_X1, rows, ends_E = rows_as_tokens(weight_R, count_E, order)
    parameters, targets = wgrad_targets(x_RD, gate_up_EXD, down_EDH)
    clamped = IS_CLAMPED[activation]
    y_RD = _Experts.apply(x_RD, weight_X1, *parameters, gate_up_bias_EX, ends_E, rows, clamped, choice, targets)
    if down_bias_ED is None:
        return y_RD
    expert_R = expert_of_rows(ends_E, len(x_RD))
    if order is not None:
        expert_R = expert_R[order.row_TK[:, 0]]
    return _add_bias(y_RD, weight_R[:, None], expert_R[:, None], down_bias_ED)


def rows_as_tokens(
    weight_R: Tensor, count_E: Tensor, order: SortedRows | None
) -> tuple[Tensor, SortedRows | None, Tensor]:
    """-> (weights, rows and ends as the autograd functions of experts take them): with `order` each row is a token."""
    if order is None:
        return weight_R, None, count_E.cumsum(0).to(torch.int32)
    return weight_R[:, None], replace(order, weight_R=weight_R.detach()[order.token_R]), order.ends_E


def _add_bias(y_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, bias_ED: Tensor) -> Tensor:
    """Add the biases of FC2, each times its router weight, in place: a GEMM with weights that have one column for each
    expert. Its backward sums the bias gradients in fp32."""
    weight_TE = weight_TK.new_zeros(len(weight_TK), len(bias_ED)).scatter_add(1, expert_TK, weight_TK)
    return y_TD.addmm_(weight_TE.to(y_TD.dtype), bias_ED)


class _Experts(torch.autograd.Function):
    """The router weights are (T, K) where `rows` say how tokens are sorted by expert, else (R,)."""

    @staticmethod
    def forward(
        ctx: Any,
        x_XD: Tensor,
        weight: Tensor,
        gate_up_EXD: Tensor,
        down_EDH: Tensor,
        bias_EX: Tensor | None,
        ends_E: Tensor,
        rows: SortedRows | None,
        clamped: bool,
        choice: KernelChoice | str | None,
        targets: list[WgradTarget],
    ) -> Tensor:
        weight_R, ctx.rows = weights_by_row(weight, rows)
        ctx.clamped, ctx.targets, ctx.tables = clamped, targets, {}
        num_experts, dim, expert_dim = down_EDH.shape
        plain = bias_EX is None and not clamped
        gathered, stored = rows is not None, rows is not None and rows.target_R is not None
        shape = ExpertShape(weight.numel(), num_experts, dim, expert_dim, gathered, plain, stored)
        ctx.choice = choice if isinstance(choice, KernelChoice) else choose_kernels(shape, x_XD, choice or "auto")
        for kind in {"reference"} if ctx.choice is None else ctx.choice.kinds:
            count_event("expert kernels", kind)
        x_XD = x_XD.contiguous()
        steps = _make_steps(ctx, ends_E, len(weight_R))
        gate_up_RX, act_RH = steps.up(x_XD, rows, weight_R, gate_up_EXD, bias_EX)
        y_XD = steps.down(act_RH, down_EDH, rows)
        # The input is for FC1's weight gradient alone.
        wants_fc1 = ctx.needs_input_grad[2] or targets[0].queue is not None
        ctx.save_for_backward(x_XD if wants_fc1 else None, weight_R, gate_up_EXD, down_EDH, ends_E, gate_up_RX)
        return y_XD  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad_XD: Tensor) -> tuple[Tensor | None, ...]:
        x_XD, weight_R, gate_up_EXD, down_EDH, ends_E, gate_up_RX = ctx.saved_tensors
        rows: SortedRows | None = ctx.rows
        wants_x, wants_weight, *wants, wants_bias = ctx.needs_input_grad[:5]
        steps = _make_steps(ctx, ends_E, len(weight_R))
        grad_XD = grad_XD.contiguous()
        grad_RX, act_RH, weight_grad_R = steps.act_grad(grad_XD, rows, weight_R, down_EDH, gate_up_RX)
        fc1_target, fc2_target = ctx.targets
        squares = [requested_squares(target.weight) for target in ctx.targets]
        fc2_work = partial(steps.down_grad, grad_XD, rows, act_RH, squares=squares[1])
        fc2_wgrad = compute_or_delay(fc2_target, wants[1], fc2_work)
        del act_RH, fc2_work
        fc1_work = partial(steps.up_grad, grad_RX, x_XD, rows, squares=squares[0])
        fc1_wgrad = compute_or_delay(fc1_target, wants[0], fc1_work)
        bias_grad = sum_by_expert(grad_RX, expert_of_rows(ends_E, len(grad_RX)), len(ends_E)) if wants_bias else None
        x_grad = steps.input_grad(grad_RX, gate_up_EXD, rows) if wants_x else None
        weight_grad = _weight_grad(weight_grad_R, rows).to(weight_R.dtype) if wants_weight else None
        return x_grad, weight_grad, fc1_wgrad, fc2_wgrad, bias_grad, None, None, None, None, None


def weights_by_row(weight: Tensor, rows: SortedRows | None) -> tuple[Tensor, SortedRows | None]:
    """-> (the router weight of each row, contiguous; the rows without those weights).

    The weights are saved by autograd, so the second result must not hold them a second time.
    """
    if rows is None:
        return weight.contiguous(), None
    assert rows.weight_R is not None
    return rows.weight_R, replace(rows, weight_R=None)


def _weight_grad(grad_R: Tensor, rows: SortedRows | None) -> Tensor:
    """The gradient of the router weights, from one value of each row or from parts (R, N) that add up to it."""
    if rows is not None:
        return values_by_token(grad_R, rows)
    return grad_R.sum(dim=1) if grad_R.dim() > 1 else grad_R


def values_by_token(values_R: Tensor, rows: SortedRows) -> Tensor:
    """One value of each row, or the sum of its values, in the order of tokens: (T, K)."""
    if not has_triton_kernels(values_R.device) or not values_R.numel():
        values_TK = values_R[rows.row_TK]
        return values_TK if values_R.dim() == 1 else values_TK.sum(dim=2)
    from threefold.engine.kernels.experts.row_kernels import gather_values

    return gather_values(values_R, rows.row_TK)


def _make_steps(ctx: Any, ends_E: Tensor, num_rows: int) -> Any:
    """The steps for the kernels in `ctx.choice`; a dry run puts a function of its own in this place."""
    # The copy engine (TMA) has no descriptor for a tensor without rows.
    if ctx.choice is None or not num_rows:
        return ReferenceSteps(ends_E, num_rows, ctx.clamped)
    from threefold.engine.kernels.experts.gpu_steps import GpuSteps

    starts_F = ctx.rows.starts_F if ctx.rows else None
    return GpuSteps(ends_E, num_rows, ctx.clamped, ctx.choice, starts_F, ctx.tables)


def sort_by_expert(
    expert_TK: Tensor, num_experts: int, weight_TK: Tensor, starts: ChunkStarts | None = None
) -> SortedRows:
    """Sort token copies by expert: with the counting sort where Triton runs, else in torch."""
    if not has_triton_kernels(expert_TK.device) or not expert_TK.numel():
        return sort_rows(expert_TK, num_experts, weight_TK)
    from threefold.engine.kernels.experts.counting_sort import counting_sort, finish_sort

    if starts is not None:
        return finish_sort(expert_TK, weight_TK, starts)
    return counting_sort(expert_TK, num_experts, weight_TK)


def sum_by_expert(grad_RX: Tensor, expert_R: Tensor, num_experts: int) -> Tensor:
    """Sum the rows of each expert by a GEMM with a 0/1 matrix: in fp32, and always in the same order."""
    expert_E = torch.arange(num_experts, device=grad_RX.device)
    return (expert_E[:, None] == expert_R).to(grad_RX.dtype) @ grad_RX
