"""The experts of one rank, forward and backward, keeping only their input and FC1's output for the backward.

Shapes: T tokens, K experts of a token, R rows (token copies sorted by expert), D model dim, E experts, H expert dim,
X = 2 H.

A row's router weight goes in before FC2, so that neither its output nor the rows as they were gathered must be kept.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from threefold.engine.kernels.choose import Choice, Shape, choose, works
from threefold.engine.kernels.reference import Reference
from threefold.engine.kernels.sort import Rows, expert_of, sort_rows
from threefold.engine.pipeline.delay import Left, left_of
from threefold.engine.sinks import sink_of

ACTIVATIONS = {"silu": False, "clamped swiglu": True}  # name -> whether it is clamped


def fused_experts(
    x_TD: Tensor,
    weight_TK: Tensor,
    expert_TK: Tensor,
    gate_up_EXD: Tensor,
    down_EDH: Tensor,
    gate_up_bias_EX: Tensor | None = None,
    down_bias_ED: Tensor | None = None,
    activation: str = "silu",
    choice: Choice | str | None = None,
) -> Tensor:
    """Tokens in, tokens out: sorted by expert, computed, weighted and summed, with no wait for the device."""
    num_experts = len(gate_up_EXD)
    rows = sorted_rows(expert_TK, num_experts, weight_TK)
    parameters, owners = given(x_TD, gate_up_EXD, down_EDH)
    clamped = ACTIVATIONS[activation]
    y_TD = _Experts.apply(x_TD, weight_TK, *parameters, gate_up_bias_EX, rows.ends_E, rows, clamped, choice, owners)
    if down_bias_ED is None:
        return y_TD
    return y_TD + _spread(weight_TK, expert_TK, num_experts).to(y_TD.dtype) @ down_bias_ED


def grouped_experts(
    x_RD: Tensor,
    weight_R: Tensor,
    count_E: Tensor,
    gate_up_EXD: Tensor,
    down_EDH: Tensor,
    gate_up_bias_EX: Tensor | None = None,
    down_bias_ED: Tensor | None = None,
    activation: str = "silu",
    choice: Choice | str | None = None,
) -> Tensor:
    """Rows in, rows out: `count_E` of them belong to each expert in turn, and make up all; each comes back weighted."""
    ends_E = count_E.cumsum(0).to(torch.int32)
    parameters, owners = given(x_RD, gate_up_EXD, down_EDH)
    clamped = ACTIVATIONS[activation]
    y_RD = _Experts.apply(x_RD, weight_R, *parameters, gate_up_bias_EX, ends_E, None, clamped, choice, owners)
    if down_bias_ED is None:
        return y_RD
    spread_RE = _spread(weight_R[:, None], expert_of(ends_E, len(x_RD))[:, None], len(count_E))
    return y_RD + spread_RE.to(y_RD.dtype) @ down_bias_ED


Owner = tuple[list[Left] | None, Tensor, Tensor | None]  # where its gradient waits, a weight, and its sink


def given(x: Tensor, *weights: Tensor) -> tuple[list[Tensor], list[Owner]]:
    """The weights as autograd is to see them: not those whose gradients wait."""
    owners = [(left_of(x, weight), weight, sink_of(weight)) for weight in weights]
    return [weight if left is None else weight.detach() for left, weight, _ in owners], owners


def _spread(weight_TK: Tensor, expert_TK: Tensor, num_experts: int) -> Tensor:
    """Weights, a column for each expert. A product with them adds the biases of FC2; its backward sums in fp32."""
    return weight_TK.new_zeros(len(weight_TK), num_experts).scatter_add(1, expert_TK, weight_TK)


class _Experts(torch.autograd.Function):
    """`weight` is (T, K) with `rows`, which say how tokens are sorted, else (R,)."""

    @staticmethod
    def forward(
        ctx: Any,
        x_XD: Tensor,
        weight: Tensor,
        gate_up_EXD: Tensor,
        down_EDH: Tensor,
        bias_EX: Tensor | None,
        ends_E: Tensor,
        rows: Rows | None,
        clamped: bool,
        choice: Choice | str | None,
        owners: list[Owner],
    ) -> Tensor:
        weight_R, ctx.rows = of_rows(weight, rows)
        ctx.clamped, ctx.owners = clamped, owners
        num_experts, dim, half = down_EDH.shape
        plain = bias_EX is None and not clamped
        shape = Shape(weight.numel(), num_experts, dim, half, gathered=rows is not None, plain=plain)
        ctx.choice = choice if isinstance(choice, Choice) else choose(shape, x_XD, choice or "auto")
        x_XD = x_XD.contiguous()
        steps = _steps(ctx, ends_E, len(weight_R))
        gate_up_RX, act_RH = steps.up(x_XD, rows, weight_R, gate_up_EXD, bias_EX)
        y_RD = steps.down(act_RH, down_EDH)
        ctx.save_for_backward(x_XD, weight_R, gate_up_EXD, down_EDH, ends_E, gate_up_RX)
        return y_RD if rows is None else steps.sum_rows(y_RD, rows.row_TK)

    @staticmethod
    def backward(ctx: Any, grad_XD: Tensor) -> tuple[Tensor | None, ...]:
        x_XD, weight_R, gate_up_EXD, down_EDH, ends_E, gate_up_RX = ctx.saved_tensors
        rows: Rows | None = ctx.rows
        wants_x, wants_weight, *wants, wants_bias = ctx.needs_input_grad[:5]
        steps = _steps(ctx, ends_E, len(weight_R))
        grad_XD = grad_XD.contiguous()
        grad_RX, act_RH, weight_grad_R = steps.act_grad(grad_XD, rows, weight_R, down_EDH, gate_up_RX)
        up, down = ctx.owners
        down_grad = gradient(down, wants[1], partial(steps.down_grad, grad_XD, rows, act_RH))
        del act_RH
        up_grad = gradient(up, wants[0], partial(steps.up_grad, grad_RX, x_XD, rows))
        bias_grad = sum_by_expert(grad_RX, expert_of(ends_E, len(grad_RX)), len(ends_E)) if wants_bias else None
        x_grad = steps.input_grad(grad_RX, gate_up_EXD) if wants_x else None
        if rows is not None and x_grad is not None:
            x_grad = steps.sum_rows(x_grad, rows.row_TK)
        weight_grad = weight_grad_R if wants_weight else None
        if rows is not None and weight_grad is not None:
            weight_grad = of_slots(weight_grad, rows)
        return x_grad, weight_grad, up_grad, down_grad, bias_grad, None, None, None, None, None


def gradient(owner: Owner, wanted: bool, compute: Callable[[Tensor | None], Tensor | None]) -> Tensor | None:
    """The gradient of a weight, unless it waits."""
    left, weight, sink = owner
    if left is None:
        return compute(sink) if wanted else None
    left.append((weight, partial(compute, sink)))
    return None


def of_rows(weight: Tensor, rows: Rows | None) -> tuple[Tensor, Rows | None]:
    """The router weight of each row, as kernels read it: one after another; and the rows without them, which autograd
    keeps."""
    if rows is None:
        return weight.contiguous(), None
    assert rows.weight_R is not None
    return rows.weight_R, replace(rows, weight_R=None)


def of_slots(values_R: Tensor, rows: Rows) -> Tensor:
    """One value of each row, back in the order of tokens."""
    if not works(values_R.device) or not values_R.numel():
        return values_R[rows.row_TK]
    from threefold.engine.kernels.elementwise import take

    return take(values_R, rows.row_TK)


def _steps(ctx: Any, ends_E: Tensor, num_rows: int) -> Any:
    # The copy engine's descriptors cannot tell of a tensor without rows.
    if ctx.choice is None or not num_rows:
        return Reference(ends_E, num_rows, ctx.clamped)
    from threefold.engine.kernels.steps import Steps

    return Steps(ends_E, num_rows, ctx.clamped, ctx.choice, ctx.rows.starts_F if ctx.rows else None)


def sorted_rows(expert_TK: Tensor, num_experts: int, weight_TK: Tensor) -> Rows:
    if not works(expert_TK.device) or not expert_TK.numel():
        return sort_rows(expert_TK, num_experts, weight_TK)
    from threefold.engine.kernels.counting import counting_sort

    return counting_sort(expert_TK, num_experts, weight_TK)


def sum_by_expert(grad_RX: Tensor, expert_R: Tensor, num_experts: int) -> Tensor:
    """As a product with the 0/1 matrix of experts and rows: summed in fp32, and in one order."""
    expert_E = torch.arange(num_experts, device=grad_RX.device)
    return (expert_E[:, None] == expert_R).to(grad_RX.dtype) @ grad_RX
