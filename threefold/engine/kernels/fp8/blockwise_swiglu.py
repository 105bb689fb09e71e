"""Triton kernels of SwiGLU between the FP8 GEMMs, forward and backward: bf16 in, FP8 out.

The output has the layouts that the next GEMM reads. `gpu_steps` calls them; both recipes use `swiglu_grad_columns`.

Shapes: R rows sorted by expert, H expert dim, X = 2 H, C blocks of H.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from threefold.engine.kernels.elementwise.swiglu_triton import swiglu, swiglu_grad
from threefold.engine.kernels.fast_launch import fast_launch
from threefold.engine.kernels.fp8.blockwise_quantize import (
    column_amax,
    empty_columns,
    empty_rows,
    kernel_arguments,
    pack_rows,
    program_tile,
    store_column_scales,
    store_rows,
    store_square_scale,
)
from threefold.engine.kernels.fp8.quantized_tensors import BLOCK, Fp8Columns, Fp8Rows, RowBlocks, num_blocks
from threefold.engine.kernels.launch_config import cdiv

_ROWS, _COLUMNS = 32, 32  # tile sizes of the backward kernels: rows of the pass by rows, columns of the pass by columns


def swiglu_fp8(gate_up_RX: Tensor, weight_R: Tensor, clamped: bool) -> Fp8Rows:
    """The activation times the router weight, quantized in 1x128 blocks."""
    num_rows, expert_dim = gate_up_RX.shape[0], gate_up_RX.shape[1] // 2
    fp8_rows = empty_rows(num_rows, expert_dim, gate_up_RX.device)
    _swiglu_fp8[(num_blocks(expert_dim) * num_blocks(num_rows),)](
        gate_up_RX, weight_R, fp8_rows.value_RK, fp8_rows.scale_CR, num_rows, expert_dim, clamped, BLOCK, num_warps=8
    )
    return fp8_rows


def swiglu_grad_rows(
    grad_RH: Tensor, gate_up_RX: Tensor, weight_R: Tensor, clamped: bool
) -> tuple[Fp8Rows, Tensor, Tensor]:
    """Differentiate the weighted activation, whose gradient is `grad_RH`.

    Returns the gradient of gate_up_RX by rows, the amax of the weighted activation in each block of a row, and the
    gradient of weight_R.
    """
    num_rows, expert_dim = grad_RH.shape
    fp8_rows = empty_rows(num_rows, 2 * expert_dim, grad_RH.device)
    partial_CR = torch.empty(num_blocks(expert_dim), num_rows, device=grad_RH.device)
    amax_CR = torch.empty_like(partial_CR)
    _swiglu_grad_rows[(num_blocks(expert_dim) * cdiv(num_rows, _ROWS),)](
        grad_RH, gate_up_RX, weight_R, *kernel_arguments(fp8_rows), partial_CR, amax_CR, num_rows, expert_dim,
        clamped, BLOCK, _ROWS, num_warps=4,
    )  # fmt: skip
    return fp8_rows, amax_CR, partial_CR.sum(dim=0).to(weight_R.dtype)


def swiglu_grad_columns(
    grad_RH: Tensor,
    gate_up_RX: Tensor,
    weight_R: Tensor,
    amax_CR: Tensor,
    blocks: RowBlocks,
    clamped: bool,
    wants_gate_up: bool,
    wants_act: bool,
) -> tuple[Fp8Columns | None, Fp8Columns | None]:
    """The gradient of gate_up_RX by columns if `wants_gate_up`, and the weighted activation by columns if `wants_act`.

    The activation has 128x128 blocks. This is a pass of its own beside `swiglu_grad_rows`, because registers do not
    hold whole blocks of both.
    """
    num_rows, expert_dim = grad_RH.shape
    grad_fp8 = empty_columns(blocks.max_blocks, 2 * expert_dim, False, grad_RH.device) if wants_gate_up else None
    act_fp8 = empty_columns(blocks.max_blocks, expert_dim, True, grad_RH.device) if wants_act else None
    if wants_gate_up or wants_act:
        _swiglu_grad_columns[(expert_dim // _COLUMNS * blocks.max_blocks,)](
            grad_RH, gate_up_RX, weight_R, amax_CR, blocks.table, blocks.total, blocks.max_blocks,
            *kernel_arguments(grad_fp8), *kernel_arguments(act_fp8), num_rows, expert_dim, wants_gate_up, wants_act,
            clamped, BLOCK, _COLUMNS, num_warps=4,
        )  # fmt: skip
    return grad_fp8, act_fp8


@fast_launch
@triton.jit
def _swiglu_fp8(
    gate_up_ptr, weight_ptr, value_ptr, scale_ptr, num_rows, expert_dim, CLAMPED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    block, row_block = program_tile(expert_dim, BLOCK)
    row = row_block * BLOCK + tl.arange(0, BLOCK)
    row_mask = row < num_rows
    at = gate_up_ptr + row.to(tl.int64)[:, None] * (2 * expert_dim) + block * BLOCK + tl.arange(0, BLOCK)[None, :]
    gate = tl.load(at, mask=row_mask[:, None], other=0.0).to(tl.float32)
    wants_gate_up = tl.load(at + expert_dim, mask=row_mask[:, None], other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + row, mask=row_mask, other=0.0)
    wants_act = swiglu(gate, wants_gate_up, CLAMPED) * weight[:, None]
    store_rows(wants_act, value_ptr, scale_ptr, row, row_mask, block, block * BLOCK, num_rows, expert_dim, BLOCK)


@fast_launch
@triton.jit
def _swiglu_grad_rows(
    grad_ptr, gate_up_ptr, weight_ptr, value_ptr, scale_ptr, partial_ptr, amax_ptr, num_rows, expert_dim,
    CLAMPED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    block, row_block = program_tile(expert_dim, BLOCK)
    row = row_block * ROWS + tl.arange(0, ROWS)
    row_mask, shift = row < num_rows, block * BLOCK
    wants_act, gate_grad, up_grad, part = _load_and_differentiate(
        grad_ptr, gate_up_ptr, weight_ptr, row, row_mask, shift + tl.arange(0, BLOCK), expert_dim, CLAMPED
    )
    tl.store(partial_ptr + block * num_rows + row, part, mask=row_mask)
    tl.store(amax_ptr + block * num_rows + row, tl.max(tl.abs(wants_act), 1), mask=row_mask)
    store_rows(gate_grad, value_ptr, scale_ptr, row, row_mask, block, shift, num_rows, 2 * expert_dim, BLOCK)
    up_block = block + expert_dim // BLOCK
    store_rows(
        up_grad, value_ptr, scale_ptr, row, row_mask, up_block, expert_dim + shift, num_rows, 2 * expert_dim, BLOCK
    )


@fast_launch
@triton.jit
def _swiglu_grad_columns(
    grad_ptr, gate_up_ptr, weight_ptr, amax_ptr, table_ptr, total_ptr, max_blocks, grad_value_ptr, grad_scale_ptr,
    act_value_ptr, act_scale_ptr, num_rows, expert_dim, UP: tl.constexpr, ACT: tl.constexpr, CLAMPED: tl.constexpr,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    across, block = program_tile(expert_dim, COLUMNS)
    col = across * COLUMNS + tl.arange(0, COLUMNS)
    if block < tl.load(total_ptr):
        # Each pass takes every fourth row, so that four neighboring bytes of a column are one int32: see `pack_rows`.
        quad = tl.arange(0, BLOCK // 4)
        row = tl.load(table_ptr + max_blocks + block) + 4 * quad
        end = tl.load(table_ptr + 2 * max_blocks + block)
        act0, gate0, up0, _ = _load_and_differentiate(
            grad_ptr, gate_up_ptr, weight_ptr, row, row < end, col, expert_dim, CLAMPED
        )
        act1, gate1, up1, _ = _load_and_differentiate(
            grad_ptr, gate_up_ptr, weight_ptr, row + 1, row + 1 < end, col, expert_dim, CLAMPED
        )
        act2, gate2, up2, _ = _load_and_differentiate(
            grad_ptr, gate_up_ptr, weight_ptr, row + 2, row + 2 < end, col, expert_dim, CLAMPED
        )
        act3, gate3, up3, _ = _load_and_differentiate(
            grad_ptr, gate_up_ptr, weight_ptr, row + 3, row + 3 < end, col, expert_dim, CLAMPED
        )
        packed_row = block * (BLOCK // 4) + quad
        stride = max_blocks * (BLOCK // 4)
        if ACT:
            c = across * COLUMNS // BLOCK
            each = tl.load(table_ptr + max_blocks + block) + tl.arange(0, BLOCK)
            amax = tl.max(tl.load(amax_ptr + c * num_rows + each, mask=each < end, other=0.0), 0)
            # All programs of one 128x128 block compute the same scale.
            amax += tl.zeros((COLUMNS,), tl.float32)
            inverse = store_square_scale(amax, act_scale_ptr + block * (expert_dim // BLOCK) + c)
            at = act_value_ptr + col.to(tl.int64)[:, None] * stride + packed_row[None, :]
            tl.store(at, pack_rows(act0, act1, act2, act3, inverse).T)
        if UP:
            at = grad_value_ptr + col.to(tl.int64)[:, None] * stride + packed_row[None, :]
            _store_columns(gate0, gate1, gate2, gate3, at, grad_scale_ptr, block, col, 2 * expert_dim)
            at = grad_value_ptr + (expert_dim + col).to(tl.int64)[:, None] * stride + packed_row[None, :]
            _store_columns(up0, up1, up2, up3, at, grad_scale_ptr, block, expert_dim + col, 2 * expert_dim)


@triton.jit
def _store_columns(x0, x1, x2, x3, at, scale_ptr, block, col, width):
    inverse = store_column_scales(column_amax(x0, x1, x2, x3), scale_ptr, block, col, width)
    tl.store(at, pack_rows(x0, x1, x2, x3, inverse).T)


@triton.jit
def _load_and_differentiate(grad_ptr, gate_up_ptr, weight_ptr, row, row_mask, col, expert_dim, CLAMPED: tl.constexpr):
    """The weighted activation, the gradients of gate and up, and a part of the router weights' gradient."""
    at = row.to(tl.int64)[:, None] * (2 * expert_dim) + col[None, :]
    gate = tl.load(gate_up_ptr + at, mask=row_mask[:, None], other=0.0).to(tl.float32)
    wants_gate_up = tl.load(gate_up_ptr + at + expert_dim, mask=row_mask[:, None], other=0.0).to(tl.float32)
    at = row.to(tl.int64)[:, None] * expert_dim + col[None, :]
    grad = tl.load(grad_ptr + at, mask=row_mask[:, None], other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + row, mask=row_mask, other=0.0)
    wants_act, gate_grad, up_grad = swiglu_grad(grad * weight[:, None], gate, wants_gate_up, CLAMPED)
    return wants_act * weight[:, None], gate_grad, up_grad, tl.sum(wants_act * grad, 1)
