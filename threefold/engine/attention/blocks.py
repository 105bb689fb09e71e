"""Attention tile by tile: what several tiles say of a query is merged by their log-sum-exps, in fp32 at least.

`read` and `read_backward` work on plain tensors of one rank and know nothing of ranks. The backward kernels are handed
the merged output and log-sum-exp, so that each tile's gradients are exact parts of a sum.

Shapes: B batch, H query heads, G key/value heads, S sequence, Q queries and K keys of a tile, D head dim,
N = rows of a tile * Q.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from threefold.engine.attention import flash
from threefold.engine.attention.sight import Tile
from threefold.engine.norm import wide
from threefold.engine.ways import way


@dataclass(frozen=True)
class Kernel:
    """forward: q, k, v, scale, tile -> out, lse. backward: grad, q, k, v, out, lse, scale, tile -> dq, dk, dv."""

    forward: Callable[[Tensor, Tensor, Tensor, float, Tile], tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def kernel_for(q: Tensor) -> Kernel:
    if way(q.device) != "cuda":
        return CPU
    return FLASH if flash.cuda_takes(q) else EAGER


def nothing_read(q_BHSD: Tensor, v_BGSD: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp to merge into."""
    dtype = wide(q_BHSD.dtype)
    out = q_BHSD.new_zeros(*q_BHSD.shape[:3], v_BGSD.shape[-1], dtype=dtype)
    return out, q_BHSD.new_full(q_BHSD.shape[:3], float("-inf"), dtype=dtype)


def read(
    out_BHSD: Tensor,
    lse_BHS: Tensor,
    q_BHSD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    scale: float,
    tiles: Sequence[Tile],
    kernel: Kernel | None = None,
) -> None:
    """Merge what the tiles' queries read of the keys into `out` and `lse`."""
    kernel = kernel or kernel_for(q_BHSD)
    for tile in tiles:
        query, key = (tile.rows, slice(None), tile.q), (tile.rows, slice(None), tile.k)
        new, new_lse = kernel.forward(q_BHSD[query], k_BGSD[key], v_BGSD[key], scale, tile)
        out, lse = out_BHSD[query], lse_BHS[query]
        both = torch.logaddexp(lse, new_lse)
        out.mul_((lse - both).exp_().unsqueeze(-1)).addcmul_(new.to(out.dtype), (new_lse - both).exp_().unsqueeze(-1))
        lse.copy_(both)


def read_backward(
    grads: tuple[Tensor, Tensor, Tensor],
    grad_BHSD: Tensor,
    q_BHSD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    out_BHSD: Tensor,
    lse_BHS: Tensor,
    scale: float,
    tiles: Sequence[Tile],
    kernel: Kernel | None = None,
) -> None:
    """Add the tiles' parts to `grads` of q, k and v."""
    kernel = kernel or kernel_for(q_BHSD)
    for tile in tiles:
        query, key = (tile.rows, slice(None), tile.q), (tile.rows, slice(None), tile.k)
        ours = (grad_BHSD[query], q_BHSD[query], k_BGSD[key], v_BGSD[key], out_BHSD[query], lse_BHS[query])
        parts = kernel.backward(*ours, scale, tile)
        for whole, at, part in zip(grads, (query, key, key), parts, strict=True):
            whole[at] += part


def seen(tile: Tile, q: Tensor, k: Tensor) -> Tensor | None:
    """Which keys each query of a tile may read: (Q, K), or (B, 1, Q, K) with documents; None: all of them."""
    if not tile.causal and tile.shift is None:
        return None
    place_Q, place_K = (torch.arange(x.shape[2], device=x.device) for x in (q, k))
    distance_QK = place_K[None, :] - place_Q[:, None]
    mask = distance_QK <= 0 if tile.causal else torch.ones_like(distance_QK, dtype=torch.bool)
    if tile.shift is not None:
        mask = mask & (distance_QK >= tile.shift)
    if tile.bounds is None:
        return mask
    place_N = torch.arange(q.shape[0] * q.shape[2], device=q.device, dtype=torch.int32)
    run_BQ = torch.bucketize(place_N, tile.bounds.starts, right=True).view(q.shape[0], -1)
    return mask & (run_BQ[:, None, :, None] == run_BQ[:, None, None, :])


def _cpu_mask(q: Tensor, k: Tensor, tile: Tile) -> tuple[bool, Tensor | None]:
    if tile.causal and tile.shift is None and tile.bounds is None:
        return True, None
    mask = seen(tile, q, k)
    if mask is not None:  # the kernel takes an additive mask of the query's dtype only
        mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, float("-inf"))
    return False, mask


def _cpu(q: Tensor, k: Tensor, v: Tensor, scale: float, tile: Tile) -> tuple[Tensor, Tensor]:
    causal, mask = _cpu_mask(q, k, tile)
    out, lse = flash.CPU(q, k, flash.widen(q.shape[-1], v), 0.0, causal, attn_mask=mask, scale=scale)
    return out[..., : v.shape[-1]], lse


def _cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, tile: Tile
) -> tuple[Tensor, Tensor, Tensor]:
    causal, mask = _cpu_mask(q, k, tile)
    grad, value, out = (flash.widen(q.shape[-1], x) for x in (grad, v, out))
    dq, dk, dv = flash.CPU_BACKWARD(grad, q, k, value, out, lse, 0.0, causal, attn_mask=mask, scale=scale)
    return dq, dk, dv[..., : v.shape[-1]]


def _kernel_layout(x: Tensor, tile: Tile) -> Tensor:
    """(B, H, S, D) as the CUDA kernel wants it: (B, S, H, D), or (N, H, D) where documents lie one behind the other."""
    x = x.transpose(1, 2)
    return x if tile.bounds is None else x.flatten(0, 1)


def _our_layout(x: Tensor, like: Tensor) -> Tensor:
    return x.view(like.shape[0], like.shape[2], *x.shape[-2:]).transpose(1, 2)


def _flash_call(
    q: Tensor, k: Tensor, tile: Tile
) -> tuple[tuple[Tensor | None, Tensor | None, int, int], dict[str, int]]:
    """Edges and longest lengths; the window, which the kernel counts back from queries aligned with the last keys."""
    if tile.bounds is None:
        lengths: tuple[Tensor | None, Tensor | None, int, int] = (None, None, q.shape[2], k.shape[2])
    else:
        lengths = (tile.bounds.starts, tile.bounds.starts, tile.bounds.longest, tile.bounds.longest)
    if tile.shift is None:
        return lengths, {}
    window = {"window_size_left": k.shape[2] - q.shape[2] - tile.shift}
    return lengths, window | ({"window_size_right": 0} if tile.causal else {})


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float, tile: Tile) -> tuple[Tensor, Tensor]:
    lengths, window = _flash_call(q, k, tile)
    ours = (_kernel_layout(x, tile) for x in (q, k, flash.widen(q.shape[-1], v)))
    out, lse, _, _, _ = flash.CUDA(*ours, *lengths, 0.0, tile.causal, False, scale=scale, **window)
    if tile.bounds is not None:  # (H, N)
        lse = lse.view(lse.shape[0], q.shape[0], -1).transpose(0, 1)
    return _our_layout(out, q)[..., : v.shape[-1]], lse


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, tile: Tile
) -> tuple[Tensor, Tensor, Tensor]:
    lengths, window = _flash_call(q, k, tile)
    wider = partial(flash.widen, q.shape[-1])
    ours = [_kernel_layout(x, tile) for x in (wider(grad), q, k, wider(v), wider(out))]
    if tile.bounds is not None:
        lse = lse.transpose(0, 1).flatten(1)
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the state of a dropout that there is not
    dq, dk, dv = flash.CUDA_BACKWARD(
        *ours, lse.contiguous(), *lengths, 0.0, tile.causal, unused, unused, scale=scale, **window
    )
    return _our_layout(dq, q), _our_layout(dk, k), _our_layout(dv, k)[..., : v.shape[-1]]


def _logits(q: Tensor, k: Tensor, scale: float, tile: Tile) -> Tensor:
    logits = q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(-1, -2) * scale
    mask = seen(tile, q, k)
    return logits if mask is None else logits.masked_fill_(~mask, float("-inf"))


def _eager(q: Tensor, k: Tensor, v: Tensor, scale: float, tile: Tile) -> tuple[Tensor, Tensor]:
    """With every score in memory, in fp32 at least: the oracle of the kernels, and the path of fp32 on CUDA."""
    q, k, v = (x.to(wide(x.dtype)) for x in (q, k, v))
    logits = _logits(q, k, scale, tile)
    lse = logits.logsumexp(dim=-1)
    return (logits - lse[..., None]).exp_() @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1), lse


def _eager_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, tile: Tile
) -> tuple[Tensor, Tensor, Tensor]:
    grad, q, k, v, out = (x.to(wide(x.dtype)) for x in (grad, q, k, v, out))
    each = q.shape[1] // k.shape[1]
    p_BHQK = (_logits(q, k, scale, tile) - lse[..., None]).exp_()
    dp_BHQK = grad @ v.repeat_interleave(each, dim=1).transpose(-1, -2)
    ds_BHQK = p_BHQK * (dp_BHQK - (grad * out).sum(dim=-1, keepdim=True)) * scale
    dk, dv = (x.unflatten(1, (-1, each)).sum(dim=2) for x in (ds_BHQK.mT @ q, p_BHQK.mT @ grad))
    return ds_BHQK @ k.repeat_interleave(each, dim=1), dk, dv


CPU, FLASH, EAGER = Kernel(_cpu, _cpu_backward), Kernel(_flash, _flash_backward), Kernel(_eager, _eager_backward)
