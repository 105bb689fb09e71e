"""Ring attention and all-gather attention: queries of this rank, keys and values of all context-parallel ranks.

Both compute tile by tile (`attention/attend_tiles.py`) and merge by log-sum-exp. `context_parallel.py` calls them.

Shapes: B batch, H query heads, G key/value heads, s this rank's shard of the sequence, S the whole, D head dim.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from threefold.engine.attention.attend_tiles import attend_tiles, attend_tiles_backward, empty_output
from threefold.engine.attention.mask_tiles import AttentionMask, Tile
from threefold.engine.attention.torch_kernels import add_sink, sink_gradient
from threefold.engine.autograd.saved_tensors import CORE_ATTENTION, save_output
from threefold.engine.dist.collectives import PendingCollective, send_recv
from threefold.engine.dist.mesh import Group
from threefold.engine.shard.sequence_layout import rank_spans, start_sequence_gather, start_sequence_reduce
from threefold.engine.sum_dtype import fp32_or_wider

MAX_BLOCK_BYTES = 2**30  # fp32 gradients of the keys and values of one block


@dataclass(frozen=True)
class ShardedMask:
    """The keys of each rank that the queries of this rank attend to, and the scale of their logits."""

    group: Group
    mask: AttentionMask
    length: int  # tokens of the whole sequence
    scale: float

    def spans(self, rank: int) -> list[range]:
        return rank_spans(self.length, self.group.size, rank)

    def tiles_for_rank(self, rank: int) -> list[Tile]:
        """The tiles of this rank's queries with the keys of another rank."""
        return self.mask.tiles_between(self.spans(self.group.rank), self.spans(rank))

    def tiles_for_sequence(self) -> list[Tile]:
        """The tiles of this rank's queries with the keys of the whole sequence."""
        return self.mask.tiles_over_sequence(self.spans(self.group.rank))

    def blocks_of_sequence(self, max_tokens: int) -> Iterator[tuple[slice, list[Tile]]]:
        """Blocks of keys of the whole sequence that some query of this rank attends to, and the tiles of each.

        A block ends where a span of queries begins or ends, as tiles want it, or after `max_tokens`.
        """
        queries = self.spans(self.group.rank)
        edges = sorted({0, *(edge for span in queries for edge in (span.start, span.stop))})
        for first, last in pairwise(edges):
            is_query_span = range(first, last) in queries
            step = last - first if is_query_span else max_tokens
            for start in range(first, last, step):
                keys = range(start, min(start + step, last))
                if tiles := self.mask.tiles_between(queries, [keys]):
                    yield slice(keys.start, keys.stop), tiles


def _attend_and_save(
    ctx: Any,
    sharded_mask: ShardedMask,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Any,
    attend_all: Callable[[Tensor, Tensor], None],
) -> Tensor:
    """Attention by `attend_all`, which merges all tiles into an output and its log-sum-exps.

    The sink is added to the merged output, once for each query whatever the tiles. Tensors are saved for the backward.
    """

    def compute() -> tuple[Tensor, Tensor]:
        out, lse = empty_output(q, v.shape[-1])
        attend_all(out, lse)
        if sinks is not None:
            out, lse = add_sink(out, lse, sinks.view(-1, 1))
        return out.to(q.dtype), lse

    out, lse = save_output(CORE_ATTENTION, compute, 2)
    ctx.save_for_backward(q, k, v, out, lse, sinks)
    ctx.sharded_mask = sharded_mask
    return out


def _sink_grad(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor | None:
    if sinks is None:
        return None
    return sink_gradient(grad, out, lse, sinks.view(-1, 1)).sum(dim=(0, 2)).to(sinks.dtype)


def zeros_to_sum(x: Tensor) -> Tensor:
    """Zeros to add gradients of x to, in fp32 or wider."""
    return torch.zeros(x.shape, dtype=fp32_or_wider(x.dtype), device=x.device)


def _pass_to_next(x: list[Tensor], group: Group) -> tuple[list[Tensor], PendingCollective]:
    """Start sending tensors to the next rank and receiving the same shapes from the rank before."""
    out = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in x]
    return out, send_recv(out, x, group, (group.rank + 1) % group.size, (group.rank - 1) % group.size)


def around_ring(x: list[Tensor], group: Group) -> Iterator[tuple[int, list[Tensor]]]:
    """The tensors of every rank in turn, beginning with this rank's; the next ones travel while these are used."""
    for step in range(group.size):
        following, pending = x, PendingCollective.completed()
        if step < group.size - 1:
            following, pending = _pass_to_next(x, group)
        yield (group.rank - step) % group.size, x
        pending.wait()
        x = following


class GradientRing:
    """Gradients of what goes `around_ring`. They travel one step after it and end on the rank that owns them.

    The owner's own contribution comes first and never travels. Gradients travel in `dtype`; None leaves theirs.
    """

    def __init__(self, group: Group, dtype: torch.dtype | None = None) -> None:
        self.group, self.dtype = group, dtype
        self._local: list[Tensor] = []
        self._passed: list[Tensor] = []
        self._pending: PendingCollective | None = None

    def add(self, parts: list[Tensor]) -> None:
        """This rank's contribution to the gradients of the tensors that it holds now."""
        if not self._local:
            self._local = parts
            return
        self._add_passed(parts)
        self._passed, self._pending = _pass_to_next(
            [x if self.dtype is None else x.to(self.dtype) for x in parts], self.group
        )

    def _add_passed(self, parts: list[Tensor]) -> None:
        if self._pending is not None:
            self._pending.wait()
            for mine, theirs in zip(parts, self._passed, strict=True):
                mine.add_(theirs)

    def total(self) -> list[Tensor]:
        """The gradients of this rank's tensors from all ranks."""
        self._add_passed(self._local)
        return self._local


class RingAttention(torch.autograd.Function):
    """Keys and values go round the ring: the next ones travel while the present ones are computed with."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, sharded_mask: ShardedMask) -> Tensor:
        def attend_all(out: Tensor, lse: Tensor) -> None:
            for rank, (k_now, v_now) in around_ring([k, v], sharded_mask.group):
                attend_tiles(out, lse, q, k_now, v_now, sharded_mask.scale, sharded_mask.tiles_for_rank(rank))

        return _attend_and_save(ctx, sharded_mask, q, k, v, sinks, attend_all)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        sharded_mask: ShardedMask = ctx.sharded_mask
        dq = zeros_to_sum(q)
        ring = GradientRing(sharded_mask.group, k.dtype)
        for rank, (k_now, v_now) in around_ring([k, v], sharded_mask.group):
            dk, dv = zeros_to_sum(k), zeros_to_sum(v)
            tiles = sharded_mask.tiles_for_rank(rank)
            attend_tiles_backward((dq, dk, dv), grad, q, k_now, v_now, out, lse, sharded_mask.scale, tiles)
            ring.add([dk, dv])
        dk, dv = ring.total()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), _sink_grad(grad, out, lse, sinks), None


class AllGatherAttention(torch.autograd.Function):
    """Every rank gathers all keys and values, and gathers them a second time in the backward: they are not saved."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, sharded_mask: ShardedMask) -> Tensor:
        def attend_all(out: Tensor, lse: Tensor) -> None:
            all_k, all_v = _gather_keys_and_values(k, v, sharded_mask.group)
            attend_tiles(out, lse, q, all_k, all_v, sharded_mask.scale, sharded_mask.tiles_for_sequence())

        return _attend_and_save(ctx, sharded_mask, q, k, v, sinks, attend_all)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of keys and values are summed in fp32 for one block of keys at a time, and sent in their dtype."""
        q, k, v, out, lse, sinks = ctx.saved_tensors
        sharded_mask: ShardedMask = ctx.sharded_mask
        all_k, all_v = _gather_keys_and_values(k, v, sharded_mask.group)
        dq = zeros_to_sum(q)
        dk, dv = torch.zeros_like(all_k), torch.zeros_like(all_v)
        token_bytes = 4 * k.shape[0] * k.shape[1] * (k.shape[-1] + v.shape[-1])
        for keys, tiles in sharded_mask.blocks_of_sequence(max(1, MAX_BLOCK_BYTES // token_bytes)):
            k_block, v_block = all_k[:, :, keys], all_v[:, :, keys]
            sums = dq, zeros_to_sum(k_block), zeros_to_sum(v_block)
            attend_tiles_backward(sums, grad, q, k_block, v_block, out, lse, sharded_mask.scale, tiles)
            dk[:, :, keys], dv[:, :, keys] = sums[1:]
            del sums
        waits = [start_sequence_reduce(whole, sharded_mask.group, dim=2) for whole in (dk, dv)]
        dk, dv = (wait() for wait in waits)
        return dq.to(q.dtype), dk, dv, _sink_grad(grad, out, lse, sinks), None


def _gather_keys_and_values(k: Tensor, v: Tensor, group: Group) -> list[Tensor]:
    """Keys and values of the whole sequence."""
    waits = [start_sequence_gather(x, group, dim=2) for x in (k, v)]
    return [wait() for wait in waits]
