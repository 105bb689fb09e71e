"""Causal attention in blocks of queries, in plain torch: for heads wider than the flash kernels take (Gemma 4 has 512).

Scores of a block are recomputed in the backward, so that only queries, keys, values, outputs and the log-sum-exp of
each row are saved. `backend.py` calls `attend_in_blocks` on GPUs.

Shapes: B batch, H query heads, G key/value heads, R = H / G, S sequence, C queries of a block, T keys up to its end,
D head dim, N = R * C rows of a block for one key/value head.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from threefold.engine.autograd.saved_outputs import CORE_ATTENTION, save_output
from threefold.engine.sum_dtype import fp32_or_wider

MAX_BLOCK_BYTES = 2**28  # fp32 scores of one block of queries


@dataclass(frozen=True)
class BlockMask:
    """What else than causality hides keys from queries."""

    window: int | None = None
    documents_BS: Tensor | None = None

    def hidden(self, block: slice, device: torch.device) -> Tensor:
        """Which keys the queries of a block may not read: (1, 1, C, T), or (B, 1, C, T) with documents."""
        key_T = torch.arange(block.stop, device=device)
        distance_CT = key_T[block, None] - key_T[None]
        hidden_CT = distance_CT < 0 if self.window is None else (distance_CT < 0) | (distance_CT >= self.window)
        if self.documents_BS is None:
            return hidden_CT[None, None]
        documents_BT = self.documents_BS[:, : block.stop]
        return (hidden_CT | (documents_BT[:, block, None] != documents_BT[:, None]))[:, None]


def attend_in_blocks(
    q_BHSD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    scale: float,
    mask: BlockMask,
    max_block_bytes: int = MAX_BLOCK_BYTES,
) -> Tensor:
    """The outputs of all heads, (B, H, S, D)."""
    out: Tensor = _BlockAttention.apply(q_BHSD, k_BGSD, v_BGSD, scale, mask, max_block_bytes)
    return out


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_BHSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, scale: float, mask: BlockMask, max_bytes: int
    ) -> Tensor:
        compute = partial(_attend, q_BHSD, k_BGSD, v_BGSD, scale, mask, max_bytes)
        out_BHSD, lse_BHS = save_output(CORE_ATTENTION, compute, 2)
        ctx.save_for_backward(q_BHSD, k_BGSD, v_BGSD, out_BHSD, lse_BHS, mask.documents_BS)
        ctx.settings = scale, mask.window, max_bytes, k_BGSD.shape[1]
        return out_BHSD

    @staticmethod
    def backward(ctx: Any, grad_BHSD: Tensor) -> tuple[Tensor | None, ...]:
        q_BHSD, k_BGSD, v_BGSD, out_BHSD, lse_BHS, documents_BS = ctx.saved_tensors
        scale, window, max_bytes, num_kv = ctx.settings
        dtype, mask = lse_BHS.dtype, BlockMask(window, documents_BS)
        q_grad = torch.empty_like(q_BHSD)
        k_grad, v_grad = (torch.zeros_like(x, dtype=dtype) for x in (k_BGSD, v_BGSD))
        for block in _blocks(q_BHSD, max_bytes):
            end = block.stop
            scores_BGNT = _scores(q_BHSD, k_BGSD, scale, mask, block)
            weight_BGNT = scores_BGNT.sub_(_rows(lse_BHS, block, num_kv)[..., None]).exp_()
            grad_BGND = _rows(grad_BHSD, block, num_kv).to(dtype)
            dot_BGN = (grad_BGND * _rows(out_BHSD, block, num_kv)).sum(dim=-1)
            v_grad[:, :, :end] += weight_BGNT.transpose(-1, -2) @ grad_BGND
            score_grad = grad_BGND @ v_BGSD[:, :, :end].to(dtype).transpose(-1, -2)
            score_grad.sub_(dot_BGN[..., None]).mul_(weight_BGNT).mul_(scale)
            q_grad[:, :, block] = _heads(score_grad @ k_BGSD[:, :, :end].to(dtype), block)
            k_grad[:, :, :end] += score_grad.transpose(-1, -2) @ _rows(q_BHSD, block, num_kv).to(dtype)
        return q_grad, k_grad.to(k_BGSD.dtype), v_grad.to(v_BGSD.dtype), None, None, None


def _attend(
    q_BHSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, scale: float, mask: BlockMask, max_bytes: int
) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps."""
    dtype = fp32_or_wider(q_BHSD.dtype)
    out_BHSD = torch.empty_like(q_BHSD[..., : v_BGSD.shape[-1]])
    lse_BHS = q_BHSD.new_empty(q_BHSD.shape[:3], dtype=dtype)
    for block in _blocks(q_BHSD, max_bytes):
        scores_BGNT = _scores(q_BHSD, k_BGSD, scale, mask, block)
        lse_BGN = scores_BGNT.logsumexp(dim=-1)
        weight_BGNT = scores_BGNT.sub_(lse_BGN[..., None]).exp_()
        out_BHSD[:, :, block] = _heads(weight_BGNT @ v_BGSD[:, :, : block.stop].to(dtype), block)
        lse_BHS[:, :, block] = _heads(lse_BGN, block)
    return out_BHSD, lse_BHS


def _blocks(q_BHSD: Tensor, max_bytes: int) -> Iterator[slice]:
    """Blocks of queries whose scores fit the limit."""
    batch, heads, length = q_BHSD.shape[:3]
    size = max(1, max_bytes // (4 * batch * heads * length))
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _rows(x_BHS: Tensor, block: slice, num_kv: int) -> Tensor:
    """The queries of a block, those of all heads that share a key/value head one behind the other."""
    return x_BHS[:, :, block].unflatten(1, (num_kv, -1)).flatten(2, 3)


def _heads(x_BGN: Tensor, block: slice) -> Tensor:
    """The inverse of `_rows`, for the block alone."""
    return x_BGN.unflatten(2, (-1, block.stop - block.start)).flatten(1, 2)


def _scores(q_BHSD: Tensor, k_BGSD: Tensor, scale: float, mask: BlockMask, block: slice) -> Tensor:
    """Scores of a block of queries for the keys up to its end, in fp32 at least; -inf for keys that are hidden."""
    dtype, num_kv = fp32_or_wider(q_BHSD.dtype), k_BGSD.shape[1]
    q_BGND = _rows(q_BHSD, block, num_kv).to(dtype)
    scores_BGNT = q_BGND @ k_BGSD[:, :, : block.stop].to(dtype).transpose(-1, -2)
    hidden_BGCT = mask.hidden(block, q_BHSD.device)
    in_heads = scores_BGNT.mul_(scale).view(len(q_BGND), -1, *hidden_BGCT.shape[-2:])
    return in_heads.masked_fill_(hidden_BGCT, float("-inf")).view_as(scores_BGNT)
