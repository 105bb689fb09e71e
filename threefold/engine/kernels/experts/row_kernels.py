"""Row-wise Triton kernels around the experts' GEMMs: SwiGLU with router weights, and moves between tokens and rows.

`gpu_steps.py` uses them beside torch's grouped GEMM, which has neither fused. Each is one pass over memory.

Shapes: T tokens, K experts of a token, R rows (token copies sorted by expert), D model dim, H expert dim, X = 2 H.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from threefold.engine.kernels.elementwise.permute_triton import launch_scatter_tokens, launch_sum_rows
from threefold.engine.kernels.elementwise.swiglu_triton import swiglu, swiglu_grad
from threefold.engine.kernels.fast_launch import fast_launch
from threefold.engine.kernels.launch_config import cdiv, next_power_of_2

_BLOCK = 1024


def weighted_swiglu(gate_up_RX: Tensor, weight_R: Tensor, clamped: bool) -> Tensor:
    """The activation times the router weight."""
    num_rows, expert_dim = gate_up_RX.shape[0], gate_up_RX.shape[1] // 2
    act_RH = gate_up_RX.new_empty(num_rows, expert_dim)
    _weighted_swiglu[(num_rows,)](
        gate_up_RX, weight_R, act_RH, expert_dim, min(_BLOCK, next_power_of_2(expert_dim)), clamped
    )
    return act_RH


def weighted_swiglu_grad(
    grad_RH: Tensor, gate_up_RX: Tensor, weight_R: Tensor, clamped: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`grad_RH` is the gradient of the weighted activation.

    -> (gradient of gate_up_RX, the weighted activation, gradient of weight_R)
    """
    num_rows, expert_dim = grad_RH.shape
    grad_RX, act_RH = torch.empty_like(gate_up_RX), torch.empty_like(grad_RH)
    weight_grad_R = torch.empty_like(weight_R)
    _weighted_swiglu_grad[(num_rows,)](
        grad_RH, gate_up_RX, weight_R, grad_RX, act_RH, weight_grad_R, expert_dim,
        min(_BLOCK, next_power_of_2(expert_dim)), clamped,
    )  # fmt: skip
    return grad_RX, act_RH, weight_grad_R


def sum_rows(y_RD: Tensor, row_TK: Tensor) -> Tensor:
    """Sum the rows of each token, in fp32 and always in the same order."""
    y_TD = y_RD.new_empty(len(row_TK), y_RD.shape[1])
    launch_sum_rows(y_RD, row_TK, y_TD, padded=False)
    return y_TD


def gather_rows(x_TD: Tensor, row_TK: Tensor) -> Tensor:
    """Copy each token to all of its rows; every value is read once."""
    x_RD = x_TD.new_empty(row_TK.numel(), x_TD.shape[1])
    launch_scatter_tokens(x_TD, row_TK, x_RD)
    return x_RD


def gather_values(values: Tensor, row_TK: Tensor) -> Tensor:
    """values[row_TK]: one value of each row in the order of tokens, or the sum of its values where it has several."""
    taken_TK = torch.empty_like(row_TK, dtype=values.dtype)
    num_rows, num_parts = row_TK.numel(), values.numel() // len(values)
    _gather_values[(cdiv(num_rows, _BLOCK),)](values, row_TK, taken_TK, num_rows, num_parts, _BLOCK)
    return taken_TK


@fast_launch
@triton.jit
def _gather_values(values_ptr, row_ptr, taken_ptr, num_rows, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = slot < num_rows
    values_ptr += tl.load(row_ptr + slot, mask=live, other=0) * PARTS
    total = tl.load(values_ptr, mask=live)
    for n in tl.static_range(1, PARTS):
        total += tl.load(values_ptr + n, mask=live)
    tl.store(taken_ptr + slot, total, mask=live)


@fast_launch
@triton.jit
def _weighted_swiglu(gate_up_ptr, weight_ptr, act_ptr, H: tl.constexpr, BLOCK: tl.constexpr, CLAMPED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weight_ptr + row)
    for begin in tl.static_range(0, H, BLOCK):
        n = begin + tl.arange(0, BLOCK)
        mask = n < H
        gate = tl.load(gate_up_ptr + row * 2 * H + n, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_up_ptr + (row * 2 + 1) * H + n, mask=mask, other=0.0).to(tl.float32)
        act = swiglu(gate, up, CLAMPED) * weight
        tl.store(act_ptr + row * H + n, act.to(act_ptr.dtype.element_ty), mask=mask)


@fast_launch
@triton.jit
def _weighted_swiglu_grad(
    grad_act_ptr, gate_up_ptr, weight_ptr, grad_ptr, act_ptr, weight_grad_ptr, H: tl.constexpr, BLOCK: tl.constexpr,
    CLAMPED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weight_ptr + row)
    dtype = act_ptr.dtype.element_ty
    part = tl.zeros((BLOCK,), tl.float32)
    for begin in tl.static_range(0, H, BLOCK):
        n = begin + tl.arange(0, BLOCK)
        mask = n < H
        grad = tl.load(grad_act_ptr + row * H + n, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gate_up_ptr + row * 2 * H + n, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_up_ptr + (row * 2 + 1) * H + n, mask=mask, other=0.0).to(tl.float32)
        act, gate_grad, up_grad = swiglu_grad(grad * weight, gate, up, CLAMPED)
        tl.store(grad_ptr + row * 2 * H + n, gate_grad.to(dtype), mask=mask)
        tl.store(grad_ptr + (row * 2 + 1) * H + n, up_grad.to(dtype), mask=mask)
        tl.store(act_ptr + row * H + n, (act * weight).to(dtype), mask=mask)
        part += tl.where(mask, act * grad, 0.0)
    tl.store(weight_grad_ptr + row, tl.sum(part, 0))
