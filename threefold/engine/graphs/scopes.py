"""CUDA graph scopes of a plan (`attn`, `mlp`, `moe`, `moe_router`, `moe_preprocess`): what each records of a block.

`make_model_graphs` calls `attach_graphs`, which replaces methods of blocks by objects that replay a graph, or run the
method eagerly where no graph fits.

Shapes: B batch, S sequence, D model dim, T = B * S tokens, K experts of a token, E experts.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from threefold.engine.attention.state_space.mamba import Mamba
from threefold.engine.batch import Batch, Padding
from threefold.engine.context import context, count_event, override
from threefold.engine.dispatch.protocol import DispatchState
from threefold.engine.dispatch.rows import RowMap
from threefold.engine.graphs.full_iteration import Aux, FullIterationGraph, LabelShare
from threefold.engine.graphs.graphed_part import ChunkGraphs, GraphedPart, cuda_graphs
from threefold.engine.graphs.stats import GraphStats
from threefold.engine.layers.positions import Positions
from threefold.engine.models.block import Block
from threefold.engine.models.decoder import Decoder
from threefold.engine.moe.balance import RouterStats, compute_router_stats
from threefold.engine.moe.layer import MoeLayer, count_dropped

# Residual stream, normed tokens, the router's weights and choice, its statistics, and rows in order with their counts.
Routed = tuple[Tensor, Tensor, Tensor, Tensor, RouterStats, tuple[RowMap, Tensor] | None]


def attach_graphs(model: Decoder, scopes: Collection[str], graphs: ChunkGraphs) -> None:
    """Record `attn`, `mlp` and `moe` whole, or only the part of `moe` before the dispatch."""
    for block in model.blocks():
        if "attn" in scopes and block.mixer is not None and not isinstance(block.mixer, Mamba):
            block.mix = GraphedMixer(block, graphs)  # type: ignore[method-assign]
        moe = isinstance(block.ffn, MoeLayer)
        if block.ffn is not None and ("moe" if moe else "mlp") in scopes:
            block.feed_forward = GraphedFeedForward(block, graphs)  # type: ignore[method-assign,assignment]
        elif moe and "moe_router" in scopes:
            block.graphed_router = GraphedRouter(block, graphs, "moe_preprocess" in scopes)
            block.feed_forward = block.graphed_router  # type: ignore[method-assign]


class GraphedMixer:
    """`Block.mix`: norm and mixer in one graph."""

    def __init__(self, block: Block, graphs: ChunkGraphs) -> None:
        self.graphs, self.eager = graphs, block.mix
        self.part = GraphedPart("attn", graphs, _present(block.mixer_norm, block.mixer))

    def __call__(self, x_BSD: Tensor, positions: Positions) -> tuple[Tensor, ...]:
        made = self._replay(x_BSD, positions)
        if made is None:
            made = self.eager(x_BSD, positions)
            self.graphs.rope_keys |= positions._tables.keys()
        return made

    def _replay(self, x_BSD: Tensor, positions: Positions) -> tuple[Tensor, ...] | None:
        fixed = self._static_positions(positions)
        if fixed is None:
            count_event("graph eager", "attn")
            return None
        return self.part.replay(lambda x: self.eager(x, fixed), x_BSD)

    def _static_positions(self, positions: Positions) -> Positions | None:
        """The positions at the addresses that a graph reads; None where the mixer must run eagerly."""
        slot, graph_stats = self.graphs.slot, self.graphs.graph_stats
        if slot is None:
            return None
        if positions.documents_BS is not None:
            graph_stats.count_fallback("attn", "packed documents")
            return None
        fixed = slot.static_positions(positions, self.graphs.rope_keys)
        if fixed is None:
            graph_stats.count_fallback("attn", "another shape", f"positions {tuple(positions.positions_BS.shape)}")
        return fixed


class GraphedFeedForward:
    """`Block.feed_forward`: everything behind the mixer in one graph."""

    def __init__(self, block: Block, graphs: ChunkGraphs) -> None:
        self.eager = block.feed_forward
        self.moe = block.ffn if isinstance(block.ffn, MoeLayer) else None
        self.part = GraphedPart("moe" if self.moe else "mlp", graphs, _present(block.ffn_norm, block.ffn))

    def __call__(self, *given_BSD: Tensor) -> tuple[Tensor, RouterStats | None]:
        made = self.part.replay(self._flat, *_padding_first(given_BSD))
        if made is None:
            return self.eager(*given_BSD)
        y_BSD, *rest = made
        return y_BSD, None if self.moe is None else _stats_of(rest, self.moe.options.router_losses)

    def _flat(self, *given: Tensor) -> tuple[Tensor, ...]:
        with static_padding(given) as given_BSD:
            y_BSD, stats = self.eager(*given_BSD)
        return y_BSD, *(() if stats is None else _tensors(stats))


class GraphedRouter:
    """`Block.feed_forward`: norm, router and its losses in one graph, and with `sorts` the sorting of rows; then the
    experts run eagerly. `schedule/overlappable_pass.py` calls `mix_and_preprocess` and runs the experts apart.

    The normed tokens are an output of the graph and stay in memory, so that recompute of norms saves nothing here.
    """

    def __init__(self, block: Block, graphs: ChunkGraphs, sorts: bool) -> None:
        assert isinstance(block.ffn, MoeLayer)
        self.block, self.eager, self.moe, self.sorts = block, block.feed_forward, block.ffn, sorts
        self.part = GraphedPart("moe_router", graphs, _present(block.ffn_norm, block.ffn.router))
        self.padded = False

    def __call__(self, *given_BSD: Tensor) -> tuple[Tensor, RouterStats | None]:
        routed = self._route(*given_BSD)
        if routed is None:
            return self.eager(*given_BSD)
        x_BSD, y_BSD, weight_TK, expert_TK, stats, order = routed
        y_BSD, num_dropped = self.moe.compute_routed(y_BSD, weight_TK, expert_TK, order)
        return self.block.add_output(x_BSD, y_BSD), _with_dropped(stats, num_dropped)

    def mix_and_preprocess(
        self, x_BSD: Tensor, positions: Positions
    ) -> tuple[Tensor, Tensor, Tensor, DispatchState, RouterStats]:
        """From the beginning of the layer to the state of the dispatch that begins here."""
        block, dispatcher = self.block, self.moe.dispatcher
        given_BSD = block.mix(x_BSD, positions)
        routed = self._route(*given_BSD)
        if routed is None:
            x_BSD, y_BSD, routing = block.normalize_and_route(*given_BSD)
            state = dispatcher.dispatch_preprocess(routing.expert_TK, routing.weight_TK)
            return x_BSD, y_BSD, routing.weight_TK, state, self.moe.compute_stats(routing, state, len(x_BSD))
        x_BSD, y_BSD, weight_TK, expert_TK, stats, order = routed
        state = dispatcher.make_state(*order) if order else dispatcher.dispatch_preprocess(expert_TK, weight_TK)
        return x_BSD, y_BSD, weight_TK, state, _with_dropped(stats, count_dropped(state))

    def _route(self, *given_BSD: Tensor) -> Routed | None:
        """The outputs of the graph; None where the caller must run the block eagerly."""
        made = self.part.replay(self._up_to_dispatch, *_padding_first(given_BSD))
        if made is None:
            return None
        x_BSD, y_BSD, weight_TK, expert_TK, *rest = made
        num_stats = 3 + len(self.moe.options.router_losses)
        stats = _stats_of(rest[:num_stats], self.moe.options.router_losses)
        order = None
        if rest[num_stats:]:
            slot_R, row_TK, count_E = rest[num_stats:]
            self.part.graphs.graph_stats.replays["moe_preprocess"] += 1
            count_event("graph replay", "moe_preprocess")
            order = RowMap(slot_R, row_TK, self.padded), count_E
        return x_BSD, y_BSD, weight_TK, expert_TK, stats, order

    def _up_to_dispatch(self, *given: Tensor) -> tuple[Tensor, ...]:
        moe = self.moe
        with static_padding(given) as given_BSD:
            x_BSD, y_BSD, routing = self.block.normalize_and_route(*given_BSD)
        sorts = self.sorts and not moe.runs_fused(x_BSD) and not moe.runs_in_chunks(x_BSD)
        order = moe.dispatcher.sort_rows(routing.expert_TK, routing.weight_TK) if sorts else None
        none = torch.zeros((), dtype=torch.long, device=x_BSD.device)
        stats = compute_router_stats(routing, len(x_BSD), moe.options.router_losses, none, moe.token_group)
        made = x_BSD, y_BSD, routing.weight_TK, routing.expert_TK, *_tensors(stats)
        if order is None:
            return made
        rows, count_E = order
        self.padded = rows.padded
        return *made, rows.slot_R, rows.row_TK, count_E


def _padding_first(given_BSD: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The inputs of a graph: the padding of the microbatch, where it has some, and the residual stream."""
    return *(context.padding or ()), *given_BSD


@contextmanager
def static_padding(given: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Let routers read the padding among the static inputs of a graph. -> the other inputs."""
    num_padding = 0 if context.padding is None else len(context.padding)
    with override("padding", Padding(*given[:num_padding]) if num_padding else None):
        yield given[num_padding:]


def _with_dropped(stats: RouterStats, num_dropped: Tensor | None) -> RouterStats:
    return stats if num_dropped is None else replace(stats, num_dropped=num_dropped)


def _tensors(stats: RouterStats) -> tuple[Tensor, ...]:
    return stats.load_E, stats.num_dropped, stats.entropy, *stats.losses.values()


def _stats_of(tensors: Iterable[Tensor], wanted: Iterable[str]) -> RouterStats:
    load_E, num_dropped, entropy, *losses = tensors
    return RouterStats(dict(zip(wanted, losses, strict=True)), load_E, num_dropped, entropy)


def _present(*modules: nn.Module | None) -> tuple[nn.Module, ...]:
    """The modules that a block has: some have no mixer, and some no feed-forward network."""
    return tuple(module for module in modules if module is not None)


class ModelGraphs:
    """The graphs of one model chunk. Without `graphs` everything runs eagerly."""

    def __init__(self, model: Decoder, graphs: ChunkGraphs | None = None, reduces_grads: bool = False) -> None:
        self.graphs = graphs
        self.graph_stats: GraphStats | None = None if graphs is None else graphs.graph_stats
        self._full_iteration: FullIterationGraph | None = None
        if graphs is not None:
            if "full_iteration" in model.options.graphs:
                self._full_iteration = FullIterationGraph(model, graphs, reduces_grads)
            else:
                attach_graphs(model, model.options.graphs, graphs)

    def reset(self) -> None:
        if self.graphs is not None:
            self.graphs.reset()

    def run(self, batch: Batch, label_share: LabelShare) -> Aux | None:
        """Forward and backward as one graph; None where the model has no such graph or it does not fit the batch."""
        return None if self._full_iteration is None else self._full_iteration.run(batch, label_share)

    def microbatch(self) -> AbstractContextManager[None]:
        return nullcontext() if self.graphs is None or self._full_iteration is not None else self.graphs.microbatch()


def make_model_graphs(
    model: Decoder, graph_stats: GraphStats | None = None, reduces_grads: bool = False
) -> ModelGraphs:
    """The graphs that the model's options name, on a GPU or the one that a dry run simulates; on a CPU none.

    `reduces_grads` says that hooks of the parameters accumulate gradients and reduce them over ranks.
    """
    first = next(model.parameters(), None)  # a pipeline chunk may have no parameters
    if first is None or not model.options.graphs:
        return ModelGraphs(model)
    budget = model.options.graph_memory_bytes
    if context.make_recorder is not None:  # a dry run has no kernels to choose or compile first
        graphs = ChunkGraphs(context.make_recorder, graph_stats, warmup=0, max_bytes=budget)
        return ModelGraphs(model, graphs, reduces_grads)
    if not first.is_cuda:
        return ModelGraphs(model)
    return ModelGraphs(model, cuda_graphs(first.device, graph_stats, budget), reduces_grads)
