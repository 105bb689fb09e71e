"""FC1 of all experts as one Triton kernel: gather of tokens, grouped GEMM, bias, SwiGLU and router weight.

`gpu_steps.py` calls it for the step `up`. The gather happens in the loads of the GEMM, and the activation is computed
before the tile leaves the registers.

Shapes: T tokens, R rows (token copies sorted by expert), D model dim, E experts, H expert dim, X = 2 H; the first dim
of x_XD is T with a gather and R without one.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from threefold.engine.kernels.elementwise.swiglu_triton import swiglu
from threefold.engine.kernels.experts.tile_schedule import TileTable, split_columns, store_tile, tile_coordinates
from threefold.engine.kernels.fast_launch import fast_launch, tensor_blocks
from threefold.engine.kernels.launch_config import TritonConfig, num_programs


def fc1_forward(
    x_XD: Tensor,
    token_R: Tensor | None,
    weight_R: Tensor,
    gate_up_EXD: Tensor,
    bias_EX: Tensor | None,
    tiles: TileTable,
    clamped: bool,
    config: TritonConfig,
) -> tuple[Tensor, Tensor]:
    """-> (FC1's output, which the backward needs; the activation times the router weight).

    A row reads x at token_R[row], or without `token_R` at the row itself.
    """
    num_rows, (gate_up_dim, dim) = len(weight_R), gate_up_EXD.shape[1:]
    expert_dim = gate_up_dim // 2
    gate_up_RX = x_XD.new_empty(num_rows, gate_up_dim)
    act_RH = x_XD.new_empty(num_rows, expert_dim)
    # A tile holds some rows of gate and the same rows of up, so that one GEMM gives both.
    weights = tensor_blocks(gate_up_EXD.unflatten(1, (2, expert_dim)), [1, 2, config.n, config.k])
    x = x_XD if token_R is not None else tensor_blocks(x_XD, [tiles.size, config.k])
    gate_up = tensor_blocks(gate_up_RX, [tiles.size, config.n])
    act = tensor_blocks(act_RH, [tiles.size, config.n])
    _fc1_forward[(num_programs(x_XD.device, config.per_sm),)](
        x, token_R, weight_R, weights, bias_EX, gate_up, gate_up_RX, act, act_RH, tiles.table, tiles.total,
        tiles.table.shape[1], expert_dim, dim, tiles.size, config.n, config.k, config.group, dim % config.k == 0,
        token_R is not None, bias_EX is not None, clamped,
        expert_dim % config.n == 0, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return gate_up_RX, act_RH


@fast_launch
@triton.jit
def _fc1_forward(
    x, token_ptr, weight_ptr, w_desc, bias_ptr, gate_up, gate_up_ptr, act_desc, act_ptr, table_ptr, total_ptr,
    max_tiles, H: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, EVEN_K: tl.constexpr, GATHER: tl.constexpr, BIAS: tl.constexpr,
    CLAMPED: tl.constexpr, EVEN_N: tl.constexpr,
):  # fmt: skip
    num_n: tl.constexpr = (H + BN - 1) // BN
    total = tl.load(total_ptr)
    for tile in tl.range(tl.program_id(0), total * num_n, tl.num_programs(0)):
        tile_m, tile_n = tile_coordinates(tile, total, num_n, GROUP)
        expert = tl.load(table_ptr + tile_m)
        first = tl.load(table_ptr + max_tiles + tile_m)
        end = tl.load(table_ptr + 2 * max_tiles + tile_m)
        # The last tile of an expert often has few rows, for which half a tile does. Blocks of TMA have one size.
        if GATHER and BM >= 32 and end - first <= BM // 2:
            _compute_tile(
                x, token_ptr, weight_ptr, w_desc, bias_ptr, gate_up, gate_up_ptr, act_desc, act_ptr, expert, first,
                end, tile_n, H, D, BM // 2, BN, BK, EVEN_K, GATHER, BIAS, CLAMPED, EVEN_N, False,
            )  # fmt: skip
        else:
            _compute_tile(
                x, token_ptr, weight_ptr, w_desc, bias_ptr, gate_up, gate_up_ptr, act_desc, act_ptr, expert, first,
                end, tile_n, H, D, BM, BN, BK, EVEN_K, GATHER, BIAS, CLAMPED, EVEN_N, True,
            )  # fmt: skip


@triton.jit
def _compute_tile(
    x, token_ptr, weight_ptr, w_desc, bias_ptr, gate_up, gate_up_ptr, act_desc, act_ptr, expert, first, end, tile_n,
    H: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr,
    GATHER: tl.constexpr, BIAS: tl.constexpr, CLAMPED: tl.constexpr, EVEN_N: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """COPY: whether full tiles may be stored by the copy engine (TMA), whose blocks have the rows of a whole tile."""
    row = first + tl.arange(0, BM)
    live = row < end
    k = tl.arange(0, BK)
    if GATHER:
        token = tl.load(token_ptr + row, mask=live, other=0).to(tl.int64)
        x_ptrs = x + token[:, None] * D + k[None, :]
    acc = tl.zeros((BM, 2 * BN), tl.float32)
    for begin in range(0, D, BK):
        if GATHER:
            if EVEN_K:
                rows = tl.load(x_ptrs + begin)
            else:
                rows = tl.load(x_ptrs + begin, mask=(begin + k < D)[None, :], other=0.0)
        else:
            rows = x.load([first, begin])
        weights = w_desc.load([expert, 0, tile_n * BN, begin]).reshape(2 * BN, BK)
        acc = tl.dot(rows, weights.T, acc)
    gate, up = split_columns(acc, BM, 2 * BN)
    n = tile_n * BN + tl.arange(0, BN)
    if BIAS:
        gate += tl.load(bias_ptr + expert * 2 * H + n, mask=n < H, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias_ptr + (expert * 2 + 1) * H + n, mask=n < H, other=0.0).to(tl.float32)[None, :]
    dtype: tl.constexpr = act_ptr.dtype.element_ty
    gate, up = gate.to(dtype), up.to(dtype)
    weight = tl.load(weight_ptr + row, mask=live, other=0.0)
    # The rounded gate and up, because the backward recomputes the activation from these.
    act = (swiglu(gate.to(tl.float32), up.to(tl.float32), CLAMPED) * weight[:, None]).to(dtype)
    store_tile(gate, gate_up, gate_up_ptr, first, end, tile_n * BN, 0, H, 2 * H, BM, BN, EVEN_N, COPY)
    store_tile(up, gate_up, gate_up_ptr, first, end, tile_n * BN, H, H, 2 * H, BM, BN, EVEN_N, COPY)
    store_tile(act, act_desc, act_ptr, first, end, tile_n * BN, 0, H, H, BM, BN, EVEN_N, COPY)
