"""A decoder: embedding, blocks of mixer and feed-forward part, norm, head, and multi-token prediction.

A family subclasses it and says which mixer and which feed-forward part a layer has. A chunk of a pipeline is a decoder
with parts taken out (`models/chunk.py`): `advance` runs what is there.

Shapes: B batch, S sequence, D model dim, V vocabulary, L layers with experts, E experts.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threefold.engine.chunks import in_chunks
from threefold.engine.inputs import Cut, Inputs, Target, make_inputs
from threefold.engine.kept import inside_closed
from threefold.engine.loss import VocabPart, cross_entropy_sum
from threefold.engine.mlp import Mlp
from threefold.engine.moe.balance import Balance
from threefold.engine.moe.layer import MoeLayer
from threefold.engine.moe.router import Router
from threefold.engine.norm import RMSNorm
from threefold.engine.offload import Loads, away
from threefold.engine.options import Options
from threefold.engine.places import Places
from threefold.engine.recompute import again, remade
from threefold.engine.seams import Seam, stay
from threefold.spec.model import Layer, ModelSpec


@dataclass(frozen=True)
class Output:
    """With labels the loss to differentiate, every weighted part in it; without, the logits.

    `aux`, all detached: `ce`, `mtp`, `aux`, `seq_aux`, `z` (as computed and, under `weighted/`, as added),
    `num_labels`, and of each layer with experts `load_LE`, `dropped_L`, `entropy_L`. Where tokens are spread over
    ranks, each value is this rank's part of a sum.
    """

    loss: Tensor | None
    logits: Tensor | None
    aux: dict[str, Tensor] = field(default_factory=dict)


class Block(nn.Module):
    """x + mixer(norm(x)), then x + ffn(norm(x))."""

    row: int = -1  # of its router among all of the model's, in the statistics
    again: frozenset[str] = frozenset()  # modules that are recomputed
    ffn_chunk: int | None = None  # as in the options

    def __init__(self, mixer_norm: nn.Module, mixer: nn.Module, ffn_norm: nn.Module, ffn: nn.Module) -> None:
        super().__init__()
        self.mixer_norm, self.mixer, self.ffn_norm, self.ffn = mixer_norm, mixer, ffn_norm, ffn

    def forward(self, x_BSD: Tensor, places: Places, repeated: bool = False) -> tuple[Tensor, Balance | None]:
        """`repeated`: only x is kept. The feed-forward part is then made again chunk by chunk, not with the mixer."""
        if not repeated:
            return self.further(*self.mix(x_BSD, places))
        with remade(partial(self._to_feed, places), x_BSD) as (x_BSD, y_BSD):
            y_BSD, balance = self.feed(y_BSD, repeated=True)
        return x_BSD + y_BSD, balance

    def _to_feed(self, places: Places, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        with self.join(*self.mix(x_BSD, places)) as both:
            return both

    def further(self, x_BSD: Tensor, *added_BSD: Tensor) -> tuple[Tensor, Balance | None]:
        """All behind the mixer. `graphs/` takes the place of this and of `mix`."""
        with self.join(x_BSD, *added_BSD) as (x_BSD, y_BSD):
            y_BSD, balance = self.feed(y_BSD)
        return x_BSD + y_BSD, balance

    def hold(self, work: Callable[..., Any], *given: Tensor) -> Any:
        """`work` that uses parameters of this module without calling it: FSDP gathers them around this method."""
        return work(*given)

    def mix(self, x_BSD: Tensor, places: Places) -> tuple[Tensor, ...]:
        """-> (the residual stream, what is still to be added to it: the next norm does that as it reads)."""
        with away("attn_norm"):
            normed = self._normed(self.mixer_norm, x_BSD)
        with normed as (x_BSD, y_BSD):
            return x_BSD, self.mixer(y_BSD, places)

    def join(self, x_BSD: Tensor, *added_BSD: Tensor) -> AbstractContextManager[tuple[Tensor, Tensor]]:
        """Their sum, and what `feed` takes; where norms are recomputed, what is kept of that inside takes no memory."""
        with away("mlp_norm"):
            return self._normed(self.ffn_norm, x_BSD, *added_BSD)

    def _normed(self, norm: nn.Module, x: Tensor, *added: Tensor) -> AbstractContextManager[tuple[Tensor, Tensor]]:
        if "layernorm" not in self.again:
            return nullcontext(norm(x, *added, stream=True))
        for each in added:  # not in the norm, which would keep both
            x = x + each
        return remade(partial(norm, stream=True), x)

    def feed(self, x_BSD: Tensor, repeated: bool = False) -> tuple[Tensor, Balance | None]:
        name, cut = "moe" if isinstance(self.ffn, MoeLayer) else "mlp", self.is_cut(x_BSD)
        if not cut:
            made = again(self.ffn, x_BSD, on=repeated or name in self.again)
        elif isinstance(self.ffn, MoeLayer):
            made = self.ffn(x_BSD, repeated)
        elif repeated or name in self.again or inside_closed():
            assert isinstance(self.ffn, Mlp)
            size = self.ffn.chunk(x_BSD, self.ffn_chunk)
            made = in_chunks(self.ffn, size, x_BSD.flatten(0, 1), repeated=True).view_as(x_BSD)
        else:
            made = self.ffn(x_BSD)
        return made if isinstance(self.ffn, MoeLayer) else (made, None)

    def is_cut(self, x_BSD: Tensor) -> bool:
        """Whether so many tokens go through the feed-forward part in chunks."""
        if isinstance(self.ffn, MoeLayer):
            return self.ffn.is_cut(x_BSD)
        assert isinstance(self.ffn, Mlp)
        return self.ffn.chunk(x_BSD, self.ffn_chunk) < x_BSD.shape[:-1].numel()


class MtpDepth(nn.Module):
    """One more token ahead: the next token's embedding joins the hidden state, through blocks of its own.

    It gets the hidden state behind the final norm and hands on its own behind its norm, as Megatron-LM and
    the inference engines that run DeepSeek-V3's checkpoint do.
    """

    def __init__(self, model: "Decoder") -> None:
        super().__init__()
        dim, (self.options,) = model.spec.dim, model.options.spread([0])  # no layer of the model
        self.embed_norm, self.hidden_norm = model.make_norm(dim), model.make_norm(dim)
        self.join = nn.Linear(2 * dim, dim, bias=False)
        self.layers = nn.ModuleList(model.make_block(layer) for layer in model.spec.mtp_depth)
        self.norm = model.make_norm(dim)

    def forward(self, hidden_BSD: Tensor, embed_BSD: Tensor, places: Places) -> tuple[Tensor, "Balances"]:
        x_BSD, balances = run(self.layers, self.enter(hidden_BSD, embed_BSD), places, self.options)
        return self.norm(x_BSD), balances

    def enter(self, hidden_BSD: Tensor, embed_BSD: Tensor) -> Tensor:
        joined: Tensor = self.join(torch.cat([self.embed_norm(embed_BSD), self.hidden_norm(hidden_BSD)], dim=-1))
        return joined


class Decoder(nn.Module):
    init_std = 0.02

    def __init__(self, spec: ModelSpec, mtp: int, options: Options) -> None:
        super().__init__()
        self.spec, self.options = spec, options
        self.embed: nn.Module | None = nn.Embedding(spec.vocab, spec.dim)
        self.layers = nn.ModuleDict({str(n): self.make_block(layer) for n, layer in enumerate(spec.layers)})
        self.norm: nn.Module | None = self.make_norm(spec.dim)
        self.head = None if spec.tied else nn.Linear(spec.dim, spec.vocab, bias=False)
        sets = min(mtp, 1) if spec.mtp_shared else mtp
        self.mtp = nn.ModuleDict({str(n): MtpDepth(self) for n in range(sets)})
        self.num_mtp, self.depths, self.has_loss = mtp, range(mtp), True
        self.num_routers = 0
        for block in self.expert_blocks():
            block.row, self.num_routers = self.num_routers, self.num_routers + 1
        # Set by shard/: this rank's share of a sequence, and of the vocabulary.
        self.cut: Cut = stay
        self.enter_loss: Seam = stay
        self.vocab: VocabPart | None = None

    def make_mixer(self, layer: Layer) -> nn.Module:
        raise NotImplementedError

    def make_ffn(self, layer: Layer) -> nn.Module:
        if layer.ffn == "dense":
            return Mlp(self.spec.dim, self.spec.dense_dim)
        assert self.spec.moe is not None
        return MoeLayer(self.spec.moe, self.spec.dim, self.spec.activation, self.options)

    def make_norm(self, dim: int) -> nn.Module:
        return RMSNorm(dim, self.spec.norm_eps)

    def make_block(self, layer: Layer) -> Block:
        dim = self.spec.dim
        block = Block(self.make_norm(dim), self.make_mixer(layer), self.make_norm(dim), self.make_ffn(layer))
        block.again = block.mixer.again = self.options.again  # type: ignore[assignment]
        block.ffn_chunk = self.options.ffn_chunk
        return block

    def hold(self, work: Callable[..., Any], *given: Tensor) -> Any:
        """As `Block.hold`."""
        return work(*given)

    @property
    def head_weight(self) -> Tensor:
        owner = self.embed if self.head is None else self.head
        assert owner is not None
        return owner.get_parameter("weight")

    def blocks(self) -> Iterator[Block]:
        """Layers first, then those of the MTP depths."""
        return (module for module in self.modules() if isinstance(module, Block))

    def expert_blocks(self) -> Iterator[Block]:
        return (block for block in self.blocks() if isinstance(block.ffn, MoeLayer))

    def routers(self) -> Iterator[Router]:
        """Those held here, in the order of `rows`."""
        return (block.ffn.router for block in self.expert_blocks() if isinstance(block.ffn, MoeLayer))

    @property
    def rows(self) -> list[int]:
        """Where the routers held here stand in `aux["load_LE"]`."""
        return [block.row for block in self.expert_blocks()]

    def forward(
        self,
        tokens_BS: Tensor,
        labels_BS: Tensor | None = None,
        documents_BS: Tensor | None = None,
        positions_BS: Tensor | None = None,
    ) -> Output:
        """The whole model. `labels_BS` are the next tokens already; IGNORE where there is none."""
        inputs = make_inputs(tokens_BS, labels_BS, documents_BS, positions_BS, self.num_mtp, self.cut)
        states, balances = self.advance([], inputs)
        if labels_BS is None:
            return Output(None, F.linear(states[0], self.head_weight), self.statistics(balances))
        return self.conclude(states, balances, inputs)

    def advance(self, states: list[Tensor], inputs: Inputs) -> tuple[list[Tensor], "Balances"]:
        """From the hidden states handed in (none at the start) to those handed on: the main one, then each depth's."""
        if not states:
            assert self.embed is not None
            states = [self.embed(inputs.tokens_BS)]
        hidden_BSD, balances = run(self.layers.values(), states[-1], inputs.places, self.options)
        if self.norm is not None:
            hidden_BSD = self.norm(hidden_BSD)
        states = [*states[:-1], hidden_BSD]
        for depth in self.depths if inputs.targets else ():
            assert self.embed is not None
            module = self.mtp[str(min(depth, self.num_mtp_sets - 1))]
            embed_BSD = self.embed(inputs.targets[depth + 1].tokens_BS)
            hidden_BSD, more = module(hidden_BSD, embed_BSD, inputs.places)
            states.append(hidden_BSD)
            balances += more
        return states, balances

    @property
    def num_mtp_sets(self) -> int:
        return min(self.num_mtp, 1) if self.spec.mtp_shared else self.num_mtp

    def conclude(self, states: list[Tensor], balances: "Balances", inputs: Inputs) -> Output:
        """The loss of the next token and, as a mean over depths, of those further ahead."""
        main, *depths = (self.mean_loss(state, target) for state, target in zip(states, inputs.targets, strict=True))
        parts = {"ce": main}
        if depths:
            parts["mtp"] = torch.stack(depths).mean()
        total, aux = self.add_up(parts, balances)
        assert total is not None
        return Output(total, None, {**aux, "num_labels": inputs.targets[0].num_labels})

    def mean_loss(self, hidden_BSD: Tensor, target: Target) -> Tensor:
        x_TD = self.enter_loss(hidden_BSD).flatten(0, 1)
        chunk = self.options.loss_chunk
        summed = cross_entropy_sum(x_TD, self.head_weight, target.labels_BS.flatten(), chunk, self.vocab)
        return summed / target.num_labels.clamp(min=1)

    def add_up(self, parts: dict[str, Tensor], balances: "Balances") -> tuple[Tensor | None, dict[str, Tensor]]:
        """The loss to differentiate: cross entropy and all else by its weight. Router losses sum over layers."""
        weights = {"mtp": self.options.mtp_loss, **self.options.weights}
        if balances:
            losses = [balance.losses for _, balance in balances]
            parts |= {name: torch.stack([loss[name] for loss in losses]).sum() for name in self.options.wanted}
        added = {name: weights[name] * part for name, part in parts.items() if name != "ce"}
        every = [*([parts["ce"]] if "ce" in parts else []), *added.values()]
        aux = {name: part.detach() for name, part in parts.items()}
        aux |= {f"weighted/{name}": part.detach() for name, part in added.items()}
        return torch.stack(every).sum() if every else None, {**aux, **self.statistics(balances)}

    def statistics(self, balances: "Balances") -> dict[str, Tensor]:
        """Of every router of the model, also where it is not held here: then zeros."""
        if not self.num_routers or not balances:
            return {}
        rows, each = [row for row, _ in balances], [balance for _, balance in balances]
        named = {
            "load_LE": torch.stack([balance.load_E for balance in each]),
            "dropped_L": torch.stack([balance.dropped for balance in each]),
            "entropy_L": torch.stack([balance.entropy for balance in each]),
        }
        if rows == list(range(self.num_routers)):
            return named
        at = torch.tensor(rows, device=each[0].load_E.device)
        return {
            name: value.new_zeros(self.num_routers, *value.shape[1:]).index_add_(0, at, value)
            for name, value in named.items()
        }


Balances = list[tuple[int, Balance]]  # with the row of each router


def run(layers: Iterable[nn.Module], x_BSD: Tensor, places: Places, options: Options) -> tuple[Tensor, Balances]:
    """Layer by layer, or in units of layers that are recomputed together."""
    balances: Balances = []
    loads = Loads(options.activation_offload, options.activation_offload_layers)
    for unit, repeated in options.units(list(layers)):
        apart = repeated and len(unit) == 1 and isinstance(unit[0], Block) and unit[0].is_cut(x_BSD)
        with loads.layer(unit):
            x_BSD, more = again(partial(_through, unit, places, apart), x_BSD, on=repeated and not apart)
        balances += more
    return x_BSD, balances


def _through(layers: Iterable[nn.Module], places: Places, repeated: bool, x_BSD: Tensor) -> tuple[Tensor, Balances]:
    balances: Balances = []
    for layer in layers:
        assert isinstance(layer, Block)
        x_BSD, balance = layer(x_BSD, places, repeated) if repeated else layer(x_BSD, places)
        if balance is not None:
            balances.append((layer.row, balance))
    return x_BSD, balances
