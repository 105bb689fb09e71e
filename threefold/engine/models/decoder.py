"""The decoder: embedding, blocks, norm, head, and multi-token prediction (MTP).

The blocks are in `models/block.py`. A pipeline chunk is a decoder without the parts that other chunks hold
(`models/pipeline_chunk.py`).

Shapes: B batch, S sequence, D model dim, V vocabulary, L layers with experts, E experts.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threefold.engine.batch import Images
from threefold.engine.context import override
from threefold.engine.dist.mesh import TRIVIAL_GROUP
from threefold.engine.layers.cross_entropy import VocabShard, cross_entropy_sum
from threefold.engine.layers.embedding import TokenEmbedding
from threefold.engine.layers.head_gemms import HeadPrecision
from threefold.engine.layers.input_linears import InputHook, identity
from threefold.engine.layers.mlp import Mlp
from threefold.engine.layers.norm import LayerNorm, PlainRMSNorm, RMSNorm
from threefold.engine.layers.positions import Positions
from threefold.engine.layers.streams import StreamNorm, repeat_streams
from threefold.engine.model_options import Options
from threefold.engine.models.block import Block, NumberedStats, StreamBlock, run_layers
from threefold.engine.models.head import cap_logits, head_input, head_matrix
from threefold.engine.models.inputs import Inputs, ShardSequence, Target, make_inputs
from threefold.engine.models.mixers import make_mixer
from threefold.engine.moe.layer import MoeLayer
from threefold.engine.moe.router import Router
from threefold.engine.sum_dtype import fp32_or_wider
from threefold.engine.vision import ImageFeatures, Projector, VisionEncoder, blank_images, stands_for_image
from threefold.spec.families import FAMILIES
from threefold.spec.model import Layer, ModelSpec


@dataclass(frozen=True)
class Output:
    """With labels the loss to differentiate, which holds every weighted part; without labels the logits.

    `aux`, all detached: `ce`, `mtp`, `aux`, `seq_aux`, `z` (as computed and, under `weighted/`, as added),
    `num_labels`, and for each layer with experts `load_LE`, `dropped_L`, `entropy_L`. Where tokens are spread over
    ranks, each value is this rank's part of a sum.
    """

    loss: Tensor | None
    logits: Tensor | None
    aux: dict[str, Tensor] = field(default_factory=dict)


# Encodes a part of the pictures with a function on this rank, and returns the features of all.
SharePictures = Callable[[Callable[[Images], list[Tensor]], Images], list[Tensor]]


class MtpDepth(nn.Module):
    """One more token ahead: the next token's embedding joins the hidden state, through blocks of its own.

    It gets the hidden state behind the final norm and hands on its own behind its norm, as Megatron-LM and
    the inference engines that run DeepSeek-V3's checkpoint do.
    """

    run_layers = staticmethod(run_layers)

    def __init__(self, model: "Decoder") -> None:
        super().__init__()
        dim = model.spec.dim
        self.embed_norm, self.hidden_norm = model.make_norm(dim), model.make_norm(dim)
        self.join = nn.Linear(2 * dim, dim, bias=False)
        self.layers = nn.ModuleList(model.make_block(layer) for layer in model.spec.mtp_depth)
        self.norm = model.make_norm(dim)

    def forward(self, hidden_BSD: Tensor, embed_BSD: Tensor, positions: Positions) -> tuple[Tensor, NumberedStats]:
        x_BSD, router_stats = self.run_layers(self.layers, self.join_embedding(hidden_BSD, embed_BSD), positions)
        return self.norm(x_BSD), router_stats

    def join_embedding(self, hidden_BSD: Tensor, embed_BSD: Tensor) -> Tensor:
        joined: Tensor = self.join(torch.cat([self.embed_norm(embed_BSD), self.hidden_norm(hidden_BSD)], dim=-1))
        return joined


class Decoder(nn.Module):
    run_layers = staticmethod(run_layers)
    head_precision: HeadPrecision | None = None  # how the loss quantizes the head's GEMMs

    def __init__(self, spec: ModelSpec, mtp: int, options: Options) -> None:
        super().__init__()
        self.spec, self.options = spec, options
        # Without first values, for which torch would import its compiler on the meta device.
        self.embed: nn.Module | None = TokenEmbedding(spec.vocab, spec.dim, _weight=torch.empty(spec.vocab, spec.dim))
        self.vision: VisionEncoder | None = None
        self.projector: Projector | None = None
        if spec.vision is not None:
            self.vision = VisionEncoder(spec.vision, options.vision_recompute)
            self.projector = Projector(spec.vision, spec.dim, options.vision_recompute)
        self.num_features = 0  # deepstack features that a pipeline chunk gets from the chunk before
        self.num_ahead, self.later_depths = 0, range(0)  # and those for MTP depths; depths that later chunks hold
        self.layers = nn.ModuleDict({str(n): self.make_block(layer) for n, layer in enumerate(spec.layers)})
        self.norm: nn.Module | None = self.make_norm(spec.dim)
        if spec.streams is not None:
            self.norm = StreamNorm(spec.streams, spec.dim, spec.norm_eps)
        self.head = None if spec.tied else nn.Linear(spec.dim, spec.vocab, bias=spec.head_bias)
        sets = min(mtp, 1) if spec.mtp_shared else mtp
        self.mtp = nn.ModuleDict({str(n): MtpDepth(self) for n in range(sets)})
        self.num_mtp, self.depths, self.has_loss = mtp, range(mtp), True
        self.num_routers = 0
        for block in self.expert_blocks():
            block.router_number, self.num_routers = self.num_routers, self.num_routers + 1
        # shard/ sets these where a sequence or the vocabulary is sharded over ranks.
        self.shard_sequence: ShardSequence = identity
        self.use_cp_degree: Callable[[int | None], None] = lambda degree: None  # before each microbatch
        self.gather_loss_input: InputHook = identity
        self.shard_hidden: InputHook = identity  # takes the part of a context shard that tensor parallelism leaves here
        self.share_pictures: SharePictures | None = None
        # Labels of each MTP depth over those of the next token, in a whole step; None: each microbatch has its own.
        self.depth_label_ratios: Tensor | None = None
        # The gradient that the next loss will get (the label share of the microbatch), with which the loss makes its
        # gradients. The runner of a microbatch sets it; None where it is not known.
        self.expected_loss_grad: float | Tensor | None = None
        self.vocab_shard: VocabShard | None = None
        self.all_ranks = TRIVIAL_GROUP  # that take part in the collectives of a microbatch

    def make_norm(self, dim: int) -> nn.Module:
        if self.spec.norm == "layer":
            return LayerNorm(dim, self.spec.norm_eps)
        return RMSNorm(dim, self.spec.norm_eps, FAMILIES[self.spec.family].zero_centered_norms)

    def make_block(self, layer: Layer) -> Block:
        ffn = None if layer.ffn == "none" else self._make_ffn(layer)
        parts = partial(self.make_norm, self.spec.dim), make_mixer(self.spec, layer, self.make_norm), ffn
        block = Block(*parts) if self.spec.streams is None else StreamBlock(*parts, self.spec)
        block.output_scale = torch.ones(1) if self.spec.layer_scale else None
        if isinstance(ffn, MoeLayer) and ffn.routed_scale is not None:
            block.ffn_norm = PlainRMSNorm(self.spec.dim, self.spec.norm_eps)
        return block

    def _make_ffn(self, layer: Layer) -> nn.Module:
        if layer.ffn == "dense":
            return Mlp(self.spec.dim, self.spec.dense_dim, self.spec.activation)
        assert self.spec.moe is not None
        moe = MoeLayer(self.spec.moe, self.spec.dim, self.spec.activation, self.options, self.make_norm)
        if layer.hashed:
            moe.router.look_up_tokens(self.spec.vocab)
        return moe

    def run_with_parameters(self, function: Callable[..., Any], *inputs: Tensor) -> Any:
        """Run a function that uses parameters of this chunk without calling it, as `Block.run_with_parameters` does."""
        return function(*inputs)

    @property
    def head_weight(self) -> Tensor:
        owner = self.embed if self.head is None else self.head
        assert owner is not None
        return head_matrix(owner, self.spec)

    def blocks(self) -> Iterator[Block]:
        """The layers' blocks first, then those of the MTP depths."""
        return (module for module in self.modules() if isinstance(module, Block))

    def expert_blocks(self) -> Iterator[Block]:
        return (block for block in self.blocks() if isinstance(block.ffn, MoeLayer))

    def routers(self) -> Iterator[Router]:
        """The routers held here, in the order of `router_numbers`."""
        return (block.ffn.router for block in self.expert_blocks() if isinstance(block.ffn, MoeLayer))

    @property
    def router_numbers(self) -> list[int]:
        """The rows of `aux["load_LE"]` that belong to the routers held here."""
        return [block.router_number for block in self.expert_blocks()]

    def forward(
        self,
        tokens_BS: Tensor,
        labels_BS: Tensor | None = None,
        documents_BS: Tensor | None = None,
        positions_BS: Tensor | None = None,
        images: Images | None = None,
        positions_3BS: Tensor | None = None,
        num_useful_B: Tensor | None = None,
    ) -> Output:
        """The whole model. `labels_BS` are the next tokens already; IGNORE where there is none."""
        inputs = make_inputs(
            *(tokens_BS, labels_BS, documents_BS, positions_BS, self.num_mtp, self.shard_sequence),
            images=images,
            positions_3BS=positions_3BS,
            num_useful_B=num_useful_B,
            shard_hidden=self.shard_hidden,
        )
        hidden, router_stats = self.forward_chunk([], inputs)
        if labels_BS is None:
            return Output(None, self.compute_logits(hidden[0]), self.router_statistics(router_stats))
        return self.compute_loss(hidden, router_stats, inputs)

    def forward_chunk(self, hidden: list[Tensor], inputs: Inputs) -> tuple[list[Tensor], NumberedStats]:
        """Run the layers held here, and the MTP depths.

        `hidden` are the states of the chunk before, none for the first chunk; the result are the states for the next
        one: the features of pictures that its layers need, those that its MTP depths need, the main state, then one for
        each MTP depth.
        """
        with override("padding", inputs.padding):
            return self._run_chunk(hidden, inputs)

    def _run_chunk(self, hidden: list[Tensor], inputs: Inputs) -> tuple[list[Tensor], NumberedStats]:
        num_features, pictures = self.num_features, None
        placed = hidden[num_features : num_features + len(self.depths)] if self.num_ahead else []
        if not hidden:
            pictures = self.encode_pictures(inputs)
            features = pictures.dense_deepstack() if pictures else []
            ahead = pictures.dense_ahead(self.later_depths) if pictures else []
            hidden, num_features = [*features, *ahead, self.embed_tokens(inputs, pictures)], len(features)
        hidden = [*hidden[:num_features], *hidden[num_features + len(placed) :]]
        used = min(num_features, len(self.layers))
        layers, features = self.layers.values(), hidden[:used]
        hidden_BSD, router_stats = self.run_layers(layers, hidden[-1], inputs.positions, features)
        del features
        if self.norm is not None:
            hidden_BSD = self.norm(hidden_BSD)
        hidden = [*hidden[used:-1], hidden_BSD]
        for depth, placed_BSD in zip_longest(self.depths, placed) if inputs.targets else ():
            module = self.mtp[str(min(depth, self.num_mtp_sets - 1))]
            embed_BSD = self.embed_tokens(inputs, pictures, depth + 1, placed_BSD)
            hidden_BSD, more = module(hidden_BSD, embed_BSD, inputs.positions)
            hidden.append(hidden_BSD)
            router_stats += more
        return hidden, router_stats

    def embed_tokens(
        self, inputs: Inputs, pictures: ImageFeatures | None, ahead: int = 0, placed_BSD: Tensor | None = None
    ) -> Tensor:
        """The embedded tokens, or those `ahead` later, with the features of pictures in their place: `placed_BSD` has
        them where an earlier pipeline chunk encoded the pictures."""
        assert self.embed is not None
        tokens_BS = inputs.targets[ahead].tokens_BS if ahead else inputs.tokens_BS
        embed_BSD: Tensor = self.embed(tokens_BS)
        embed_BSD = embed_BSD if self.spec.embed_scale == 1.0 else embed_BSD * self.spec.embed_scale
        embed_BSD = repeat_streams(embed_BSD, self.spec.streams)
        if placed_BSD is not None and self.spec.vision is not None:
            is_picture_BS1 = stands_for_image(tokens_BS, self.spec.vision.tokens)[..., None]
            return torch.where(self.shard_hidden(is_picture_BS1), placed_BSD, embed_BSD)
        return embed_BSD if pictures is None else pictures.merge(embed_BSD, ahead)

    def encode_pictures(self, inputs: Inputs) -> ImageFeatures | None:
        """The features of the microbatch's pictures; None for a text model.

        Without pictures a blank one is encoded, so that all ranks take part in the collectives of the parameters.
        """
        if self.vision is None or self.projector is None:
            return None
        device = inputs.tokens_BS.device
        images = inputs.images or blank_images(self.vision.spec, device)
        share = self.share_pictures if inputs.images is not None else None
        main_VD, *deepstack = self._encode(images) if share is None else share(self._encode, images)
        deepstack = deepstack[: self.spec.num_layers]  # a model that was cut may have fewer layers than features
        return ImageFeatures(main_VD, deepstack, images.token_index_V, inputs.shape, self._shard_placed)

    def _encode(self, images: Images) -> list[Tensor]:
        assert self.vision is not None
        assert self.projector is not None
        features: list[Tensor] = self.projector(self.vision(images))
        return features

    def _shard_placed(self, x_BSD: Tensor) -> Tensor:
        return self.shard_hidden(self.shard_sequence(x_BSD))

    @property
    def num_mtp_sets(self) -> int:
        return min(self.num_mtp, 1) if self.spec.mtp_shared else self.num_mtp

    def compute_loss(self, hidden: list[Tensor], router_stats: NumberedStats, inputs: Inputs) -> Output:
        """The loss of the next token and, as a mean over depths, of those further ahead."""
        targets = inputs.targets_of_step(self.depth_label_ratios)
        weights = [1.0, *(self.options.mtp_loss / (len(targets) - 1) for _ in targets[1:])]
        main, *depths = (self.mean_loss(*each) for each in zip(hidden, targets, weights, strict=True))
        parts = {"ce": main, **({"mtp": torch.stack(depths).mean()} if depths else {})}
        total, aux = self.sum_losses(parts, router_stats)
        assert total is not None
        return Output(total, None, {**aux, "num_labels": inputs.targets[0].num_labels})

    def compute_logits(self, hidden_BSD: Tensor) -> Tensor:
        """The logits over the whole vocabulary, behind the final norm."""
        return cap_logits(F.linear(head_input(hidden_BSD, self.spec), self.head_weight), self.spec)

    def mean_loss(self, hidden_BSD: Tensor, target: Target, weight: float = 1.0) -> Tensor:
        """The mean over the labels of a target. `weight` is what it is multiplied by in the loss of the model."""
        x_TD = head_input(self.gather_loss_input(hidden_BSD), self.spec).flatten(0, 1)
        options = self.options.loss_chunk, self.vocab_shard, self.spec.logit_softcap, self.head_precision
        divisor = target.num_labels.masked_fill(target.num_labels == 0, 1).to(fp32_or_wider(x_TD.dtype))
        grad = self.expected_loss_grad
        if grad is not None:
            grad = (grad.to(divisor.dtype) if isinstance(grad, Tensor) else grad) * weight / divisor
        summed = cross_entropy_sum(x_TD, self.head_weight, target.labels_BS.flatten(), *options, grad)
        return summed / divisor

    def sum_losses(
        self, parts: dict[str, Tensor], router_stats: NumberedStats
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """The loss to differentiate: cross entropy plus the other losses by weight. Router losses sum over layers."""
        weights = {"mtp": self.options.mtp_loss, **self.options.router_loss_weights}
        if router_stats:
            losses = [stats.losses for _, stats in router_stats]
            parts |= {name: torch.stack([loss[name] for loss in losses]).sum() for name in self.options.router_losses}
        added = {name: weights[name] * part for name, part in parts.items() if name != "ce"}
        every = [*([parts["ce"]] if "ce" in parts else []), *added.values()]
        aux = {name: part.detach() for name, part in parts.items()}
        aux |= {f"weighted/{name}": part.detach() for name, part in added.items()}
        return torch.stack(every).sum() if every else None, {**aux, **self.router_statistics(router_stats)}

    def router_statistics(self, router_stats: NumberedStats) -> dict[str, Tensor]:
        """Statistics of every router of the model; zeros for those that other chunks hold."""
        if not self.num_routers or not router_stats:
            return {}
        fields = {"load_LE": "load_E", "dropped_L": "num_dropped", "entropy_L": "entropy"}
        return {
            name: self._stack_by_router([(number, getattr(stats, field)) for number, stats in router_stats])
            for name, field in fields.items()
        }

    def _stack_by_router(self, numbered: list[tuple[int, Tensor]]) -> Tensor:
        """Values by the number of their router. An index tensor would be shorter, but the host would wait for the
        device to have it."""
        by_number: dict[int, Tensor] = {}
        for number, value in numbered:
            by_number[number] = by_number[number] + value if number in by_number else value
        if missing := set(range(self.num_routers)) - by_number.keys():
            by_number |= dict.fromkeys(missing, torch.zeros_like(numbered[0][1]))
        return torch.stack([by_number[number] for number in range(self.num_routers)])
