"""The activation between the products, both ways: bf16 in, FP8 out in every form that a product wants next.

Shapes: R rows sorted by expert, H expert dim, X = 2 H, C blocks of H.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from threefold.engine.kernels.activation import activate, activate_grad
from threefold.engine.kernels.fp8.format import BLOCK, Blocks, Columns8, Rows8, num_blocks
from threefold.engine.kernels.fp8.quantize import (
    empty_columns,
    empty_rows,
    largest_of,
    pack,
    parts_of,
    put_column_scales,
    put_rows,
    put_square_scale,
    tile_of,
)

_ROWS, _COLUMNS = 32, 32  # that one program of the backward makes, by rows and by columns


def activated(gate_up_RX: Tensor, weight_R: Tensor, clamped: bool) -> Rows8:
    """The activation times the router weight."""
    num_rows, half = gate_up_RX.shape[0], gate_up_RX.shape[1] // 2
    rows8 = empty_rows(num_rows, half, gate_up_RX.device)
    _activated[(num_blocks(half) * num_blocks(num_rows),)](
        gate_up_RX, weight_R, rows8.value_RK, rows8.scale_CR, num_rows, half, clamped, BLOCK, num_warps=8
    )
    return rows8


def activated_grad(
    grad_RH: Tensor, gate_up_RX: Tensor, weight_R: Tensor, clamped: bool
) -> tuple[Rows8, Tensor, Tensor]:
    """`grad_RH` of the weighted activation -> (gradient of gate_up_RX by rows, the weighted activation's largest
    magnitude in each block of a row, gradient of weight_R)."""
    num_rows, half = grad_RH.shape
    rows8 = empty_rows(num_rows, 2 * half, grad_RH.device)
    part_CR = torch.empty(num_blocks(half), num_rows, device=grad_RH.device)
    largest_CR = torch.empty_like(part_CR)
    _grad_rows[(num_blocks(half) * triton.cdiv(num_rows, _ROWS),)](
        grad_RH, gate_up_RX, weight_R, *parts_of(rows8), part_CR, largest_CR, num_rows, half, clamped, BLOCK, _ROWS,
        num_warps=4,
    )  # fmt: skip
    return rows8, largest_CR, part_CR.sum(dim=0).to(weight_R.dtype)


def activated_columns(
    grad_RH: Tensor,
    gate_up_RX: Tensor,
    weight_R: Tensor,
    largest_CR: Tensor,
    blocks: Blocks,
    clamped: bool,
    up: bool,
    act: bool,
) -> tuple[Columns8 | None, Columns8 | None]:
    """-> (gradient of gate_up_RX by columns if `up`, the weighted activation by columns, in squares, if `act`). A pass
    of its own beside that by rows: registers do not hold whole blocks of both."""
    num_rows, half = grad_RH.shape
    grad8 = empty_columns(blocks.num, 2 * half, False, grad_RH.device) if up else None
    act8 = empty_columns(blocks.num, half, True, grad_RH.device) if act else None
    if up or act:
        _grad_columns[(half // _COLUMNS * blocks.num,)](
            grad_RH, gate_up_RX, weight_R, largest_CR, blocks.table, blocks.total, blocks.num, *parts_of(grad8),
            *parts_of(act8), num_rows, half, up, act, clamped, BLOCK, _COLUMNS, num_warps=4,
        )  # fmt: skip
    return grad8, act8


@triton.jit
def _activated(
    gate_up_ptr, weight_ptr, value_ptr, scale_ptr, num_rows, half, CLAMPED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    block, down = tile_of(half, BLOCK)
    row = down * BLOCK + tl.arange(0, BLOCK)
    live = row < num_rows
    at = gate_up_ptr + row.to(tl.int64)[:, None] * (2 * half) + block * BLOCK + tl.arange(0, BLOCK)[None, :]
    gate = tl.load(at, mask=live[:, None], other=0.0).to(tl.float32)
    up = tl.load(at + half, mask=live[:, None], other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + row, mask=live, other=0.0)
    act = activate(gate, up, CLAMPED) * weight[:, None]
    put_rows(act, value_ptr, scale_ptr, row, live, block, block * BLOCK, num_rows, half, BLOCK)


@triton.jit
def _grad_rows(
    grad_ptr, gate_up_ptr, weight_ptr, value_ptr, scale_ptr, part_ptr, largest_ptr, num_rows, half,
    CLAMPED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    block, down = tile_of(half, BLOCK)
    row = down * ROWS + tl.arange(0, ROWS)
    live, shift = row < num_rows, block * BLOCK
    act, gate_grad, up_grad, part = _grads(
        grad_ptr, gate_up_ptr, weight_ptr, row, live, shift + tl.arange(0, BLOCK), half, CLAMPED
    )
    tl.store(part_ptr + block * num_rows + row, part, mask=live)
    tl.store(largest_ptr + block * num_rows + row, tl.max(tl.abs(act), 1), mask=live)
    put_rows(gate_grad, value_ptr, scale_ptr, row, live, block, shift, num_rows, 2 * half, BLOCK)
    then = block + half // BLOCK
    put_rows(up_grad, value_ptr, scale_ptr, row, live, then, half + shift, num_rows, 2 * half, BLOCK)


@triton.jit
def _grad_columns(
    grad_ptr, gate_up_ptr, weight_ptr, largest_ptr, table_ptr, total_ptr, num, grad_value_ptr, grad_scale_ptr,
    act_value_ptr, act_scale_ptr, num_rows, half, UP: tl.constexpr, ACT: tl.constexpr, CLAMPED: tl.constexpr,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    across, block = tile_of(half, COLUMNS)
    col = across * COLUMNS + tl.arange(0, COLUMNS)
    if block < tl.load(total_ptr):
        # Every fourth row, four times: the four bytes of a column that lie together are then one number.
        quad = tl.arange(0, BLOCK // 4)
        row = tl.load(table_ptr + num + block) + 4 * quad
        end = tl.load(table_ptr + 2 * num + block)
        act0, gate0, up0, _ = _grads(grad_ptr, gate_up_ptr, weight_ptr, row, row < end, col, half, CLAMPED)
        act1, gate1, up1, _ = _grads(grad_ptr, gate_up_ptr, weight_ptr, row + 1, row + 1 < end, col, half, CLAMPED)
        act2, gate2, up2, _ = _grads(grad_ptr, gate_up_ptr, weight_ptr, row + 2, row + 2 < end, col, half, CLAMPED)
        act3, gate3, up3, _ = _grads(grad_ptr, gate_up_ptr, weight_ptr, row + 3, row + 3 < end, col, half, CLAMPED)
        place = block * (BLOCK // 4) + quad
        stride = num * (BLOCK // 4)
        if ACT:
            c = across * COLUMNS // BLOCK
            each = tl.load(table_ptr + num + block) + tl.arange(0, BLOCK)
            largest = tl.max(tl.load(largest_ptr + c * num_rows + each, mask=each < end, other=0.0), 0)
            # The programs of one square make the same scale.
            largest += tl.zeros((COLUMNS,), tl.float32)
            inverse = put_square_scale(largest, act_scale_ptr + block * (half // BLOCK) + c)
            at = act_value_ptr + col.to(tl.int64)[:, None] * stride + place[None, :]
            tl.store(at, pack(act0, act1, act2, act3, inverse).T)
        if UP:
            inverse = put_column_scales(largest_of(gate0, gate1, gate2, gate3), grad_scale_ptr, block, col, 2 * half)
            at = grad_value_ptr + col.to(tl.int64)[:, None] * stride + place[None, :]
            tl.store(at, pack(gate0, gate1, gate2, gate3, inverse).T)
            inverse = put_column_scales(largest_of(up0, up1, up2, up3), grad_scale_ptr, block, half + col, 2 * half)
            at = grad_value_ptr + (half + col).to(tl.int64)[:, None] * stride + place[None, :]
            tl.store(at, pack(up0, up1, up2, up3, inverse).T)


@triton.jit
def _grads(grad_ptr, gate_up_ptr, weight_ptr, row, live, col, half, CLAMPED: tl.constexpr):
    """-> (the weighted activation, the gradients of gate and up, their part of the router weights' gradient)."""
    at = row.to(tl.int64)[:, None] * (2 * half) + col[None, :]
    gate = tl.load(gate_up_ptr + at, mask=live[:, None], other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + at + half, mask=live[:, None], other=0.0).to(tl.float32)
    at = row.to(tl.int64)[:, None] * half + col[None, :]
    grad = tl.load(grad_ptr + at, mask=live[:, None], other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + row, mask=live, other=0.0)
    act, gate_grad, up_grad = activate_grad(grad * weight[:, None], gate, up, CLAMPED)
    return act * weight[:, None], gate_grad, up_grad, tl.sum(act * grad, 1)
