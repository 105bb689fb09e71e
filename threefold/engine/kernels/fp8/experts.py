"""The experts of one rank in FP8, forward and backward. For the backward they keep their input in FP8, as the gradient
of FC1's weight reads it, and FC1's output.

Shapes: T tokens, K experts of a token, R rows (token copies sorted by expert), D model dim, E experts, H expert dim,
X = 2 H.

Recipes: "blockwise" has 1x128 scales on rows and 128x128 on weights; "rowwise" one on each row of either. Gradients of
weights sum over blocks of 128 rows in both: 128x1 of gradients, 128x128 of inputs.
"""

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from threefold.engine.kernels.choose import works
from threefold.engine.kernels.experts import Owner, given, gradient, of_rows, of_slots, sorted_rows
from threefold.engine.kernels.fp8 import reference, unmade
from threefold.engine.kernels.fp8.format import BLOCK, Columns8, QuantizedWeights, Weight8
from threefold.engine.kernels.sort import Rows
from threefold.engine.ways import stood_for

Recipe = Literal["blockwise", "rowwise"]
_ALIGN = 16  # bytes, of the copy engine


def fp8_experts(
    x_RD: Tensor,
    weight_R: Tensor,
    count_E: Tensor,
    gate_up_EXD: Tensor,
    down_EDH: Tensor,
    weights8: QuantizedWeights | None = None,
    recipe: Recipe = "blockwise",
    clamped: bool = False,
) -> Tensor:
    """Rows in, rows out: `count_E` of them belong to each expert in turn, and make up all; each comes back weighted.

    `weights8` are `quantize_weights` of the weights, where the caller keeps them. Without, they are made for the
    forward and again for the backward: nothing of them stays in between.
    """
    ends_E = count_E.cumsum(0).to(torch.int32)
    parameters, owners = given(x_RD, gate_up_EXD, down_EDH)
    return _Experts8.apply(x_RD, weight_R, *parameters, weights8, ends_E, None, recipe, clamped, owners)  # type: ignore[no-any-return]


def fp8_experts_of_tokens(
    x_TD: Tensor,
    weight_TK: Tensor,
    expert_TK: Tensor,
    gate_up_EXD: Tensor,
    down_EDH: Tensor,
    weights8: QuantizedWeights | None = None,
    recipe: Recipe = "blockwise",
    clamped: bool = False,
) -> Tensor:
    """Tokens in, tokens out, with no wait for the device: rows are gathered as they are quantised."""
    rows = sorted_rows(expert_TK, len(down_EDH), weight_TK)
    parameters, owners = given(x_TD, gate_up_EXD, down_EDH)
    return _Experts8.apply(x_TD, weight_TK, *parameters, weights8, rows.ends_E, rows, recipe, clamped, owners)  # type: ignore[no-any-return]


def fits(dim: int, expert_dim: int) -> bool:
    """Whether experts of these sizes can: blocks must not hold both of gate and up."""
    return expert_dim % BLOCK == 0 and dim % _ALIGN == 0


def quantize_weights(gate_up_EXD: Tensor, down_EDH: Tensor, recipe: Recipe = "blockwise") -> QuantizedWeights:
    """Once an optimizer step is enough."""
    return QuantizedWeights(*(quantize_weight(weight.detach(), recipe) for weight in (gate_up_EXD, down_EDH)))


def quantize_weight(weight_EOI: Tensor, recipe: Recipe = "blockwise") -> Weight8:
    if stood_for():
        return unmade.unmade_weight(weight_EOI, recipe == "rowwise")
    if not works(weight_EOI.device):
        plain = {"blockwise": reference.quantize_weight, "rowwise": reference.quantize_weight_rows}
        return plain[recipe](weight_EOI)
    from threefold.engine.kernels.fp8 import quantize, rowwise

    return (quantize if recipe == "blockwise" else rowwise).quantize_weight(weight_EOI)


class _Experts8(torch.autograd.Function):
    """`weight` is (T, K) with `rows`, which say how tokens are sorted, else (R,)."""

    @staticmethod
    def forward(
        ctx: Any,
        x_XD: Tensor,
        weight: Tensor,
        gate_up_EXD: Tensor,
        down_EDH: Tensor,
        weights8: QuantizedWeights | None,
        ends_E: Tensor,
        rows: Rows | None,
        recipe: Recipe,
        clamped: bool,
        owners: list[Owner],
    ) -> Tensor:
        weight_R, ctx.rows = of_rows(weight, rows)
        ctx.weights8, ctx.recipe, ctx.owners = weights8, recipe, owners
        made = () if weights8 else (gate_up_EXD, down_EDH)
        weights8 = weights8 or quantize_weights(gate_up_EXD, down_EDH, recipe)
        ctx.dtypes = gate_up_EXD.dtype, down_EDH.dtype
        ctx.steps = steps = _steps(recipe, ends_E, len(weight_R), clamped)
        x8, turned8 = steps.quantize(x_XD.contiguous(), rows, _wanted(ctx)[0], square=True)
        gate_up_RX = steps.product(x8, weights8.gate_up.value_EOI, weights8.gate_up.scale)
        del x8
        act8 = steps.activated(gate_up_RX, weight_R)
        y_RD = steps.product(act8, weights8.down.value_EOI, weights8.down.scale)
        kept = (turned8.value_KP, turned8.scale) if turned8 else (None, None)
        ctx.save_for_backward(weight_R, gate_up_RX, *kept, *made)
        return y_RD if rows is None else steps.sum_rows(y_RD, rows.row_TK)

    @staticmethod
    def backward(ctx: Any, grad_XD: Tensor) -> tuple[Tensor | None, ...]:
        weight_R, gate_up_RX, turned, turned_scale, *made = ctx.saved_tensors
        rows: Rows | None = ctx.rows
        steps = ctx.steps
        weights8 = ctx.weights8 or quantize_weights(made[0], made[1], ctx.recipe)
        gate_up8, down8 = weights8.gate_up, weights8.down
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        (up, down), (wants_up, wants_down) = ctx.owners, _wanted(ctx)
        grad8, grad_turned8 = steps.quantize(grad_XD.contiguous(), rows, wants_down, square=False)
        grad_RH = steps.product(grad8, down8.turned_EIO, down8.turned_scale)
        del grad8
        grad8, up_turned8, act_turned8, weight_grad = steps.activated_grad(
            grad_RH, gate_up_RX, weight_R, wants_up, wants_down
        )
        del grad_RH
        compute = partial(_weight_grad, steps, grad_turned8, act_turned8, ctx.dtypes[1])
        down_grad = gradient(down, wants_down, compute)
        del grad_turned8, act_turned8
        compute = partial(_weight_grad, steps, up_turned8, Columns8(turned, turned_scale), ctx.dtypes[0])
        up_grad = gradient(up, wants_up, compute)
        del up_turned8, compute
        x_grad = steps.product(grad8, gate_up8.turned_EIO, gate_up8.turned_scale) if wants_x else None
        if rows is not None and x_grad is not None:
            x_grad = steps.sum_rows(x_grad, rows.row_TK)
        if rows is not None:
            weight_grad = of_slots(weight_grad, rows)
        return x_grad, weight_grad if wants_weight else None, up_grad, down_grad, None, None, None, None, None, None


def _wanted(ctx: Any) -> list[bool]:
    """Of FC1 and FC2: whether the weight gets a gradient, now or later, for which columns must be there."""
    now = ctx.needs_input_grad[2:4]
    return [wants or left is not None for wants, (left, *_) in zip(now, ctx.owners, strict=True)]


def _weight_grad(
    steps: Any, left8: Columns8, right8: Columns8, dtype: torch.dtype, sink: Tensor | None
) -> Tensor | None:
    """With a sink it is added there, and nothing comes back."""
    grad = steps.weight_grad(left8, right8, dtype)
    if sink is None:
        return grad  # type: ignore[no-any-return]
    sink.add_(grad)
    return None


def _steps(recipe: Recipe, ends_E: Tensor, num_rows: int, clamped: bool) -> Any:
    blockwise = recipe == "blockwise"
    kind: Any
    if stood_for():
        kind = unmade.Unmade8 if blockwise else unmade.RowUnmade8
    elif not num_rows or not works(ends_E.device):  # the copy engine's descriptors cannot tell of no rows at all
        kind = reference.Reference8 if blockwise else reference.RowReference8
    else:
        from threefold.engine.kernels.fp8.steps import RowSteps8, Steps8

        kind = Steps8 if blockwise else RowSteps8
    return kind(ends_E, num_rows, clamped)
