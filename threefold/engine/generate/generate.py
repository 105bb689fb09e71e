"""Continues prompts token by token with a cache, until each has ended. `sample.py` calls it.

A `CachedDecoder` reads every token once: prompts first, then one token of each row at a time. A batch may hold prompts
of different length; each row counts its own positions. The time of a token does not grow with the text before it, but
for attention to the cache. The next token is the likeliest one, or a draw with temperature, top-k and top-p.

Shapes: B rows, S tokens, D model dim, V vocabulary.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from threefold.engine.generate.cached_mixers import CachedMixer, cached_mixer
from threefold.engine.generate.image_prompt import ImagePrompt, join_prompts
from threefold.engine.layers.positions import Positions
from threefold.engine.layers.streams import repeat_streams
from threefold.engine.models.block import Block
from threefold.engine.models.decoder import Decoder
from threefold.engine.models.inputs import Inputs


class CachedDecoder:
    """The whole model on one rank with a cache for each layer. MTP depths are not run."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.device = model.head_weight.device
        self.blocks = [block for block in model.layers.values() if isinstance(block, Block)]
        with torch.no_grad():
            self.mixers = [None if block.mixer is None else cached_mixer(block.mixer) for block in self.blocks]
        self.lengths: list[int] = []  # tokens of each row so far
        self.offsets: list[int] | None = None  # of a row's next position from its length, where images came before

    @torch.no_grad()
    def prefill(
        self, prompts: Sequence[Sequence[int]], image_prompts: Sequence[ImagePrompt | None] | None = None
    ) -> Tensor:
        """Read the prompts, none of them empty. Returns the logits after the last token of each, (B, V).

        `images` are those of each prompt, whose tokens are in `prompts` too.
        """
        self.lengths = [len(prompt) for prompt in prompts]
        assert min(self.lengths) > 0
        tokens_BS = torch.zeros(len(prompts), max(self.lengths), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            tokens_BS[row, : len(prompt)] = torch.tensor(prompt)
        tokens_BS = tokens_BS.to(self.device)
        positions = Positions.from_tokens(tokens_BS)
        positions.tokens_BS = tokens_BS
        x_BSD, features = self._embed(tokens_BS), list[Tensor]()
        if image_prompts is not None and any(image_prompts):
            seen = join_prompts(image_prompts, self.lengths)
            positions.axes_3BS, self.offsets = seen.axes_3BS.to(self.device), seen.offsets
            images = seen.images and seen.images._replace(token_index_V=seen.images.token_index_V.to(self.device))
            shape = (len(prompts), max(self.lengths))
            image_features = self.model.encode_pictures(Inputs(tokens_BS, positions, (), images, shape))
            assert image_features is not None
            x_BSD, features = image_features.merge(x_BSD), image_features.dense_deepstack()
        x_BSD = self._run_layers(
            x_BSD, positions, lambda mixer, y_BSD: mixer.prefill(y_BSD, positions, self.lengths), features
        )
        last_B = torch.tensor(self.lengths, device=self.device) - 1
        return self._logits(x_BSD[torch.arange(len(prompts), device=self.device), last_B])

    @torch.no_grad()
    def step(self, tokens: Sequence[int]) -> Tensor:
        """Read one more token of each row. Returns the logits after it, (B, V)."""
        tokens_B1 = torch.tensor(tokens, device=self.device)[:, None]
        positions = Positions(torch.tensor(self.lengths, device=self.device)[:, None], tokens_BS=tokens_B1)
        if self.offsets is not None:
            next_B1 = positions.positions_BS + torch.tensor(self.offsets, device=self.device)[:, None]
            positions.axes_3BS = next_B1.expand(3, -1, -1)
        longest = max(self.lengths)
        x_BSD = self._embed(tokens_B1)
        x_BSD = self._run_layers(x_BSD, positions, lambda mixer, y_BSD: mixer.step(y_BSD, positions, longest))
        self.lengths = [length + 1 for length in self.lengths]
        return self._logits(x_BSD[:, 0])

    def _run_layers(
        self,
        x_BSD: Tensor,
        positions: Positions,
        mix: Callable[[CachedMixer, Tensor], Tensor],
        features: Sequence[Tensor] = (),
    ) -> Tensor:
        """One layer after the other. `features` of images are added after the first ones, one a layer."""
        for block, mixer, feature_BSD in zip_longest(self.blocks, self.mixers, features):
            added: list[Tensor] = []
            if mixer is not None:
                *kept, y_BSD = block.normalize_for_mixer(x_BSD)
                x_BSD, *added = block.add_mixed(kept, mix(mixer, y_BSD), positions)
            x_BSD, _ = block.feed_forward(x_BSD, *added)
            x_BSD = x_BSD if feature_BSD is None else x_BSD + feature_BSD
        return x_BSD

    def _embed(self, tokens_BS: Tensor) -> Tensor:
        assert self.model.embed is not None
        x_BSD: Tensor = self.model.embed(tokens_BS)
        return repeat_streams(x_BSD * self.model.spec.embed_scale, self.model.spec.streams)

    def _logits(self, x_BD: Tensor) -> Tensor:
        assert self.model.norm is not None
        return self.model.compute_logits(self.model.norm(x_BD))


@dataclass(frozen=True)
class Sampling:
    """Settings of how tokens are drawn. `temperature` 0 takes the likeliest; `top_k` 0 and `top_p` 1 leave nothing
    out."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


class TokenChooser:
    """Draws for each row from a generator of its own, so that a row does not depend on what else is in the batch."""

    def __init__(self, sampling: Sampling, num_rows: int) -> None:
        self.sampling = sampling
        self.draws = [torch.Generator(device="cpu").manual_seed(sampling.seed + row) for row in range(num_rows)]

    def choose(self, logits_BV: Tensor) -> list[int]:
        logits_BV = logits_BV.float().cpu()
        if self.sampling.temperature < torch.finfo(torch.float32).tiny:
            return [int(token) for token in logits_BV.argmax(dim=-1)]
        probability_BV = probabilities(logits_BV, self.sampling)
        pairs = zip(probability_BV, self.draws, strict=True)
        return [int(torch.multinomial(row_V, 1, generator=draw)) for row_V, draw in pairs]


def probabilities(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """The distribution that is drawn from: top-k of the logits first, then top-p of what is left."""
    below_BV = logits_BV - logits_BV.max(dim=-1, keepdim=True).values  # keeps a low temperature from making infinities
    probability_BV = (below_BV / sampling.temperature).softmax(dim=-1)
    if 0 < sampling.top_k < logits_BV.shape[-1]:
        kept_BK = probability_BV.topk(sampling.top_k, dim=-1)
        probability_BV = torch.zeros_like(probability_BV).scatter(-1, kept_BK.indices, kept_BK.values)
        probability_BV = probability_BV / probability_BV.sum(dim=-1, keepdim=True)
    if sampling.top_p < 1:
        ordered = probability_BV.sort(dim=-1, descending=True)
        before_BV = ordered.values.cumsum(dim=-1) - ordered.values  # of the tokens that are likelier
        kept_BV = ordered.values.masked_fill(before_BV >= sampling.top_p, 0.0)
        kept_BV[:, 0] = ordered.values[:, 0]  # top-p 0 takes the likeliest
        probability_BV = torch.zeros_like(probability_BV).scatter(-1, ordered.indices, kept_BV)
        probability_BV = probability_BV / probability_BV.sum(dim=-1, keepdim=True)
    return probability_BV


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    sampling: Sampling | None = None,
    ends: Collection[int] = (),
    image_prompts: Sequence[ImagePrompt | None] | None = None,
) -> Iterator[list[int | None]]:
    """The next token of each prompt, at most `max_tokens` times; None for a row that has ended.

    A row ends after a token of `ends`, which is still given. The model must be whole and on one rank. `images` are
    those of each prompt.
    """
    if max_tokens < 1:
        return
    model.eval()
    chooser = TokenChooser(sampling or Sampling(), len(prompts))
    cached = CachedDecoder(model)
    logits_BV = cached.prefill(prompts, image_prompts)
    has_ended = [False] * len(prompts)
    for count in range(1, max_tokens + 1):
        chosen = chooser.choose(logits_BV)
        yield [None if ended else token for token, ended in zip(chosen, has_ended, strict=True)]
        has_ended = [ended or token in ends for token, ended in zip(chosen, has_ended, strict=True)]
        if all(has_ended) or count == max_tokens:
            return
        logits_BV = cached.step(chosen)
