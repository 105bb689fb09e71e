"""A decoder: embedding, blocks of mixer and feed-forward part, norm, head, and multi-token prediction.

A family subclasses it and says which mixer and which feed-forward part a layer has.

Shapes: B batch, S sequence, D model dim, V vocabulary, L layers with experts, E experts.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threefold.engine.loss import IGNORE, cross_entropy_sum
from threefold.engine.mlp import Mlp
from threefold.engine.moe.balance import Balance
from threefold.engine.moe.layer import MoeLayer
from threefold.engine.moe.router import Router
from threefold.engine.norm import RMSNorm
from threefold.engine.options import Options
from threefold.engine.places import Places
from threefold.spec.model import Layer, ModelSpec


@dataclass(frozen=True)
class Output:
    """With labels the loss to differentiate, every weighted part in it; without, the logits.

    `aux`, all detached: `ce`, `mtp`, `aux`, `seq_aux`, `z` (as computed and, under `weighted/`, as added),
    `num_labels`, and of each layer with experts `load_LE`, `dropped_L`, `entropy_L`.
    """

    loss: Tensor | None
    logits: Tensor | None
    aux: dict[str, Tensor] = field(default_factory=dict)


class Block(nn.Module):
    """x + mixer(norm(x)), then x + ffn(norm(x))."""

    def __init__(self, mixer_norm: nn.Module, mixer: nn.Module, ffn_norm: nn.Module, ffn: nn.Module) -> None:
        super().__init__()
        self.mixer_norm, self.mixer, self.ffn_norm, self.ffn = mixer_norm, mixer, ffn_norm, ffn

    def forward(self, x_BSD: Tensor, places: Places) -> tuple[Tensor, Balance | None]:
        x_BSD = self.mix(x_BSD, places)
        y_BSD, balance = self.feed(self.ffn_norm(x_BSD))
        return x_BSD + y_BSD, balance

    def mix(self, x_BSD: Tensor, places: Places) -> Tensor:
        return x_BSD + self.mixer(self.mixer_norm(x_BSD), places)

    def feed(self, x_BSD: Tensor) -> tuple[Tensor, Balance | None]:
        return self.ffn(x_BSD) if isinstance(self.ffn, MoeLayer) else (self.ffn(x_BSD), None)


class MtpDepth(nn.Module):
    """One more token ahead: the next token's embedding joins the hidden state, through blocks of its own.

    It gets the hidden state behind the final norm and hands on its own behind its norm, as Megatron-LM and
    the inference engines that run DeepSeek-V3's checkpoint do.
    """

    def __init__(self, model: "Decoder") -> None:
        super().__init__()
        dim = model.spec.dim
        self.embed_norm, self.hidden_norm = model.make_norm(dim), model.make_norm(dim)
        self.join = nn.Linear(2 * dim, dim, bias=False)
        self.layers = nn.ModuleList(model.make_block(layer) for layer in model.spec.mtp_depth)
        self.norm = model.make_norm(dim)

    def forward(self, hidden_BSD: Tensor, embed_BSD: Tensor, places: Places) -> tuple[Tensor, list[Balance]]:
        x_BSD = self.join(torch.cat([self.embed_norm(embed_BSD), self.hidden_norm(hidden_BSD)], dim=-1))
        x_BSD, balances = run(self.layers, x_BSD, places)
        return self.norm(x_BSD), balances


class Decoder(nn.Module):
    init_std = 0.02

    def __init__(self, spec: ModelSpec, mtp: int, options: Options) -> None:
        super().__init__()
        self.spec, self.options, self.num_mtp = spec, options, mtp
        self.embed = nn.Embedding(spec.vocab, spec.dim)
        self.layers = nn.ModuleList(self.make_block(layer) for layer in spec.layers)
        self.norm = self.make_norm(spec.dim)
        self.head = None if spec.tied else nn.Linear(spec.dim, spec.vocab, bias=False)
        self.mtp = nn.ModuleList(MtpDepth(self) for _ in range(min(mtp, 1) if spec.mtp_shared else mtp))

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
        return Block(self.make_norm(dim), self.make_mixer(layer), self.make_norm(dim), self.make_ffn(layer))

    @property
    def head_weight(self) -> Tensor:
        return self.embed.weight if self.head is None else self.head.weight

    def routers(self) -> Iterator[Router]:
        """In the order of `aux["load_LE"]`: layers first, then MTP depths."""
        return (module for module in self.modules() if isinstance(module, Router))

    def forward(
        self,
        tokens_BS: Tensor,
        labels_BS: Tensor | None = None,
        documents_BS: Tensor | None = None,
        positions_BS: Tensor | None = None,
    ) -> Output:
        """`labels_BS` are the next tokens already: label i belongs to position i; IGNORE where there is none."""
        places = Places.of(tokens_BS, documents_BS, positions_BS)
        x_BSD, balances = run(self.layers, self.embed(tokens_BS), places)
        hidden_BSD = self.norm(x_BSD)
        if labels_BS is None:
            return Output(None, F.linear(hidden_BSD, self.head_weight), router_statistics(balances))
        loss, num_labels = self.mean_loss(hidden_BSD, labels_BS)
        parts = {"ce": loss}
        if self.num_mtp:
            parts["mtp"], more = self.mtp_loss(hidden_BSD, tokens_BS, labels_BS, places)
            balances += more
        total, aux = self.add_up(parts, balances)
        return Output(total, None, {**aux, "num_labels": num_labels})

    def mean_loss(self, hidden_BSD: Tensor, labels_BS: Tensor) -> tuple[Tensor, Tensor]:
        num_labels = (labels_BS != IGNORE).sum()
        chunk = self.options.loss_chunk
        summed = cross_entropy_sum(hidden_BSD.flatten(0, 1), self.head_weight, labels_BS.flatten(), chunk)
        return summed / num_labels.clamp(min=1), num_labels

    def mtp_loss(
        self, hidden_BSD: Tensor, tokens_BS: Tensor, labels_BS: Tensor, places: Places
    ) -> tuple[Tensor, list[Balance]]:
        """Mean over depths. Depth d at position i reads token i + d and predicts the label of i + d."""
        losses, balances = [], []
        for depth in range(1, self.num_mtp + 1):
            module = self.mtp[min(depth, len(self.mtp)) - 1]
            embed_BSD = self.embed(ahead(tokens_BS, depth, 0))
            hidden_BSD, more = module(hidden_BSD, embed_BSD, places)
            target_BS = ahead(labels_BS, depth, IGNORE)
            if places.documents_BS is not None:
                # Beyond the end of its document a token predicts nothing.
                other_BS = ahead(places.documents_BS, depth, -1) != places.documents_BS
                target_BS = target_BS.masked_fill(other_BS, IGNORE)
            losses.append(self.mean_loss(hidden_BSD, target_BS)[0])
            balances += more
        return torch.stack(losses).mean(), balances

    def add_up(self, parts: dict[str, Tensor], balances: list[Balance]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss to differentiate: cross entropy and all else by its weight. Router losses sum over layers."""
        weights = {"mtp": self.options.mtp_loss, **self.options.weights}
        if balances:
            parts |= {name: torch.stack([b.losses[name] for b in balances]).sum() for name in self.options.wanted}
        added = {name: weights[name] * part for name, part in parts.items() if name != "ce"}
        total = torch.stack([parts["ce"], *added.values()]).sum()
        aux = {name: part.detach() for name, part in parts.items()}
        aux |= {f"weighted/{name}": part.detach() for name, part in added.items()}
        return total, {**aux, **router_statistics(balances)}


def run(layers: Iterable[nn.Module], x_BSD: Tensor, places: Places) -> tuple[Tensor, list[Balance]]:
    balances = []
    for layer in layers:
        x_BSD, balance = layer(x_BSD, places)
        if balance is not None:
            balances.append(balance)
    return x_BSD, balances


def ahead(x_BS: Tensor, steps: int, fill: int) -> Tensor:
    """Each position sees what stands `steps` further on; beyond the end, `fill`."""
    return F.pad(x_BS[:, steps:], (0, min(steps, x_BS.shape[1])), value=fill)


def router_statistics(balances: list[Balance]) -> dict[str, Tensor]:
    if not balances:
        return {}
    return {
        "load_LE": torch.stack([b.load_E for b in balances]),
        "dropped_L": torch.stack([b.dropped for b in balances]),
        "entropy_L": torch.stack([b.entropy for b in balances]),
    }
