"""Backward of FC2 and of the activation before it in one pass: the gradient of FC1's output, the weighted activation
once more (FC2's weight gradient wants it), and the router weights' gradient.

Shapes: T tokens, R rows (token copies sorted by expert), D model dim, E experts, H expert dim, X = 2 H.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore

from threefold.engine.kernels.activation import activate_grad
from threefold.engine.kernels.launch import Config, num_programs
from threefold.engine.kernels.store import halves, store
from threefold.engine.kernels.tiles import Tiles, place


def act_grad(
    grad_XD: Tensor,
    token_R: Tensor | None,
    weight_R: Tensor,
    down_EDH: Tensor,
    gate_up_RX: Tensor,
    tiles: Tiles,
    clamped: bool,
    config: Config,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> (gradient of gate_up_RX, weighted activation, gradient of weight_R but for a bias of FC2)."""
    num_rows, dim, half = len(weight_R), *down_EDH.shape[1:]
    grad_RX = torch.empty_like(gate_up_RX)
    act_RH = gate_up_RX.new_empty(num_rows, half)
    # A column for each tile, summed afterwards in one order.
    part_RN = torch.empty(num_rows, triton.cdiv(half, config.n), dtype=torch.float32, device=weight_R.device)
    weights = TensorDescriptor.from_tensor(down_EDH, [1, config.k, config.n])
    grad = grad_XD if token_R is not None else TensorDescriptor.from_tensor(grad_XD, [tiles.size, config.k])
    # A tile is finished in strips: all of it and both halves of FC1's output do not fit the registers.
    read = min(config.read, config.n)
    gate_up = TensorDescriptor.from_tensor(gate_up_RX, [tiles.size, read])
    wide, act = (TensorDescriptor.from_tensor(t, [tiles.size, config.strip]) for t in (grad_RX, act_RH))
    _act_grad[(num_programs(grad_XD.device, config),)](
        grad, token_R, weight_R, weights, gate_up, wide, grad_RX, act, act_RH, part_RN, tiles.table, tiles.total,
        tiles.table.shape[1], half, dim, tiles.size, config.n, config.k, config.group, dim % config.k == 0,
        half % config.n == 0, token_R is not None, clamped, read, config.strip, num_warps=config.warps,
        num_stages=config.stages,
    )  # fmt: skip
    return grad_RX, act_RH, part_RN.sum(dim=1).to(weight_R.dtype)


@triton.jit
def _act_grad(
    grad, token_ptr, weight_ptr, w_desc, gate_up, wide, wide_ptr, act, act_ptr, part_ptr, table_ptr, total_ptr, most,
    H: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, GATHER: tl.constexpr, CLAMPED: tl.constexpr, READ: tl.constexpr,
    STRIP: tl.constexpr,
):  # fmt: skip
    num_n: tl.constexpr = (H + BN - 1) // BN
    total = tl.load(total_ptr)
    for tile in tl.range(tl.program_id(0), total * num_n, tl.num_programs(0)):
        tile_m, tile_n = place(tile, total, num_n, GROUP)
        expert = tl.load(table_ptr + tile_m)
        first = tl.load(table_ptr + most + tile_m)
        end = tl.load(table_ptr + 2 * most + tile_m)
        row = first + tl.arange(0, BM)
        live = row < end
        k = tl.arange(0, BK)
        if GATHER:
            token = tl.load(token_ptr + row, mask=live, other=0).to(tl.int64)
            grad_ptrs = grad + token[:, None] * D + k[None, :]
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
        col = tile_n * BN
        part = _columns(
            acc, weight, first, end, col, gate_up, wide, wide_ptr, act, act_ptr, H, BM, BN, READ, STRIP, EVEN_N, CLAMPED
        )
        tl.store(part_ptr + row * num_n + tile_n, part, mask=live)


@triton.jit
def _columns(
    acc, weight, first, end, col, gate_up, wide, wide_ptr, act, act_ptr, H: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, READ: tl.constexpr, STRIP: tl.constexpr, EVEN_N: tl.constexpr, CLAMPED: tl.constexpr,
):  # fmt: skip
    """What follows the product on some columns -> their part of the router weights' gradient."""
    if BN > READ:
        n: tl.constexpr = BN // 2
        left, right = halves(acc, BM, BN)
        part = _columns(
            left, weight, first, end, col, gate_up, wide, wide_ptr, act, act_ptr, H, BM, n, READ, STRIP, EVEN_N, CLAMPED
        )
        return part + _columns(
            right, weight, first, end, col + n, gate_up, wide, wide_ptr, act, act_ptr, H, BM, n, READ, STRIP, EVEN_N,
            CLAMPED,
        )  # fmt: skip
    else:  # noqa: RET505 - what follows a return under a constant condition is still compiled
        gate_value = gate_up.load([first, col])
        up_value = gate_up.load([first, H + col])
        return _strips(
            acc, gate_value, up_value, weight, first, end, col, wide, wide_ptr, act, act_ptr, H, BM, BN, STRIP, EVEN_N,
            CLAMPED,
        )  # fmt: skip


@triton.jit
def _strips(
    acc, gate_value, up_value, weight, first, end, col, wide, wide_ptr, act, act_ptr, H: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STRIP: tl.constexpr, EVEN_N: tl.constexpr, CLAMPED: tl.constexpr,
):  # fmt: skip
    if BN > STRIP:
        n: tl.constexpr = BN // 2
        acc0, acc1 = halves(acc, BM, BN)
        gate0, gate1 = halves(gate_value, BM, BN)
        up0, up1 = halves(up_value, BM, BN)
        part = _strips(
            acc0, gate0, up0, weight, first, end, col, wide, wide_ptr, act, act_ptr, H, BM, n, STRIP, EVEN_N, CLAMPED
        )
        return part + _strips(
            acc1,
            gate1,
            up1,
            weight,
            first,
            end,
            col + n,
            wide,
            wide_ptr,
            act,
            act_ptr,
            H,
            BM,
            n,
            STRIP,
            EVEN_N,
            CLAMPED,
        )
    else:  # noqa: RET505 - what follows a return under a constant condition is still compiled
        value, gate_grad, up_grad = activate_grad(
            acc * weight[:, None], gate_value.to(tl.float32), up_value.to(tl.float32), CLAMPED
        )
        narrow: tl.constexpr = act_ptr.dtype.element_ty
        store(gate_grad.to(narrow), wide, wide_ptr, first, end, col, 0, H, 2 * H, BM, BN, EVEN_N)
        store(up_grad.to(narrow), wide, wide_ptr, first, end, col, H, H, 2 * H, BM, BN, EVEN_N)
        store((value * weight[:, None]).to(narrow), act, act_ptr, first, end, col, 0, H, H, BM, BN, EVEN_N)
        part = value * acc
        if not EVEN_N:
            part = tl.where((col + tl.arange(0, BN) < H)[None, :], part, 0.0)
        return tl.sum(part, 1)
