"""Attention over keys and values that lie on several ranks: passed round a ring, or gathered.

Shapes: B batch, H query heads, G key/value heads, s this rank's share of the sequence, S the whole, D head dim.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from threefold.engine.attention.backend import shrink, sink_gradient
from threefold.engine.attention.blocks import nothing_read, read, read_backward
from threefold.engine.attention.sight import Sight, Tile
from threefold.engine.mesh import Group
from threefold.engine.norm import wide
from threefold.engine.shard.collectives import Pending, all_gather, pass_on, reduce_scatter
from threefold.engine.shard.zigzag import spans_of, to_natural, to_shares


@dataclass(frozen=True)
class Reading:
    """How queries that lie on this rank read keys that lie on all."""

    group: Group
    sight: Sight
    length: int
    scale: float

    def spans(self, rank: int) -> list[range]:
        return spans_of(self.length, self.group.size, rank)

    def of_rank(self, rank: int) -> list[Tile]:
        """The tiles of this rank's queries and the keys of another."""
        return self.sight.between(self.spans(self.group.rank), self.spans(rank))

    def of_all(self) -> list[Tile]:
        return self.sight.over_all(self.spans(self.group.rank))


def _save(ctx: Any, reading: Reading, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sinks: Any) -> Tensor:
    """A sink is seen once by each query, whatever the tiles: it joins the merged sum."""
    if sinks is not None:
        out, lse = shrink(out, lse, sinks.view(-1, 1))
    out = out.to(q.dtype)
    ctx.save_for_backward(q, k, v, out, lse, sinks)
    ctx.reading = reading
    return out


def _sink_grad(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor | None:
    if sinks is None:
        return None
    return sink_gradient(grad, out, lse, sinks.view(-1, 1)).sum(dim=(0, 2)).to(sinks.dtype)


def _zeros(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.zeros(x.shape, dtype=wide(x.dtype), device=x.device) for x in tensors)


def _pass(x: list[Tensor], group: Group) -> tuple[list[Tensor], Pending]:
    """To the next rank, and as much from the one before."""
    out = [torch.empty_like(t) for t in x]
    return out, pass_on(out, x, group, (group.rank + 1) % group.size, (group.rank - 1) % group.size)


class Ring(torch.autograd.Function):
    """Keys and values go round; the next ones travel while the ones at hand are read."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, reading: Reading) -> Tensor:
        group = reading.group
        k, v = k.contiguous(), v.contiguous()
        out, lse = nothing_read(q, v)
        held, coming, under_way = [k, v], [k, v], None
        for step in range(group.size):
            if step < group.size - 1:
                coming, under_way = _pass(held, group)
            tiles = reading.of_rank((group.rank - step) % group.size)
            read(out, lse, q, held[0], held[1], reading.scale, tiles)
            if under_way is not None:
                under_way.wait()
            held = coming
        return _save(ctx, reading, q, k, v, out, lse, sinks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of keys and values travel one step behind them, from the rank after their own back to it: what
        their own rank says of them never travels."""
        q, k, v, out, lse, sinks = ctx.saved_tensors
        reading: Reading = ctx.reading
        group = reading.group
        (dq,) = _zeros(q)
        held, coming, under_way = [k, v], [k, v], None
        home: tuple[Tensor, ...] = ()
        carried: list[Tensor] = []
        carrying: Pending | None = None
        for step in range(group.size):
            if step < group.size - 1:
                coming, under_way = _pass(held, group)
            part = _zeros(k, v)
            tiles = reading.of_rank((group.rank - step) % group.size)
            read_backward((dq, part[0], part[1]), grad, q, held[0], held[1], out, lse, reading.scale, tiles)
            if step == 0:
                home = part
            else:
                if carrying is not None:
                    carrying.wait()
                    part = tuple(mine.add_(theirs) for mine, theirs in zip(part, carried, strict=True))
                carried, carrying = _pass([x.to(k.dtype) for x in part], group)
            if under_way is not None:
                under_way.wait()
            held = coming
        if carrying is not None:
            carrying.wait()
            home = tuple(mine.add_(theirs) for mine, theirs in zip(home, carried, strict=True))
        dk, dv = home
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), _sink_grad(grad, out, lse, sinks), None


def _gather(x_BGsD: Tensor, group: Group) -> tuple[Tensor, Pending]:
    front = x_BGsD.movedim(2, 0).contiguous()
    out = front.new_empty(group.size * front.shape[0], *front.shape[1:])
    return out, all_gather(out, front, group)


def _gather_both(k: Tensor, v: Tensor, group: Group) -> list[Tensor]:
    """Keys and values of the whole sequence in natural order."""
    under_way = [_gather(x, group) for x in (k, v)]
    for _, pending in under_way:
        pending.wait()
    return [to_natural(x, group.size, 0).movedim(0, 2) for x, _ in under_way]


def _scatter(x_BGSD: Tensor, like: Tensor, group: Group) -> tuple[Tensor, Pending]:
    front = to_shares(x_BGSD.to(like.dtype).movedim(2, 0), group.size, 0).contiguous()
    out = front.new_empty(front.shape[0] // group.size, *front.shape[1:])
    return out, reduce_scatter(out, front, group)


class Gathered(torch.autograd.Function):
    """Every rank gathers all keys and values, in the backward again: they are not kept."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, reading: Reading) -> Tensor:
        out, lse = nothing_read(q, v)
        all_k, all_v = _gather_both(k, v, reading.group)
        read(out, lse, q, all_k, all_v, reading.scale, reading.of_all())
        return _save(ctx, reading, q, k, v, out, lse, sinks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        reading: Reading = ctx.reading
        all_k, all_v = _gather_both(k, v, reading.group)
        dq, dk, dv = _zeros(q, all_k, all_v)
        read_backward((dq, dk, dv), grad, q, all_k, all_v, out, lse, reading.scale, reading.of_all())
        under_way = [_scatter(whole, x, reading.group) for whole, x in ((dk, k), (dv, v))]
        for _, pending in under_way:
            pending.wait()
        (dk, _), (dv, _) = under_way
        return dq.to(q.dtype), dk.movedim(0, 2), dv.movedim(0, 2), _sink_grad(grad, out, lse, sinks), None
