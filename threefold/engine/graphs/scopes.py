"""Which parts of a layer the scopes of a plan mean, each put in the place of the layer's own method.

Shapes: B batch, S sequence, D model dim, T = B * S tokens, K experts of a token, E experts.
"""

from collections.abc import Collection, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from threefold.engine.dispatch.rows import Rows
from threefold.engine.graphs.piece import Graphs, Piece
from threefold.engine.models.decoder import Block, Decoder
from threefold.engine.moe.balance import Balance, measure
from threefold.engine.moe.layer import MoeLayer
from threefold.engine.places import Places


def attach(model: Decoder, scopes: Collection[str], graphs: Graphs) -> None:
    """`attn`, `mlp` and `moe` whole, or of the latter what comes before dispatch."""
    for block in model.blocks():
        if "attn" in scopes:
            block.mix = Mixer(block, graphs)  # type: ignore[method-assign]
        moe = isinstance(block.ffn, MoeLayer)
        if ("moe" if moe else "mlp") in scopes:
            block.further = Feed(block, graphs)  # type: ignore[method-assign,assignment]
        elif moe and "moe_router" in scopes:
            block.further = Routed(block, graphs, "moe_preprocess" in scopes)  # type: ignore[method-assign,assignment]


class Mixer:
    """Norm and mixer."""

    def __init__(self, block: Block, graphs: Graphs) -> None:
        self.graphs, self.eager = graphs, block.mix
        self.piece = Piece("attn", graphs, (block.mixer_norm, block.mixer))

    def __call__(self, x_BSD: Tensor, places: Places) -> tuple[Tensor, ...]:
        made = self._replay(x_BSD, places)
        if made is None:
            made = self.eager(x_BSD, places)
            self.graphs.tables |= places._tables.keys()
        return made

    def _replay(self, x_BSD: Tensor, places: Places) -> tuple[Tensor, ...] | None:
        lane, tally = self.graphs.lane, self.graphs.tally
        if lane is None:
            return None
        if places.documents_BS is not None:
            tally.fall_back("attn", "packed documents")
            return None
        fixed = lane.places(places, self.graphs.tables)
        if fixed is None:
            tally.fall_back("attn", "another shape", f"positions {tuple(places.positions_BS.shape)}")
            return None
        return self.piece.replay(lambda x: self.eager(x, fixed), x_BSD)


class Feed:
    """All behind the mixer."""

    def __init__(self, block: Block, graphs: Graphs) -> None:
        self.eager = block.further
        self.moe = block.ffn if isinstance(block.ffn, MoeLayer) else None
        self.piece = Piece("moe" if self.moe else "mlp", graphs, (block.ffn_norm, block.ffn))

    def __call__(self, *given_BSD: Tensor) -> tuple[Tensor, Balance | None]:
        made = self.piece.replay(self._flat, *given_BSD)
        if made is None:
            return self.eager(*given_BSD)
        y_BSD, *rest = made
        return y_BSD, None if self.moe is None else _balance(rest, self.moe.options.wanted)

    def _flat(self, *given_BSD: Tensor) -> tuple[Tensor, ...]:
        y_BSD, balance = self.eager(*given_BSD)
        return y_BSD, *(() if balance is None else _tensors(balance))


class Routed:
    """Norm, router and its losses, and with `sorts` the order of the rows; then, eagerly, the experts.

    The normed tokens come out of the graph and stay: recompute of norms saves nothing here.
    """

    def __init__(self, block: Block, graphs: Graphs, sorts: bool) -> None:
        assert isinstance(block.ffn, MoeLayer)
        self.eager, self.join, self.moe, self.sorts = block.further, block.join, block.ffn, sorts
        self.piece = Piece("moe_router", graphs, (block.ffn_norm, block.ffn.router))
        self.padded = False

    def __call__(self, *given_BSD: Tensor) -> tuple[Tensor, Balance | None]:
        made = self.piece.replay(self._before, *given_BSD)
        if made is None:
            return self.eager(*given_BSD)
        x_BSD, y_BSD, weight_TK, expert_TK, *rest = made
        num_losses = len(self.moe.options.wanted)
        balance = _balance(rest[: 3 + num_losses], self.moe.options.wanted)
        order = None
        if rest[3 + num_losses :]:
            slot_R, row_TK, count_E = rest[3 + num_losses :]
            order = Rows(slot_R, row_TK, self.padded), count_E
        y_BSD, dropped = self.moe.follow(y_BSD, weight_TK, expert_TK, order)
        return x_BSD + y_BSD, balance if dropped is None else replace(balance, dropped=dropped)

    def _before(self, *given_BSD: Tensor) -> tuple[Tensor, ...]:
        moe = self.moe
        with self.join(*given_BSD) as (x_BSD, y_BSD):
            routing = moe.router(y_BSD.flatten(0, 1))
        sorts = self.sorts and not moe.in_one(x_BSD) and not moe.is_cut(x_BSD)
        order = moe.dispatcher.sort(routing.expert_TK, routing.weight_TK) if sorts else None
        none = torch.zeros((), dtype=torch.long, device=x_BSD.device)
        balance = measure(routing, len(x_BSD), moe.options.wanted, none, moe.tokens)
        made = x_BSD, y_BSD, routing.weight_TK, routing.expert_TK, *_tensors(balance)
        if order is None:
            return made
        rows, count_E = order
        self.padded = rows.padded
        return *made, rows.slot_R, rows.row_TK, count_E


def _tensors(balance: Balance) -> tuple[Tensor, ...]:
    return balance.load_E, balance.dropped, balance.entropy, *balance.losses.values()


def _balance(tensors: Iterable[Tensor], wanted: Iterable[str]) -> Balance:
    load_E, dropped, entropy, *losses = tensors
    return Balance(dict(zip(wanted, losses, strict=True)), load_E, dropped, entropy)
