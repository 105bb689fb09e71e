"""The blocks of a decoder: a mixer over positions and a feed-forward network, each after a norm.

The body of a block is mathematics only. Its small methods are points that others wrap or replace from outside without
changing the names of parameters: `models/activation_memory.py` (recompute, offload), `graphs/scopes.py` (CUDA graphs),
`shard/` (collectives at the inputs of modules) and `schedule/overlappable_pass.py`, which runs the methods one by one.
`models/decoder.py` makes them.

Shapes: B batch, S sequence, D model dim, N residual streams, X = N * D, W weights of a token for a write.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn

from threefold.engine.layers.input_linears import InputHook, identity
from threefold.engine.layers.positions import Positions
from threefold.engine.layers.streams import StreamConnection, write_streams
from threefold.engine.moe.balance import RouterStats
from threefold.engine.moe.layer import MoeLayer
from threefold.engine.moe.router import Routing
from threefold.spec.model import ModelSpec

# Router statistics, each with the number of its router in the whole model.
NumberedStats = list[tuple[int, RouterStats]]


class Block(nn.Module):
    """x + mixer(norm(x)), then x + ffn(norm(x)). A layer of Nemotron-H has only one of both."""

    router_number: int = -1  # the number of its router among all routers of the model
    output_scale: Tensor | None  # what the layer's output is multiplied by (Gemma 4)
    graphed_router: Any = None  # graphs/scopes.py: replays norm and router for schedules that run the experts apart

    def __init__(self, make_norm: Callable[[], nn.Module], mixer: nn.Module | None, ffn: nn.Module | None) -> None:
        super().__init__()
        self.mixer_norm, self.mixer = None if mixer is None else make_norm(), mixer
        self.ffn_norm, self.ffn = None if ffn is None else make_norm(), ffn
        self.register_buffer("output_scale", None)

    def forward(self, x_BSD: Tensor, positions: Positions) -> tuple[Tensor, RouterStats | None]:
        return self.feed_forward(*self.mix(x_BSD, positions))

    def mix(self, x_BSD: Tensor, positions: Positions) -> tuple[Tensor, ...]:
        """The residual stream, and the mixer's output still to be added: the next norm adds it while it reads both."""
        if self.mixer is None:
            return (x_BSD,)
        *kept, y_BSD = self.normalize_for_mixer(x_BSD)
        return self.add_mixed(kept, self.mixer(y_BSD, positions), positions)

    def add_mixed(self, kept: Sequence[Tensor], y_BSD: Tensor, positions: Positions) -> tuple[Tensor, ...]:
        """Returns the result of `mix`, from what `normalize_for_mixer` keeps and the mixer's output."""
        return *kept, y_BSD

    def feed_forward(self, x_BSD: Tensor, *added_BSD: Tensor) -> tuple[Tensor, RouterStats | None]:
        """Everything behind the mixer."""
        if self.ffn is None:
            return sum(added_BSD, x_BSD), None
        *kept, y_BSD, stats = self.ffn_branch(x_BSD, *added_BSD)
        return self.add_output(*kept, y_BSD), stats

    def add_output(self, x_BSD: Tensor, *others: Tensor) -> Tensor:
        """The layer's output, from what `normalize_for_ffn` keeps, and last what the feed-forward network adds."""
        (y_BSD,) = others
        return x_BSD + y_BSD if self.output_scale is None else (x_BSD + y_BSD) * self.output_scale

    def ffn_branch(self, x_BSD: Tensor, *added_BSD: Tensor) -> tuple[Any, ...]:
        """The residual stream, what the feed-forward network adds to it, and its router's statistics."""
        *kept, y_BSD = self.normalize_for_ffn(x_BSD, *added_BSD)
        return *kept, *self.run_ffn(y_BSD, *self.router_tokens(kept))

    def router_tokens(self, kept: Sequence[Tensor]) -> Sequence[Tensor]:
        """The ids of the tokens, where a router looks experts up by them, among what `normalize_for_ffn` returns."""
        return ()

    def normalize_for_mixer(self, x_BSD: Tensor) -> tuple[Tensor, ...]:
        """The residual stream and its norm."""
        assert self.mixer_norm is not None
        both: tuple[Tensor, ...] = self.mixer_norm(x_BSD, return_residual=True)
        return both

    def normalize_for_ffn(self, x_BSD: Tensor, *added_BSD: Tensor) -> tuple[Tensor, ...]:
        """The residual stream with the mixer's output added, and its norm."""
        assert self.ffn_norm is not None
        both: tuple[Tensor, ...] = self.ffn_norm(x_BSD, *added_BSD, return_residual=True)
        return both

    def run_ffn(self, x_BSD: Tensor, *tokens_BS: Tensor) -> tuple[Tensor, RouterStats | None]:
        assert self.ffn is not None
        return self.ffn(x_BSD, *tokens_BS) if isinstance(self.ffn, MoeLayer) else (self.ffn(x_BSD), None)

    def normalize_and_route(self, x_BSD: Tensor, *added_BSD: Tensor) -> tuple[Tensor, Tensor, Routing]:
        """The residual stream, its norm, and the router's choice: for CUDA graphs that run the experts eagerly."""
        assert isinstance(self.ffn, MoeLayer)
        x_BSD, y_BSD = self.normalize_for_ffn(x_BSD, *added_BSD)
        return x_BSD, y_BSD, self.ffn.choose_experts(y_BSD.flatten(0, 1), len(y_BSD))

    def mix_and_route(self, x_BSD: Tensor, positions: Positions) -> tuple[Tensor, Tensor, Routing]:
        """The same from the beginning of the layer: for schedules that run the experts apart.

        The mixer's output is freed before the router runs, which `normalize_and_route(*mix(...))` would hold on to.
        """
        assert isinstance(self.ffn, MoeLayer)
        x_BSD, y_BSD = self.normalize_for_ffn(*self.mix(x_BSD, positions))
        return x_BSD, y_BSD, self.ffn.choose_experts(y_BSD.flatten(0, 1), len(y_BSD))

    def run_with_parameters(self, function: Callable[..., Any], *inputs: Tensor) -> Any:
        """Run a function that uses this block's parameters without calling it: FSDP gathers them around this method."""
        return function(*inputs)


class StreamBlock(Block):
    """A block between several residual streams: a part reads a sum of them, and its output is written to each."""

    def __init__(
        self, make_norm: Callable[[], nn.Module], mixer: nn.Module | None, ffn: nn.Module | None, spec: ModelSpec
    ) -> None:
        super().__init__(make_norm, mixer, ffn)
        assert spec.streams is not None
        self.mixer_streams = StreamConnection(spec.streams, spec.dim, spec.norm_eps)
        self.ffn_streams = StreamConnection(spec.streams, spec.dim, spec.norm_eps)
        self.shard_tokens: InputHook = identity  # shard/tensor_parallel.py takes this rank's tokens

    def add_mixed(self, kept: Sequence[Tensor], y_BSD: Tensor, positions: Positions) -> tuple[Tensor, ...]:
        """The streams with the mixer's output, and the ids of the tokens where the router wants them."""
        x_BSX = write_streams(kept[0], kept[1], y_BSD)
        if not (isinstance(self.ffn, MoeLayer) and self.ffn.router.expert_of_token is not None):
            return (x_BSX,)
        assert positions.tokens_BS is not None
        return x_BSX, self.shard_tokens(positions.tokens_BS)

    def normalize_for_mixer(self, x_BSD: Tensor) -> tuple[Tensor, ...]:
        """The streams, the weights of the write after the mixer, and the normed input of it."""
        assert self.mixer_norm is not None
        y_BSD, weights_BSW = self.mixer_streams(x_BSD)
        return x_BSD, weights_BSW, self.mixer_norm(y_BSD)

    def normalize_for_ffn(self, x_BSD: Tensor, *tokens_BS: Tensor) -> tuple[Tensor, ...]:
        """The same of the feed-forward network, with the ids of the tokens before the norm."""
        assert self.ffn_norm is not None
        y_BSD, weights_BSW = self.ffn_streams(x_BSD)
        return x_BSD, weights_BSW, *tokens_BS, self.ffn_norm(y_BSD)

    def router_tokens(self, kept: Sequence[Tensor]) -> Sequence[Tensor]:
        return kept[2:]

    def add_output(self, x_BSD: Tensor, *others: Tensor) -> Tensor:
        return write_streams(x_BSD, others[0], others[-1])


def run_layers(
    layers: Iterable[nn.Module], x_BSD: Tensor, positions: Positions, features: Sequence[Tensor] = ()
) -> tuple[Tensor, NumberedStats]:
    """One layer after the other. `activation_memory.py` replaces this where layers are recomputed or offloaded.

    `features` are added behind the first layers, one a layer: what pictures bring to a decoder (deepstack).
    """
    router_stats: NumberedStats = []
    for layer, feature_BSD in zip_longest(layers, features):
        assert isinstance(layer, Block)
        x_BSD, stats = layer(x_BSD, positions)
        if feature_BSD is not None:
            x_BSD = x_BSD + feature_BSD
        if stats is not None:
            router_stats.append((layer.router_number, stats))
    return x_BSD, router_stats
