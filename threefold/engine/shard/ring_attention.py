"""Ring attention and all-gather attention: queries of this rank, keys and values of all context-parallel ranks.

Both compute tile by tile (`attention/attend_tiles.py`) and merge by log-sum-exp. `context_parallel.py` calls them.

Shapes: B batch, H query heads, G key/value heads, s this rank's shard of the sequence, S the whole, D head dim.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from threefold.engine.attention.attend_tiles import attend_tiles, attend_tiles_backward, empty_output
from threefold.engine.attention.backend import add_sink, sink_gradient
from threefold.engine.attention.mask_tiles import AttentionMask, Tile
from threefold.engine.dist.collectives import PendingCollective, all_gather, reduce_scatter, send_recv
from threefold.engine.dist.mesh import Group
from threefold.engine.shard.sequence_layout import apply_zigzag, rank_spans, undo_zigzag
from threefold.engine.sum_dtype import fp32_or_wider


@dataclass(frozen=True)
class ShardedMask:
    """Which keys of which rank the queries of this rank attend to, and the scale of their logits."""

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


def _add_sinks_and_save(
    ctx: Any, sharded_mask: ShardedMask, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sinks: Any
) -> Tensor:
    """Add the sink to the merged output, once for each query whatever the tiles, and save tensors for the backward."""
    if sinks is not None:
        out, lse = add_sink(out, lse, sinks.view(-1, 1))
    out = out.to(q.dtype)
    ctx.save_for_backward(q, k, v, out, lse, sinks)
    ctx.sharded_mask = sharded_mask
    return out


def _sink_grad(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor | None:
    if sinks is None:
        return None
    return sink_gradient(grad, out, lse, sinks.view(-1, 1)).sum(dim=(0, 2)).to(sinks.dtype)


def _zeros(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.zeros(x.shape, dtype=fp32_or_wider(x.dtype), device=x.device) for x in tensors)


def _pass_to_next(x: list[Tensor], group: Group) -> tuple[list[Tensor], PendingCollective]:
    """Start sending tensors to the next rank and receiving the same shapes from the rank before."""
    out = [torch.empty_like(t) for t in x]
    return out, send_recv(out, x, group, (group.rank + 1) % group.size, (group.rank - 1) % group.size)


class RingAttention(torch.autograd.Function):
    """Keys and values go round the ring: the next ones travel while the present ones are computed with."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, sharded_mask: ShardedMask) -> Tensor:
        group = sharded_mask.group
        k, v = k.contiguous(), v.contiguous()
        out, lse = empty_output(q, v)
        kv, next_kv, pending = [k, v], [k, v], None
        for step in range(group.size):
            if step < group.size - 1:
                next_kv, pending = _pass_to_next(kv, group)
            tiles = sharded_mask.tiles_for_rank((group.rank - step) % group.size)
            attend_tiles(out, lse, q, kv[0], kv[1], sharded_mask.scale, tiles)
            if pending is not None:
                pending.wait()
            kv = next_kv
        return _add_sinks_and_save(ctx, sharded_mask, q, k, v, out, lse, sinks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of keys and values travel one step behind them and end on the rank that owns them.

        The owner's own contribution is computed in the first step and never travels.
        """
        q, k, v, out, lse, sinks = ctx.saved_tensors
        sharded_mask: ShardedMask = ctx.sharded_mask
        group = sharded_mask.group
        (dq,) = _zeros(q)
        kv, next_kv, pending = [k, v], [k, v], None
        local_grads: tuple[Tensor, ...] = ()
        passed_grads: list[Tensor] = []
        pending_grads: PendingCollective | None = None
        for step in range(group.size):
            if step < group.size - 1:
                next_kv, pending = _pass_to_next(kv, group)
            part = _zeros(k, v)
            tiles = sharded_mask.tiles_for_rank((group.rank - step) % group.size)
            attend_tiles_backward((dq, part[0], part[1]), grad, q, kv[0], kv[1], out, lse, sharded_mask.scale, tiles)
            if step == 0:
                local_grads = part
            else:
                if pending_grads is not None:
                    pending_grads.wait()
                    part = tuple(mine.add_(theirs) for mine, theirs in zip(part, passed_grads, strict=True))
                passed_grads, pending_grads = _pass_to_next([x.to(k.dtype) for x in part], group)
            if pending is not None:
                pending.wait()
            kv = next_kv
        if pending_grads is not None:
            pending_grads.wait()
            local_grads = tuple(mine.add_(theirs) for mine, theirs in zip(local_grads, passed_grads, strict=True))
        dk, dv = local_grads
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), _sink_grad(grad, out, lse, sinks), None


def _start_gather(x_BGsD: Tensor, group: Group) -> tuple[Tensor, PendingCollective]:
    front = x_BGsD.movedim(2, 0).contiguous()
    out = front.new_empty(group.size * front.shape[0], *front.shape[1:])
    return out, all_gather(out, front, group)


def _gather_keys_and_values(k: Tensor, v: Tensor, group: Group) -> list[Tensor]:
    """Keys and values of the whole sequence."""
    started = [_start_gather(x, group) for x in (k, v)]
    for _, pending in started:
        pending.wait()
    return [undo_zigzag(x, group.size, 0).movedim(0, 2) for x, _ in started]


def _start_reduce_scatter(x_BGSD: Tensor, like: Tensor, group: Group) -> tuple[Tensor, PendingCollective]:
    front = apply_zigzag(x_BGSD.to(like.dtype).movedim(2, 0), group.size, 0).contiguous()
    out = front.new_empty(front.shape[0] // group.size, *front.shape[1:])
    return out, reduce_scatter(out, front, group)


class AllGatherAttention(torch.autograd.Function):
    """Every rank gathers all keys and values, and gathers them a second time in the backward: they are not saved."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, sharded_mask: ShardedMask) -> Tensor:
        out, lse = empty_output(q, v)
        all_k, all_v = _gather_keys_and_values(k, v, sharded_mask.group)
        attend_tiles(out, lse, q, all_k, all_v, sharded_mask.scale, sharded_mask.tiles_for_sequence())
        return _add_sinks_and_save(ctx, sharded_mask, q, k, v, out, lse, sinks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        sharded_mask: ShardedMask = ctx.sharded_mask
        all_k, all_v = _gather_keys_and_values(k, v, sharded_mask.group)
        dq, dk, dv = _zeros(q, all_k, all_v)
        tiles = sharded_mask.tiles_for_sequence()
        attend_tiles_backward((dq, dk, dv), grad, q, all_k, all_v, out, lse, sharded_mask.scale, tiles)
        started = [_start_reduce_scatter(whole, x, sharded_mask.group) for whole, x in ((dk, k), (dv, v))]
        for _, pending in started:
            pending.wait()
        (dk, _), (dv, _) = started
        return dq.to(q.dtype), dk.movedim(0, 2), dv.movedim(0, 2), _sink_grad(grad, out, lse, sinks), None
