"""Attention of each query to its chosen keys, in plain torch and in blocks of queries.

Scores of a block are recomputed in the backward, so that only queries, keys, values, outputs, the log-sum-exp of each
row and the positions of the chosen keys are saved. The work is that of dense attention: keys that were not chosen are
masked and not skipped. `sparse_mla.py` calls `attend_to_chosen`.

Shapes: B batch, H heads, S queries, T keys, d head dim, v value dim, C queries of a block, K chosen keys.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from threefold.engine.attention.sparse.indexer import visible_keys
from threefold.engine.sum_dtype import fp32_or_wider

MAX_BLOCK_BYTES = 2**28  # fp32 scores of one block of queries


def attend_to_chosen(
    q_BHSd: Tensor,
    k_BHTd: Tensor,
    v_BHTv: Tensor,
    chosen_BSK: Tensor,
    documents_BS: Tensor | None,
    scale: float,
    max_block_bytes: int = MAX_BLOCK_BYTES,
) -> Tensor:
    """The outputs of all heads, (B, H, S, v)."""
    out: Tensor = _ChosenAttention.apply(q_BHSd, k_BHTd, v_BHTv, chosen_BSK, documents_BS, scale, max_block_bytes)
    return out


class _ChosenAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BHSd: Tensor,
        k_BHTd: Tensor,
        v_BHTv: Tensor,
        chosen_BSK: Tensor,
        documents_BS: Tensor | None,
        scale: float,
        max_block_bytes: int,
    ) -> Tensor:
        outs, sums = [], []
        for block in _blocks(q_BHSd, max_block_bytes):
            scores_BHCT = _masked_scores(q_BHSd, k_BHTd, chosen_BSK, documents_BS, scale, block)
            lse_BHC = scores_BHCT.logsumexp(dim=-1)
            weight_BHCT = scores_BHCT.sub_(lse_BHC[..., None]).exp_()
            outs.append((weight_BHCT.to(v_BHTv.dtype) @ v_BHTv[:, :, : block.stop]).to(q_BHSd.dtype))
            sums.append(lse_BHC)
        out_BHSv, lse_BHS = torch.cat(outs, dim=2), torch.cat(sums, dim=2)
        ctx.save_for_backward(q_BHSd, k_BHTd, v_BHTv, chosen_BSK, documents_BS, out_BHSv, lse_BHS)
        ctx.scale, ctx.max_block_bytes = scale, max_block_bytes
        return out_BHSv

    @staticmethod
    def backward(ctx: Any, grad_BHSv: Tensor) -> tuple[Tensor | None, ...]:
        q_BHSd, k_BHTd, v_BHTv, chosen_BSK, documents_BS, out_BHSv, lse_BHS = ctx.saved_tensors
        dtype = lse_BHS.dtype
        dot_BHS = (grad_BHSv.to(dtype) * out_BHSv.to(dtype)).sum(dim=-1)
        q_grads = []
        k_grad = torch.zeros_like(k_BHTd, dtype=dtype)
        v_grad = torch.zeros_like(v_BHTv, dtype=dtype)
        for block in _blocks(q_BHSd, ctx.max_block_bytes):
            end = block.stop
            scores_BHCT = _masked_scores(q_BHSd, k_BHTd, chosen_BSK, documents_BS, ctx.scale, block)
            weight_BHCT = scores_BHCT.sub_(lse_BHS[:, :, block, None]).exp_()
            grad_BHCv = grad_BHSv[:, :, block].to(dtype)
            v_grad[:, :, :end] += weight_BHCT.transpose(-1, -2) @ grad_BHCv
            score_grad = grad_BHCv @ v_BHTv[:, :, :end].to(dtype).transpose(-1, -2)
            score_grad.sub_(dot_BHS[:, :, block, None]).mul_(weight_BHCT).mul_(ctx.scale)
            q_grads.append(score_grad @ k_BHTd[:, :, :end].to(dtype))
            k_grad[:, :, :end] += score_grad.transpose(-1, -2) @ q_BHSd[:, :, block].to(dtype)
        q_grad = torch.cat(q_grads, dim=2).to(q_BHSd.dtype)
        return q_grad, k_grad.to(k_BHTd.dtype), v_grad.to(v_BHTv.dtype), None, None, None, None


def _blocks(q_BHSd: Tensor, max_bytes: int) -> Iterator[slice]:
    """Blocks of queries whose scores fit the limit."""
    batch, heads, length = q_BHSd.shape[:3]
    size = max(1, max_bytes // (4 * batch * heads * length))
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _masked_scores(
    q_BHSd: Tensor, k_BHTd: Tensor, chosen_BSK: Tensor, documents_BS: Tensor | None, scale: float, block: slice
) -> Tensor:
    """Scores of a block of queries for the keys up to its end, in fp32 at least; -inf for keys that were not chosen."""
    dtype, length, end = fp32_or_wider(q_BHSd.dtype), k_BHTd.shape[2], block.stop
    scores_BHCT = q_BHSd[:, :, block].to(dtype) @ k_BHTd[:, :, :end].to(dtype).transpose(-1, -2)
    chosen_BCK = chosen_BSK[:, block].long()
    read_BCT = torch.zeros(*chosen_BCK.shape[:2], length, dtype=torch.bool, device=q_BHSd.device)
    read_BCT.scatter_(-1, chosen_BCK, True)
    read_BCT = (read_BCT & visible_keys(block, length, documents_BS, q_BHSd.device))[..., :end]
    return scores_BHCT.mul_(scale).masked_fill_(~read_BCT[:, None], float("-inf"))
