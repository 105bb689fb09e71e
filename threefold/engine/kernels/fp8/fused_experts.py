"""The routed experts of one rank in FP8, forward and backward, as one autograd function.

For the backward it saves the input in FP8, in the layout that the weight gradient of FC1 reads, and FC1's bf16 output.
`precision/low_precision_experts.py` calls it.

Recipes: "blockwise" has 1x128 scales on rows and 128x128 on weights; "rowwise" has one scale on each row of either. In
both, weight gradients sum over blocks of 128 rows: 128x1 blocks of gradients, 128x128 of inputs.

Shapes: T tokens, K experts of a token, R rows (token copies sorted by expert), D model dim, E experts, H expert dim,
X = 2 H.
"""

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from threefold.engine.autograd.delayed_wgrad import WgradTarget, compute_or_delay, wgrad_targets
from threefold.engine.context import count_event
from threefold.engine.device import is_simulated
from threefold.engine.kernels.availability import has_triton_kernels
from threefold.engine.kernels.elementwise.topk_router import ChunkStarts
from threefold.engine.kernels.experts.fused_experts import (
    rows_as_tokens,
    sort_by_expert,
    values_by_token,
    weights_by_row,
)
from threefold.engine.kernels.experts.sorted_rows import SortedRows
from threefold.engine.kernels.fp8 import dry_run_steps as simulated_steps
from threefold.engine.kernels.fp8 import reference_steps
from threefold.engine.kernels.fp8.quantized_tensors import BLOCK, Fp8Columns, Fp8ExpertWeights, Fp8Weight

Recipe = Literal["blockwise", "rowwise"]
_ALIGN = 16  # bytes: TMA copies need rows that begin at a multiple


def fp8_experts(
    x_RD: Tensor,
    weight_R: Tensor,
    count_E: Tensor,
    gate_up_EXD: Tensor,
    down_EDH: Tensor,
    fp8_weights: Fp8ExpertWeights | None = None,
    recipe: Recipe = "blockwise",
    clamped: bool = False,
    order: SortedRows | None = None,
) -> Tensor:
    """Run the experts on rows sorted by expert, `count_E` for each; each row of the result has its router weight.

    With `order` the rows lie as it says, and so do those of the result.

    `fp8_weights` are `quantize_weights` of the weights, where the caller caches them. Without them the weights are
    quantized in the forward and once more in the backward, and no quantized copy lives in between.
    """
    weight_X1, rows, ends_E = rows_as_tokens(weight_R, count_E, order)
    parameters, targets = wgrad_targets(x_RD, gate_up_EXD, down_EDH)
    return _Fp8Experts.apply(x_RD, weight_X1, *parameters, fp8_weights, ends_E, rows, recipe, clamped, targets)  # type: ignore[no-any-return]


def fp8_experts_of_tokens(
    x_TD: Tensor,
    weight_TK: Tensor,
    expert_TK: Tensor,
    gate_up_EXD: Tensor,
    down_EDH: Tensor,
    fp8_weights: Fp8ExpertWeights | None = None,
    recipe: Recipe = "blockwise",
    clamped: bool = False,
    starts: ChunkStarts | None = None,
) -> Tensor:
    """Run the experts on tokens, with no wait for the device: rows are gathered while they are quantized.

    `starts` come from a router that has counted the copies of each expert.
    """
    rows = sort_by_expert(expert_TK, len(down_EDH), weight_TK, starts)
    parameters, targets = wgrad_targets(x_TD, gate_up_EXD, down_EDH)
    return _Fp8Experts.apply(x_TD, weight_TK, *parameters, fp8_weights, rows.ends_E, rows, recipe, clamped, targets)  # type: ignore[no-any-return]


def supports_sizes(dim: int, expert_dim: int) -> bool:
    """Whether the kernels take experts of these sizes: no block may hold columns of both gate and up."""
    return expert_dim % BLOCK == 0 and dim % _ALIGN == 0


def quantize_weights(gate_up_EXD: Tensor, down_EDH: Tensor, recipe: Recipe = "blockwise") -> Fp8ExpertWeights:
    """Quantize both layers. Once an optimizer step is enough."""
    return Fp8ExpertWeights(*(quantize_weight(weight.detach(), recipe) for weight in (gate_up_EXD, down_EDH)))


def quantize_weight(weight_EOI: Tensor, recipe: Recipe = "blockwise") -> Fp8Weight:
    if is_simulated():
        return simulated_steps.empty_weight(weight_EOI, recipe == "rowwise")
    if not has_triton_kernels(weight_EOI.device):
        plain = {"blockwise": reference_steps.quantize_weight, "rowwise": reference_steps.quantize_weight_rowwise}
        return plain[recipe](weight_EOI)
    from threefold.engine.kernels.fp8 import blockwise_quantize
    from threefold.engine.kernels.fp8 import rowwise_kernels as rowwise_quantize

    return (blockwise_quantize if recipe == "blockwise" else rowwise_quantize).quantize_weight(weight_EOI)


class _Fp8Experts(torch.autograd.Function):
    """Both layers and their backward. `weight` is (T, K) with `rows`, which say how tokens are sorted, else (R,)."""

    @staticmethod
    def forward(
        ctx: Any,
        x_XD: Tensor,
        weight: Tensor,
        gate_up_EXD: Tensor,
        down_EDH: Tensor,
        fp8_weights: Fp8ExpertWeights | None,
        ends_E: Tensor,
        rows: SortedRows | None,
        recipe: Recipe,
        clamped: bool,
        targets: list[WgradTarget],
    ) -> Tensor:
        weight_R, ctx.rows = weights_by_row(weight, rows)
        ctx.fp8_weights, ctx.recipe, ctx.targets = fp8_weights, recipe, targets
        saved_weights = () if fp8_weights else (gate_up_EXD, down_EDH)
        fp8_weights = fp8_weights or quantize_weights(gate_up_EXD, down_EDH, recipe)
        ctx.dtypes = gate_up_EXD.dtype, down_EDH.dtype
        count_event("expert kernels", "fp8" if x_XD.is_cuda else "fp8 reference")
        ctx.steps = steps = _make_steps(recipe, ends_E, len(weight_R), clamped)
        x_fp8, x_columns = steps.quantize(x_XD.contiguous(), rows, _wants_weight_grads(ctx)[0], square=True)
        gate_up_RX = steps.grouped_gemm(x_fp8, fp8_weights.gate_up.value_EOI, fp8_weights.gate_up.scale)
        del x_fp8
        act_fp8 = steps.swiglu(gate_up_RX, weight_R)
        y_XD = steps.grouped_gemm(act_fp8, fp8_weights.down.value_EOI, fp8_weights.down.scale, rows)
        saved_input = (x_columns.value_KP, x_columns.scale) if x_columns else (None, None)
        ctx.save_for_backward(weight_R, gate_up_RX, *saved_input, *saved_weights)
        return y_XD  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad_XD: Tensor) -> tuple[Tensor | None, ...]:
        weight_R, gate_up_RX, x_value, x_scale, *saved_weights = ctx.saved_tensors
        rows: SortedRows | None = ctx.rows
        steps = ctx.steps
        fp8_weights = ctx.fp8_weights or quantize_weights(saved_weights[0], saved_weights[1], ctx.recipe)
        gate_up_fp8, down_fp8 = fp8_weights.gate_up, fp8_weights.down
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        (up, down), (wants_up, wants_down) = ctx.targets, _wants_weight_grads(ctx)
        grad_fp8, grad_columns = steps.quantize(grad_XD.contiguous(), rows, wants_down, square=False)
        grad_RH = steps.grouped_gemm(grad_fp8, down_fp8.transposed_EIO, down_fp8.transposed_scale)
        del grad_fp8
        grad_fp8, gate_up_grad_columns, act_columns, weight_grad = steps.swiglu_grad(
            grad_RH, gate_up_RX, weight_R, wants_up, wants_down
        )
        del grad_RH
        compute = partial(_weight_grad, steps, grad_columns, act_columns, ctx.dtypes[1])
        down_grad = compute_or_delay(down, wants_down, compute)
        del grad_columns, act_columns
        compute = partial(_weight_grad, steps, gate_up_grad_columns, Fp8Columns(x_value, x_scale), ctx.dtypes[0])
        up_grad = compute_or_delay(up, wants_up, compute)
        del gate_up_grad_columns, compute
        x_grad = (
            steps.grouped_gemm(grad_fp8, gate_up_fp8.transposed_EIO, gate_up_fp8.transposed_scale, rows)
            if wants_x
            else None
        )
        if rows is not None:
            weight_grad = values_by_token(weight_grad, rows)
        return x_grad, weight_grad if wants_weight else None, up_grad, down_grad, None, None, None, None, None, None


def _wants_weight_grads(ctx: Any) -> list[bool]:
    """Whether the weights of FC1 and FC2 get a gradient, at once or delayed: only then columns are quantized."""
    now = ctx.needs_input_grad[2:4]
    return [wants or left is not None for wants, (left, *_) in zip(now, ctx.targets, strict=True)]


def _weight_grad(
    steps: Any, left_fp8: Fp8Columns, right_fp8: Fp8Columns, dtype: torch.dtype, main_grad: Tensor | None
) -> Tensor | None:
    """Compute the gradient, or add it to `main_grad` where the weight has one and return None."""
    return steps.wgrad(left_fp8, right_fp8, dtype, main_grad)  # type: ignore[no-any-return]


def _make_steps(recipe: Recipe, ends_E: Tensor, num_rows: int, clamped: bool) -> Any:
    blockwise = recipe == "blockwise"
    kind: Any
    if is_simulated():
        kind = simulated_steps.BlockwiseSimulatedSteps if blockwise else simulated_steps.RowwiseSimulatedSteps
    elif not num_rows or not has_triton_kernels(ends_E.device):  # a TMA descriptor cannot have zero rows
        kind = reference_steps.BlockwiseReferenceSteps if blockwise else reference_steps.RowwiseReferenceSteps
    else:
        from threefold.engine.kernels.fp8.gpu_steps import BlockwiseGpuSteps, RowwiseGpuSteps

        kind = BlockwiseGpuSteps if blockwise else RowwiseGpuSteps
    return kind(ends_E, num_rows, clamped)
