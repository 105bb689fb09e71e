"""Attention tile by tile: the outputs of the tiles of a query are merged by their log-sum-exps, in fp32 or wider.

`attend_tiles` and `attend_tiles_backward` work on tensors of one rank and know nothing of ranks; ring attention calls
them once for each step of the ring. The backward kernels get the merged output and log-sum-exp, so that the gradients
of the tiles are exact parts of a sum.

Shapes: B batch, H query heads, G key/value heads, S sequence, Q queries and K keys of a tile, D head dim,
N = rows of a tile * Q.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from threefold.engine.attention import torch_kernels as flash
from threefold.engine.attention.mask_tiles import Tile
from threefold.engine.attention.query_blocks import backward_blocks, forward_blocks
from threefold.engine.device import device_type
from threefold.engine.sum_dtype import fp32_or_wider


@dataclass(frozen=True)
class TileKernel:
    """An attention kernel for one tile."""

    # forward: q, k, v, scale, tile -> out, lse. backward: grad, q, k, v, out, lse, scale, tile -> dq, dk, dv.
    forward: Callable[[Tensor, Tensor, Tensor, float, Tile], tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def select_kernel(q: Tensor) -> TileKernel:
    if device_type(q.device) != "cuda":
        return CPU
    return FLASH if flash.flash_supports(q) else BLOCKS


def empty_output(q_BHSD: Tensor, value_dim: int) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of queries that have attended to no key yet, for `attend_tiles` to merge into."""
    dtype = fp32_or_wider(q_BHSD.dtype)
    out = q_BHSD.new_zeros(*q_BHSD.shape[:3], value_dim, dtype=dtype)
    return out, q_BHSD.new_full(q_BHSD.shape[:3], float("-inf"), dtype=dtype)


def attend_tiles(
    out_BHSD: Tensor,
    lse_BHS: Tensor,
    q_BHSD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    scale: float,
    tiles: Sequence[Tile],
    kernel: TileKernel | None = None,
) -> None:
    """Compute the tiles and merge their results into `out_BHSD` and `lse_BHS`."""
    kernel = kernel or select_kernel(q_BHSD)
    for tile in tiles:
        query, key = (tile.rows, slice(None), tile.q), (tile.rows, slice(None), tile.k)
        tile_out, tile_lse = kernel.forward(q_BHSD[query], k_BGSD[key], v_BGSD[key], scale, tile)
        merge_tile(out_BHSD[query], lse_BHS[query], tile_out, tile_lse)


def merge_tile(out_BHSD: Tensor, lse_BHS: Tensor, tile_out_BHSD: Tensor, tile_lse_BHS: Tensor) -> None:
    """Merge the output of the same queries for other keys, by the log-sum-exps of both, in place."""
    merged_BHS = torch.logaddexp(lse_BHS, tile_lse_BHS)
    out_BHSD.mul_((lse_BHS - merged_BHS).exp_().unsqueeze(-1))
    out_BHSD.addcmul_(tile_out_BHSD.to(out_BHSD.dtype), (tile_lse_BHS - merged_BHS).exp_().unsqueeze(-1))
    lse_BHS.copy_(merged_BHS)


def attend_tiles_backward(
    grads: tuple[Tensor, Tensor, Tensor],
    grad_BHSD: Tensor,
    q_BHSD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    out_BHSD: Tensor,
    lse_BHS: Tensor,
    scale: float,
    tiles: Sequence[Tile],
    kernel: TileKernel | None = None,
) -> None:
    """Add the gradients of the tiles to `grads` of q, k and v."""
    kernel = kernel or select_kernel(q_BHSD)
    for tile in tiles:
        query, key = (tile.rows, slice(None), tile.q), (tile.rows, slice(None), tile.k)
        inputs = (grad_BHSD[query], q_BHSD[query], k_BGSD[key], v_BGSD[key], out_BHSD[query], lse_BHS[query])
        parts = kernel.backward(*inputs, scale, tile)
        for whole, at, part in zip(grads, (query, key, key), parts, strict=True):
            whole[at] += part


@dataclass(frozen=True)
class TileMask:
    """Which keys of a tile its queries may not attend to."""

    tile: Tile
    q_BHQD: Tensor
    num_all_keys: int

    def spans(self, block: slice) -> tuple[slice, ...]:
        return (slice(0, block.stop if self.tile.causal else self.num_all_keys),)

    def row_bytes(self, key_bytes: int, length: int, max_bytes: int) -> int:
        return key_bytes * length

    def hidden(self, block: slice, device: torch.device) -> Tensor | None:
        """For a block of the queries and the keys that it may read: (1, 1, Q, K), or (B, 1, Q, K) with documents."""
        tile = self.tile
        if not tile.causal and tile.shift is None:
            return None
        position_K = torch.arange(self.spans(block)[0].stop, device=device, dtype=torch.int32)
        distance_QK = position_K - torch.arange(block.start, block.stop, device=device, dtype=torch.int32)[:, None]
        hidden_QK = distance_QK > 0 if tile.causal else torch.zeros_like(distance_QK, dtype=torch.bool)
        if tile.shift is not None:
            hidden_QK = hidden_QK | (distance_QK < tile.shift)
        if tile.bounds is None:
            return hidden_QK[None, None]
        batch, _, length, _ = self.q_BHQD.shape
        position_N = torch.arange(batch * length, device=device, dtype=torch.int32)
        document_BK = torch.bucketize(position_N, tile.bounds.cu_seqlens, right=True).view(batch, -1)[:, : block.stop]
        return (hidden_QK | (document_BK[:, block, None] != document_BK[:, None]))[:, None]


def tile_mask(tile: Tile, q: Tensor, k: Tensor) -> Tensor | None:
    """Which keys the queries of a tile may not attend to; None: they attend to all of them."""
    return TileMask(tile, q, k.shape[2]).hidden(slice(0, q.shape[2]), q.device)


def _cpu_mask(q: Tensor, k: Tensor, tile: Tile) -> tuple[bool, Tensor | None]:
    if tile.causal and tile.shift is None and tile.bounds is None:
        return True, None
    hidden = tile_mask(tile, q, k)
    if hidden is None:
        return False, None
    # The kernel takes an additive mask of the query's dtype only.
    return False, torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, float("-inf"))


def _cpu(q: Tensor, k: Tensor, v: Tensor, scale: float, tile: Tile) -> tuple[Tensor, Tensor]:
    causal, mask = _cpu_mask(q, k, tile)
    q, k, v = flash.with_dense_rows(q, k, v)
    out, lse = flash.FLASH_CPU(q, k, flash.pad_head_dim(q.shape[-1], v), 0.0, causal, attn_mask=mask, scale=scale)
    return out[..., : v.shape[-1]], lse


def _cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, tile: Tile
) -> tuple[Tensor, Tensor, Tensor]:
    causal, mask = _cpu_mask(q, k, tile)
    q, k, *rest = flash.with_dense_rows(q, k, grad, v, out)
    grad, value, out = (flash.pad_head_dim(q.shape[-1], x) for x in rest)
    dq, dk, dv = flash.FLASH_CPU_BACKWARD(grad, q, k, value, out, lse, 0.0, causal, attn_mask=mask, scale=scale)
    return dq, dk, dv[..., : v.shape[-1]]


def _to_kernel_layout(x: Tensor, tile: Tile) -> Tensor:
    """(B, H, S, D) in the CUDA kernel's layout: (B, S, H, D), or (N, H, D) where the tile has documents."""
    x = x.transpose(1, 2)
    return x if tile.bounds is None else x.flatten(0, 1)


def _from_kernel_layout(x: Tensor, like: Tensor) -> Tensor:
    return x.view(like.shape[0], like.shape[2], *x.shape[-2:]).transpose(1, 2)


def _flash_arguments(
    q: Tensor, k: Tensor, tile: Tile
) -> tuple[tuple[Tensor | None, Tensor | None, int, int], dict[str, int]]:
    """Sequence lengths, and the window, which the kernel counts from queries that are aligned with the last keys."""
    if tile.bounds is None:
        lengths: tuple[Tensor | None, Tensor | None, int, int] = (None, None, q.shape[2], k.shape[2])
    else:
        lengths = (tile.bounds.cu_seqlens, tile.bounds.cu_seqlens, tile.bounds.max_seqlen, tile.bounds.max_seqlen)
    if tile.shift is None:
        return lengths, {}
    window = {"window_size_left": k.shape[2] - q.shape[2] - tile.shift}
    return lengths, window | ({"window_size_right": 0} if tile.causal else {})


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float, tile: Tile) -> tuple[Tensor, Tensor]:
    lengths, window = _flash_arguments(q, k, tile)
    inputs = (_to_kernel_layout(x, tile) for x in (q, k, flash.pad_head_dim(q.shape[-1], v)))
    out, lse, _, _, _ = flash.FLASH_CUDA(*inputs, *lengths, 0.0, tile.causal, False, scale=scale, **window)
    if tile.bounds is not None:  # (H, N)
        lse = lse.view(lse.shape[0], q.shape[0], -1).transpose(0, 1)
    return _from_kernel_layout(out, q)[..., : v.shape[-1]], lse


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, tile: Tile
) -> tuple[Tensor, Tensor, Tensor]:
    lengths, window = _flash_arguments(q, k, tile)
    pad = partial(flash.pad_head_dim, q.shape[-1])
    inputs = [_to_kernel_layout(x, tile) for x in (pad(grad), q, k, pad(v), pad(out))]
    if tile.bounds is not None:
        lse = lse.transpose(0, 1).flatten(1)
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the random state of dropout, which is off
    dq, dk, dv = flash.FLASH_CUDA_BACKWARD(
        *inputs, lse.contiguous(), *lengths, 0.0, tile.causal, unused, unused, scale=scale, **window
    )
    return _from_kernel_layout(dq, q), _from_kernel_layout(dk, k), _from_kernel_layout(dv, k)[..., : v.shape[-1]]


def _in_blocks(q: Tensor, k: Tensor, v: Tensor, scale: float, tile: Tile) -> tuple[Tensor, Tensor]:
    return forward_blocks(q, k, v, scale, TileMask(tile, q, k.shape[2]))


def _in_blocks_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, tile: Tile
) -> tuple[Tensor, Tensor, Tensor]:
    return backward_blocks(grad, q, k, v, out, lse, scale, TileMask(tile, q, k.shape[2]))


CPU, FLASH, BLOCKS = (
    TileKernel(_cpu, _cpu_backward),
    TileKernel(_flash, _flash_backward),
    TileKernel(_in_blocks, _in_blocks_backward),
)
