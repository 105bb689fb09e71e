"""A sequence spread over context-parallel ranks: 2 x cp equal pieces, rank r holds r and 2 x cp - 1 - r.

One early and one late piece give every rank the same causal work. Spans are ranges of places in the whole sequence.

Shapes: B batch, S the whole sequence, s a rank's share of it, H heads, h a rank's share of them, d any columns.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from threefold.engine.mesh import Group
from threefold.engine.shard.collectives import exchange


def zigzag_pieces(cp: int, rank: int) -> tuple[int, int]:
    return rank, 2 * cp - 1 - rank


def spans_of(length: int, cp: int, rank: int) -> list[range]:
    """What a rank holds of a sequence, in the order it lies there."""
    if cp == 1:
        return [range(length)]
    assert length % (2 * cp) == 0, (length, cp)
    size = length // (2 * cp)
    return [range(piece * size, (piece + 1) * size) for piece in zigzag_pieces(cp, rank)]


def cut(x: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's share of a sequence in natural order."""
    if group.size == 1:
        return x
    spans = spans_of(x.shape[dim], group.size, group.rank)
    return torch.cat([x.narrow(dim, span.start, len(span)) for span in spans], dim)


def to_natural(x: Tensor, cp: int, dim: int) -> Tensor:
    """The shares of all ranks, one behind the other, put in natural order."""
    if cp == 1:
        return x
    pieces = x.chunk(2 * cp, dim)
    return torch.cat([*pieces[::2], *pieces[::-2]], dim)


def to_shares(x: Tensor, cp: int, dim: int) -> Tensor:
    """The inverse of `to_natural`."""
    if cp == 1:
        return x
    pieces = x.chunk(2 * cp, dim)
    return torch.cat([pieces[piece] for rank in range(cp) for piece in zigzag_pieces(cp, rank)], dim)


def trade_for_heads(parts: Sequence[Tensor], group: Group) -> list[Tensor]:
    """(B, s, H, d) of all heads to (B, S, h, d) of this rank's, in natural order; all parts in one exchange.

    Between neighbours of a larger group S is the two spans that a rank of the outer ring holds.
    """
    if group.alone:
        return list(parts)
    cp = group.size
    shares = [x.unflatten(2, (cp, -1)).movedim(2, 0) for x in parts]
    given = exchange(torch.cat([share.flatten(1) for share in shares], dim=1), group)
    widths = [share[0].numel() for share in shares]
    pairs = zip(given.split(widths, dim=1), shares, strict=True)
    # Rank by rank along the sequence, then piece by piece.
    return [to_natural(x.view(share.shape).movedim(0, 1).flatten(1, 2), cp, 1) for x, share in pairs]


def trade_for_sequence(x_BShd: Tensor, group: Group) -> Tensor:
    """(B, S, h, d) of this rank's heads to (B, s, H, d) of all: the way back."""
    if group.alone:
        return x_BShd
    cp = group.size
    shares = to_shares(x_BShd, cp, 1).unflatten(1, (cp, -1)).movedim(1, 0)
    given = exchange(shares.contiguous(), group)
    return given.movedim(0, 2).flatten(2, 3)
