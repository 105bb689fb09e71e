"""Causal attention in blocks of queries, in plain torch: for what no fused kernel takes.

Scores of a block are recomputed in the backward, so that only queries, keys, values, outputs and the log-sum-exp of
each row are saved: memory grows with the length and not with its square. `backend.py` and `attend_tiles.py` work so on
GPUs where heads are wider than the flash kernels take (Gemma 4 has 512) or in fp32, and `sparse/sparse_mla.py` where an
indexer chose the keys.

Shapes: B batch, H query heads, G key/value heads, R = H / G, S queries, C queries of a block, T keys that a block may
read, D head dim, N = R * C rows of a block for one key/value head.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from threefold.engine.attention.torch_kernels import add_sink, sink_gradient
from threefold.engine.autograd.saved_tensors import CORE_ATTENTION, save_output
from threefold.engine.sum_dtype import fp32_or_wider

MAX_BLOCK_BYTES = 2**28  # fp32 scores of one block of queries
# Blocks that a dry run computes. Sizes grow from block to block, only the last one may be smaller, and a block meets
# the tensors of the block before it: the last three take as much memory as all of them.
SIMULATED_BLOCKS = 3


class BlockMask(Protocol):
    """Which keys the queries of a block may read."""

    def spans(self, block: slice) -> tuple[slice, ...]:
        """The spans of keys among which are all that any query of the block may read."""

    def row_bytes(self, key_bytes: int, length: int, max_bytes: int) -> int:
        """Bytes of the scores of a query, by which blocks within `max_bytes` are chosen, where there are `length` keys
        and a score of all heads takes `key_bytes`."""

    def hidden(self, block: slice, device: torch.device) -> Tensor | None:
        """Those of them that a query may not read, for (B, H, C, T); None: all may be read."""


@dataclass(frozen=True)
class CausalMask:
    """Every query reads the keys up to its own, in its window and its document."""

    window: int | None = None
    documents_BS: Tensor | None = None

    def spans(self, block: slice) -> tuple[slice, ...]:
        return (slice(0, block.stop),)

    def row_bytes(self, key_bytes: int, length: int, max_bytes: int) -> int:
        return key_bytes * length

    def hidden(self, block: slice, device: torch.device) -> Tensor:
        key_T = torch.arange(block.stop, device=device, dtype=torch.int32)
        distance_CT = key_T[block, None] - key_T[None]
        hidden_CT = distance_CT < 0 if self.window is None else (distance_CT < 0) | (distance_CT >= self.window)
        if self.documents_BS is None:
            return hidden_CT[None, None]
        documents_BT = self.documents_BS[:, : block.stop]
        return (hidden_CT | (documents_BT[:, block, None] != documents_BT[:, None]))[:, None]


def query_blocks(x_BHSD: Tensor, row_bytes: int, max_bytes: int) -> Iterator[slice]:
    """Blocks of the queries such that a block with so many bytes for each query is within the limit."""
    length, size = x_BHSD.shape[2], max(1, max_bytes // row_bytes)
    starts = range(0, length, size)
    if x_BHSD.is_meta:
        starts = starts[-SIMULATED_BLOCKS:]
    return (slice(start, min(start + size, length)) for start in starts)


def attend_in_blocks(
    q_BHSD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    scale: float,
    make_mask: Callable[..., BlockMask],
    *mask_tensors: Tensor | None,
    sinks: Tensor | None = None,
    max_block_bytes: int = MAX_BLOCK_BYTES,
) -> Tensor:
    """The outputs of all heads, (B, H, S, D). The mask is made of its tensors, which are saved for the backward."""
    settings = scale, make_mask, max_block_bytes
    out: Tensor = _BlockAttention.apply(q_BHSD, k_BGSD, v_BGSD, sinks, settings, *mask_tensors)
    return out


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BHSD: Tensor,
        k_BGSD: Tensor,
        v_BGSD: Tensor,
        sinks: Tensor | None,
        settings: tuple[float, Callable[..., BlockMask], int],
        *mask_tensors: Tensor | None,
    ) -> Tensor:
        scale, make_mask, max_bytes = settings

        def compute() -> tuple[Tensor, Tensor]:
            out_BHSD, lse_BHS = forward_blocks(q_BHSD, k_BGSD, v_BGSD, scale, make_mask(*mask_tensors), max_bytes)
            return (out_BHSD, lse_BHS) if sinks is None else add_sink(out_BHSD, lse_BHS, sinks.view(-1, 1))

        out_BHSD, lse_BHS = save_output(CORE_ATTENTION, compute, 2)
        ctx.save_for_backward(q_BHSD, k_BGSD, v_BGSD, out_BHSD, lse_BHS, sinks, *mask_tensors)
        ctx.settings = settings
        return out_BHSD

    @staticmethod
    def backward(ctx: Any, grad_BHSD: Tensor) -> tuple[Tensor | None, ...]:
        q_BHSD, k_BGSD, v_BGSD, out_BHSD, lse_BHS, sinks, *mask_tensors = ctx.saved_tensors
        scale, make_mask, max_bytes = ctx.settings
        inputs = grad_BHSD, q_BHSD, k_BGSD, v_BGSD, out_BHSD, lse_BHS
        q_grad, k_grad, v_grad = backward_blocks(*inputs, scale, make_mask(*mask_tensors), max_bytes)
        sink_grad = None
        if sinks is not None:
            sink_grad = sink_gradient(grad_BHSD, out_BHSD, lse_BHS, sinks.view(-1, 1)).sum(dim=(0, 2)).to(sinks.dtype)
        of_inputs = q_grad, k_grad.to(k_BGSD.dtype), v_grad.to(v_BGSD.dtype), sink_grad
        return *of_inputs, None, *(None for _ in mask_tensors)


def forward_blocks(
    q_BHSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, scale: float, mask: BlockMask, max_bytes: int = MAX_BLOCK_BYTES
) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps."""
    batch, heads, length, _ = q_BHSD.shape
    # Tokens are the outer dim in memory, as the output projection reads them.
    out_BHSD = q_BHSD.new_empty(batch, length, heads, v_BGSD.shape[-1]).transpose(1, 2)
    lse_BHS = q_BHSD.new_empty(q_BHSD.shape[:3], dtype=fp32_or_wider(q_BHSD.dtype))
    for block in _blocks(q_BHSD, k_BGSD, mask, max_bytes):
        scores_BGNT = _scores(q_BHSD, k_BGSD, scale, mask, block)
        lse_BGN = scores_BGNT.logsumexp(dim=-1)
        weight_BGNT = scores_BGNT.sub_(lse_BGN[..., None]).exp_()
        v_BGTD = _taken(v_BGSD, mask.spans(block))
        out_BHSD[:, :, block] = _heads(weight_BGNT.to(v_BGTD.dtype) @ v_BGTD, block)
        lse_BHS[:, :, block] = _heads(lse_BGN, block)
    return out_BHSD, lse_BHS


def backward_blocks(
    grad_BHSD: Tensor,
    q_BHSD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    out_BHSD: Tensor,
    lse_BHS: Tensor,
    scale: float,
    mask: BlockMask,
    max_bytes: int = MAX_BLOCK_BYTES,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries in their dtype, and those of keys and values in fp32 or wider."""
    k_grad, v_grad = (torch.zeros_like(x, dtype=lse_BHS.dtype) for x in (k_BGSD, v_BGSD))
    grads = torch.empty_like(q_BHSD), k_grad, v_grad
    for block in _blocks(q_BHSD, k_BGSD, mask, max_bytes):
        _backward_block(grads, grad_BHSD, q_BHSD, k_BGSD, v_BGSD, out_BHSD, lse_BHS, scale, mask, block)
    return grads


def _backward_block(
    grads: tuple[Tensor, Tensor, Tensor],
    grad_BHSD: Tensor,
    q_BHSD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    out_BHSD: Tensor,
    lse_BHS: Tensor,
    scale: float,
    mask: BlockMask,
    block: slice,
) -> None:
    """Write the gradients of the block's queries, and add its part of those of keys and values."""
    (q_grad, k_grad, v_grad), dtype, spans = grads, lse_BHS.dtype, mask.spans(block)
    rows = partial(_rows, block=block, num_kv=k_BGSD.shape[1])
    weight_BGNT = _scores(q_BHSD, k_BGSD, scale, mask, block).sub_(rows(lse_BHS)[..., None]).exp_()
    grad_BGND = rows(grad_BHSD).to(dtype)
    _add(v_grad, spans, weight_BGNT.transpose(-1, -2) @ grad_BGND)
    dot_BGN = (grad_BGND * rows(out_BHSD)).sum(dim=-1)
    score_grad = grad_BGND @ _taken(v_BGSD, spans).to(dtype).transpose(-1, -2)
    score_grad.sub_(dot_BGN[..., None]).mul_(weight_BGNT).mul_(scale)
    q_grad[:, :, block] = _heads(score_grad @ _taken(k_BGSD, spans).to(dtype), block)
    _add(k_grad, spans, score_grad.transpose(-1, -2) @ rows(q_BHSD).to(dtype))


def _blocks(q_BHSD: Tensor, k_BGSD: Tensor, mask: BlockMask, max_bytes: int) -> Iterator[slice]:
    """Blocks of queries whose scores in fp32 fit the limit."""
    batch, heads = q_BHSD.shape[:2]
    return query_blocks(q_BHSD, mask.row_bytes(4 * batch * heads, k_BGSD.shape[2], max_bytes), max_bytes)


def _taken(x_BGSD: Tensor, spans: tuple[slice, ...]) -> Tensor:
    """The keys or values of some spans."""
    parts = [x_BGSD[:, :, span] for span in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _add(grad_BGSD: Tensor, spans: tuple[slice, ...], part_BGTD: Tensor) -> None:
    """Add the gradients of keys or values of some spans, which lie side by side."""
    sizes = [len(range(grad_BGSD.shape[2])[span]) for span in spans]
    for span, part in zip(spans, part_BGTD.split(sizes, dim=2), strict=True):
        grad_BGSD[:, :, span] += part


def _rows(x_BHS: Tensor, block: slice, num_kv: int) -> Tensor:
    """The queries of a block, those of all heads that share a key/value head one after the other."""
    return x_BHS[:, :, block].unflatten(1, (num_kv, -1)).flatten(2, 3)


def _heads(x_BGN: Tensor, block: slice) -> Tensor:
    """The inverse of `_rows`, for the block alone."""
    return x_BGN.unflatten(2, (-1, block.stop - block.start)).flatten(1, 2)


def _scores(q_BHSD: Tensor, k_BGSD: Tensor, scale: float, mask: BlockMask, block: slice) -> Tensor:
    """Scores of a block of queries for the keys that it may read, in fp32 or wider; -inf for keys that are hidden."""
    dtype, num_kv = fp32_or_wider(q_BHSD.dtype), k_BGSD.shape[1]
    q_BGND = _rows(q_BHSD, block, num_kv).to(dtype)
    scores_BGNT = (q_BGND @ _taken(k_BGSD, mask.spans(block)).to(dtype).transpose(-1, -2)).mul_(scale)
    hidden = mask.hidden(block, q_BHSD.device)
    if hidden is not None:
        in_heads = scores_BGNT.view(len(q_BGND), -1, block.stop - block.start, scores_BGNT.shape[-1])
        in_heads.masked_fill_(hidden, float("-inf"))
    return scores_BGNT
