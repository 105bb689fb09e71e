"""The zigzag layout of a sequence over context-parallel ranks, and Ulysses' exchange of sequence for heads.

A sequence has 2 x cp equal pieces, and rank r holds the pieces r and 2 x cp - 1 - r: one early and one late piece give
every rank the same causal work. A span is a range of positions of the whole sequence. Example: with 8 tokens and cp 2,
rank 0 holds the spans 0..1 and 6..7, and rank 1 the spans 2..3 and 4..5. `context_parallel.py`, `ring_attention.py` and
`recurrent_context.py` use the layout.

Shapes: B batch, S the whole sequence, s a rank's shard of it, H heads, h a rank's heads, d any columns.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from threefold.engine.dist.collectives import all_gather, all_to_all_rows, reduce_scatter
from threefold.engine.dist.mesh import Group


def zigzag_pieces(cp: int, rank: int) -> tuple[int, int]:
    """The numbers of the two pieces that a rank holds."""
    return rank, 2 * cp - 1 - rank


def rank_spans(length: int, cp: int, rank: int) -> list[range]:
    """The spans of a sequence that a rank holds, in the order of its shard."""
    if cp == 1:
        return [range(length)]
    assert length % (2 * cp) == 0, (length, cp)
    size = length // (2 * cp)
    return [range(piece * size, (piece + 1) * size) for piece in zigzag_pieces(cp, rank)]


def shard_sequence(x: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's shard of a whole sequence."""
    if group.size == 1:
        return x
    spans = rank_spans(x.shape[dim], group.size, group.rank)
    return torch.cat([x.narrow(dim, span.start, len(span)) for span in spans], dim)


def undo_zigzag(x: Tensor, cp: int, dim: int) -> Tensor:
    """The whole sequence, from the shards of all ranks one after the other."""
    if cp == 1:
        return x
    pieces = x.chunk(2 * cp, dim)
    return torch.cat([*pieces[::2], *pieces[::-2]], dim)


def apply_zigzag(x: Tensor, cp: int, dim: int) -> Tensor:
    """The shards of all ranks one after the other, from the whole sequence: the inverse of `undo_zigzag`."""
    if cp == 1:
        return x
    pieces = x.chunk(2 * cp, dim)
    return torch.cat([pieces[piece] for rank in range(cp) for piece in zigzag_pieces(cp, rank)], dim)


def start_sequence_gather(x: Tensor, group: Group, dim: int, keep_zigzag: bool = False) -> Callable[[], Tensor]:
    """Start gathering the shards of all ranks. -> a function that waits and returns the sequence in its own order.

    With `keep_zigzag` the shards stay one after the other, in the order of ranks. There is no backward.
    """
    if group.is_trivial:
        return lambda: x
    front = x.movedim(dim, 0).contiguous()
    whole = front.new_empty(group.size * front.shape[0], *front.shape[1:])
    pending = all_gather(whole, front, group)

    def wait() -> Tensor:
        pending.wait()
        return (whole if keep_zigzag else undo_zigzag(whole, group.size, 0)).movedim(0, dim)

    return wait


def start_sequence_reduce(x: Tensor, group: Group, dim: int, in_zigzag: bool = False) -> Callable[[], Tensor]:
    """Start summing a whole sequence over ranks. -> a function that waits and returns this rank's shard of the sum.

    With `in_zigzag` the sequence consists of the shards of all ranks already. There is no backward.
    """
    if group.is_trivial:
        return lambda: x
    whole = x.movedim(dim, 0)
    whole = whole.contiguous() if in_zigzag else apply_zigzag(whole, group.size, 0)
    shard = whole.new_empty(whole.shape[0] // group.size, *whole.shape[1:])
    pending = reduce_scatter(shard, whole, group)

    def wait() -> Tensor:
        pending.wait()
        return shard.movedim(0, dim)

    return wait


def sequence_to_heads(parts: Sequence[Tensor], group: Group) -> list[Tensor]:
    """Ulysses: (B, s, H, d) with all heads to (B, S, h, d) with this rank's heads, all tensors in one all-to-all.

    Inside `a2a+p2p`, S is only the two spans that a rank of the outer ring holds.
    """
    if group.is_trivial:
        return list(parts)
    cp = group.size
    by_rank = [x.unflatten(2, (cp, -1)).movedim(2, 0) for x in parts]
    received = all_to_all_rows(torch.cat([part.flatten(1) for part in by_rank], dim=1), group)
    widths = [part[0].numel() for part in by_rank]
    pairs = zip(received.split(widths, dim=1), by_rank, strict=True)
    # The received sequence lies rank by rank and is put into its own order.
    return [undo_zigzag(x.view(part.shape).movedim(0, 1).flatten(1, 2), cp, 1) for x, part in pairs]


def heads_to_sequence(x_BShd: Tensor, group: Group) -> Tensor:
    """Ulysses: (B, S, h, d) with this rank's heads back to (B, s, H, d) with all heads."""
    if group.is_trivial:
        return x_BShd
    cp = group.size
    by_rank = apply_zigzag(x_BShd, cp, 1).unflatten(1, (cp, -1)).movedim(1, 0)
    received = all_to_all_rows(by_rank.contiguous(), group)
    return received.movedim(0, 2).flatten(2, 3)
