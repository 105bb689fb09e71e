"""Backward of FC2 and of the activation before it as one Triton kernel, for all experts.

`gpu_steps.py` calls it for the step `act_grad`. It gives the gradient of FC1's output, the weighted activation once
more (the weight gradient of FC2 needs it), and the gradient of the router weights.

Shapes: T tokens, R rows (token copies sorted by expert), D model dim, E experts, H expert dim, X = 2 H; the first dim
of grad_XD is T with a gather and R without one.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from threefold.engine.kernels.elementwise.swiglu_triton import swiglu_grad
from threefold.engine.kernels.experts.tile_schedule import TileTable, split_columns, tile_coordinates
from threefold.engine.kernels.fast_launch import fast_launch, tensor_blocks
from threefold.engine.kernels.launch_config import TritonConfig, cdiv, num_programs


def fc2_backward(
    grad_XD: Tensor,
    token_R: Tensor | None,
    weight_R: Tensor,
    down_EDH: Tensor,
    gate_up_RX: Tensor,
    tiles: TileTable,
    clamped: bool,
    config: TritonConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> (gradient of gate_up_RX, weighted activation, parts of the gradient of weight_R but for a bias of FC2)."""
    num_rows, dim, expert_dim = len(weight_R), *down_EDH.shape[1:]
    grad_RX = torch.empty_like(gate_up_RX)
    act_RH = gate_up_RX.new_empty(num_rows, expert_dim)
    # One column for each tile of columns; `row_kernels.gather_values` sums them, always in the same order.
    part_RN = torch.empty(num_rows, cdiv(expert_dim, config.n), dtype=torch.float32, device=weight_R.device)
    weights = tensor_blocks(down_EDH, [1, config.k, config.n])
    grad = grad_XD if token_R is not None else tensor_blocks(grad_XD, [tiles.size, config.k])
    _fc2_backward[(num_programs(grad_XD.device, config.per_sm),)](
        grad, token_R, weight_R, weights, gate_up_RX, grad_RX, act_RH, part_RN, tiles.table, tiles.total,
        tiles.table.shape[1], expert_dim, dim, tiles.size, config.n, config.k, config.group, dim % config.k == 0,
        expert_dim % config.n == 0, token_R is not None, clamped, config.strip, num_warps=config.warps,
        num_stages=config.stages,
    )  # fmt: skip
    return grad_RX, act_RH, part_RN


@fast_launch
@triton.jit
def _fc2_backward(
    grad, token_ptr, weight_ptr, w_desc, gate_up_ptr, grad_ptr, act_ptr, part_ptr, table_ptr, total_ptr, max_tiles,
    H: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, GATHER: tl.constexpr, CLAMPED: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    num_n: tl.constexpr = (H + BN - 1) // BN
    total = tl.load(total_ptr)
    for tile in tl.range(tl.program_id(0), total * num_n, tl.num_programs(0)):
        tile_m, tile_n = tile_coordinates(tile, total, num_n, GROUP)
        expert = tl.load(table_ptr + tile_m)
        first = tl.load(table_ptr + max_tiles + tile_m)
        end = tl.load(table_ptr + 2 * max_tiles + tile_m)
        row = first + tl.arange(0, BM)
        live = row < end
        k = tl.arange(0, BK)
        if GATHER:
            token = tl.load(token_ptr + row, mask=live, other=0).to(tl.int64)
            grad_ptrs = grad + token[:, None] * D + k[None, :]
        col = tile_n * BN
        acc = tl.zeros((BM, BN), tl.float32)
        for begin in range(0, D, BK):
            if GATHER:
                if EVEN_K:
                    rows = tl.load(grad_ptrs + begin)
                else:
                    rows = tl.load(grad_ptrs + begin, mask=(begin + k < D)[None, :], other=0.0)
            else:
                rows = grad.load([first, begin])
            acc = tl.dot(rows, w_desc.load([expert, begin, tile_n * BN]).reshape(BK, BN), acc)
        weight = tl.load(weight_ptr + row, mask=live, other=0.0)
        gate, up = _load_gate_up(gate_up_ptr, row, live, col, H, STRIP, EVEN_N)
        part, gate, up = _finish_strips(
            acc, gate, up, weight, row, live, col, gate_up_ptr, grad_ptr, act_ptr, H, BM, BN, STRIP, EVEN_N, CLAMPED,
            True,
        )  # fmt: skip
        tl.store(part_ptr + row * num_n + tile_n, part, mask=live)


@triton.jit
def _finish_strips(
    acc, gate, up, weight, row, live, col, gate_up_ptr, grad_ptr, act_ptr, H: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, STRIP: tl.constexpr, EVEN_N: tl.constexpr, CLAMPED: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """The backward of the activation for one accumulator, strip by strip: all columns at once do not fit the registers.

    It halves the accumulator until a half is one strip wide. -> (the part of the router weights' gradient from these
    columns, gate and up of the strip that follows them)
    """
    if BN == STRIP:
        # The load of the next strip is issued before this strip is computed, so that the wait for it is short.
        if LAST:
            next_gate, next_up = gate, up
        else:
            next_gate, next_up = _load_gate_up(gate_up_ptr, row, live, col + STRIP, H, STRIP, EVEN_N)
        part = _finish_strip(acc, gate, up, weight, row, live, col, grad_ptr, act_ptr, H, STRIP, EVEN_N, CLAMPED)
        return part, next_gate, next_up
    else:  # noqa: RET505 - Triton compiles what follows a return under a constant condition
        n: tl.constexpr = BN // 2
        left, right = split_columns(acc, BM, BN)
        part, gate, up = _finish_strips(
            left, gate, up, weight, row, live, col, gate_up_ptr, grad_ptr, act_ptr, H, BM, n, STRIP, EVEN_N, CLAMPED,
            False,
        )  # fmt: skip
        right_part, gate, up = _finish_strips(
            right, gate, up, weight, row, live, col + n, gate_up_ptr, grad_ptr, act_ptr, H, BM, n, STRIP, EVEN_N,
            CLAMPED, LAST,
        )  # fmt: skip
        return part + right_part, gate, up


@triton.jit
def _column_mask(live, n, H: tl.constexpr, EVEN_N: tl.constexpr):
    if EVEN_N:
        return live[:, None]
    else:  # noqa: RET505 - Triton compiles what follows a return under a constant condition
        return live[:, None] & (n < H)[None, :]


@triton.jit
def _load_gate_up(gate_up_ptr, row, live, col, H: tl.constexpr, STRIP: tl.constexpr, EVEN_N: tl.constexpr):
    n = col + tl.arange(0, STRIP)
    mask = _column_mask(live, n, H, EVEN_N)
    ptrs = gate_up_ptr + row.to(tl.int64)[:, None] * (2 * H) + n[None, :]
    return tl.load(ptrs, mask=mask, other=0.0), tl.load(ptrs + H, mask=mask, other=0.0)


@triton.jit
def _finish_strip(
    acc, gate, up, weight, row, live, col, grad_ptr, act_ptr, H: tl.constexpr, STRIP: tl.constexpr,
    EVEN_N: tl.constexpr, CLAMPED: tl.constexpr,
):  # fmt: skip
    """The backward of the activation on one strip. -> the part of the router weights' gradient from its columns."""
    act, gate_grad, up_grad = swiglu_grad(acc * weight[:, None], gate.to(tl.float32), up.to(tl.float32), CLAMPED)
    dtype: tl.constexpr = act_ptr.dtype.element_ty
    n = col + tl.arange(0, STRIP)
    mask = _column_mask(live, n, H, EVEN_N)
    row = row.to(tl.int64)[:, None]
    tl.store(grad_ptr + row * (2 * H) + n[None, :], gate_grad.to(dtype), mask=mask)
    tl.store(grad_ptr + row * (2 * H) + H + n[None, :], up_grad.to(dtype), mask=mask)
    tl.store(act_ptr + row * H + n[None, :], (act * weight[:, None]).to(dtype), mask=mask)
    return tl.sum(tl.where(mask, act * acc, 0.0), 1)
