"""FC1 of all experts with the gather of tokens in its loads and the activation behind it.

Shapes: T tokens, R rows (token copies sorted by expert), D model dim, E experts, H expert dim, X = 2 H.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore

from threefold.engine.kernels.activation import activate
from threefold.engine.kernels.launch import Config, num_programs
from threefold.engine.kernels.store import store
from threefold.engine.kernels.tiles import Tiles, place, tokens_of


def up(
    x_XD: Tensor,
    token_R: Tensor | None,
    weight_R: Tensor,
    gate_up_EXD: Tensor,
    bias_EX: Tensor | None,
    tiles: Tiles,
    clamped: bool,
    config: Config,
) -> tuple[Tensor, Tensor]:
    """-> (FC1's output, which the backward wants; the activation times the router weight). A row reads token_R[row]
    of x, or without tokens its own row."""
    num_rows, (wide, dim) = len(weight_R), gate_up_EXD.shape[1:]
    half = wide // 2
    gate_up_RX = x_XD.new_empty(num_rows, wide)
    act_RH = x_XD.new_empty(num_rows, half)
    weights = TensorDescriptor.from_tensor(gate_up_EXD, [1, config.n, config.k])
    x = x_XD if token_R is not None else TensorDescriptor.from_tensor(x_XD, [tiles.size, config.k])
    gate_up = TensorDescriptor.from_tensor(gate_up_RX, [tiles.size, config.n])
    act = TensorDescriptor.from_tensor(act_RH, [tiles.size, config.n])
    _up[(num_programs(x_XD.device, config),)](
        x, token_R, weight_R, weights, bias_EX, gate_up, gate_up_RX, act, act_RH, tiles.table, tiles.total,
        tiles.table.shape[1], half, dim, tiles.size, config.n, config.k, config.group, dim % config.k == 0,
        token_R is not None, bias_EX is not None, clamped,
        half % config.n == 0, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return gate_up_RX, act_RH


@triton.jit
def _up(
    x, token_ptr, weight_ptr, w_desc, bias_ptr, gate_up, gate_up_ptr, act_desc, act_ptr, table_ptr, total_ptr,
    most, H: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, EVEN_K: tl.constexpr, GATHER: tl.constexpr, BIAS: tl.constexpr,
    CLAMPED: tl.constexpr,
    EVEN_N: tl.constexpr,
):  # fmt: skip
    num_n: tl.constexpr = (H + BN - 1) // BN
    total = tl.load(total_ptr)
    step = tl.num_programs(0)
    next_n, next_expert, next_first, next_end = place(tl.program_id(0), total, num_n, table_ptr, most, GROUP)
    if GATHER:
        next_token = tokens_of(token_ptr, next_first, next_end, BM)
    for tile in tl.range(tl.program_id(0), total * num_n, step):
        tile_n, expert, first, end = next_n, next_expert, next_first, next_end
        next_n, next_expert, next_first, next_end = place(tile + step, total, num_n, table_ptr, most, GROUP)
        row = first + tl.arange(0, BM)
        live = row < end
        weight = tl.load(weight_ptr + row, mask=live, other=0.0)
        k = tl.arange(0, BK)
        if GATHER:
            token = next_token.to(tl.int64)
            x_ptrs = x + token[:, None] * D + k[None, :]
        gate = tl.zeros((BM, BN), tl.float32)
        up = tl.zeros((BM, BN), tl.float32)
        for begin in range(0, D, BK):
            if GATHER:
                if EVEN_K:
                    rows = tl.load(x_ptrs + begin)
                else:
                    rows = tl.load(x_ptrs + begin, mask=(begin + k < D)[None, :], other=0.0)
            else:
                rows = x.load([first, begin])
            gate_w = w_desc.load([expert, tile_n * BN, begin]).reshape(BN, BK)
            up_w = w_desc.load([expert, H + tile_n * BN, begin]).reshape(BN, BK)
            gate = tl.dot(rows, gate_w.T, gate)
            up = tl.dot(rows, up_w.T, up)
        if GATHER:
            next_token = tokens_of(token_ptr, next_first, next_end, BM)
        n = tile_n * BN + tl.arange(0, BN)
        if BIAS:
            gate += tl.load(bias_ptr + expert * 2 * H + n, mask=n < H, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias_ptr + (expert * 2 + 1) * H + n, mask=n < H, other=0.0).to(tl.float32)[None, :]
        narrow: tl.constexpr = act_ptr.dtype.element_ty
        gate, up = gate.to(narrow), up.to(narrow)
        # From the rounded halves, as the backward computes it again.
        act = (activate(gate.to(tl.float32), up.to(tl.float32), CLAMPED) * weight[:, None]).to(narrow)
        store(gate, gate_up, gate_up_ptr, first, end, tile_n * BN, 0, H, 2 * H, BM, BN, EVEN_N)
        store(up, gate_up, gate_up_ptr, first, end, tile_n * BN, H, H, 2 * H, BM, BN, EVEN_N)
        store(act, act_desc, act_ptr, first, end, tile_n * BN, 0, H, H, BM, BN, EVEN_N)
