"""A decoder that reads every token once: prompts first, then one token of each row at a time.

`generate.py` calls it. A batch may hold prompts of different length; each row counts its own positions.

Shapes: B rows, S tokens, D model dim, V vocabulary.
"""

from collections.abc import Callable, Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from threefold.engine.generate.cached_mixers import CachedMixer, cached_mixer
from threefold.engine.generate.picture_prompt import PicturePrompt, join_prompts
from threefold.engine.layers.positions import Positions
from threefold.engine.models.decoder import Block, Decoder
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
        self.offsets: list[int] | None = None  # of a row's next position from its length, where pictures came before

    @torch.no_grad()
    def prefill(
        self, prompts: Sequence[Sequence[int]], pictures: Sequence[PicturePrompt | None] | None = None
    ) -> Tensor:
        """Read the prompts, none of them empty. Returns the logits behind the last token of each, (B, V).

        `pictures` are those of each prompt, whose tokens are in `prompts` too.
        """
        self.lengths = [len(prompt) for prompt in prompts]
        assert min(self.lengths) > 0
        tokens_BS = torch.zeros(len(prompts), max(self.lengths), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            tokens_BS[row, : len(prompt)] = torch.tensor(prompt)
        tokens_BS = tokens_BS.to(self.device)
        positions = Positions.from_tokens(tokens_BS)
        x_BSD, features = self._embed(tokens_BS), list[Tensor]()
        if pictures is not None and any(pictures):
            seen = join_prompts(pictures, self.lengths)
            positions.axes_3BS, self.offsets = seen.axes_3BS.to(self.device), seen.offsets
            images = seen.images and seen.images._replace(token_index_V=seen.images.token_index_V.to(self.device))
            shape = (len(prompts), max(self.lengths))
            found = self.model.encode_pictures(Inputs(tokens_BS, positions, (), images, shape))
            assert found is not None
            x_BSD, features = found.merge(x_BSD), found.dense_deepstack()
        x_BSD = self._run_layers(x_BSD, lambda mixer, y_BSD: mixer.prefill(y_BSD, positions, self.lengths), features)
        last_B = torch.tensor(self.lengths, device=self.device) - 1
        return self._logits(x_BSD[torch.arange(len(prompts), device=self.device), last_B])

    @torch.no_grad()
    def step(self, tokens: Sequence[int]) -> Tensor:
        """Read one more token of each row. Returns the logits behind it, (B, V)."""
        positions = Positions(torch.tensor(self.lengths, device=self.device)[:, None])
        if self.offsets is not None:
            next_B1 = positions.positions_BS + torch.tensor(self.offsets, device=self.device)[:, None]
            positions.axes_3BS = next_B1.expand(3, -1, -1)
        longest = max(self.lengths)
        x_BSD = self._embed(torch.tensor(tokens, device=self.device)[:, None])
        x_BSD = self._run_layers(x_BSD, lambda mixer, y_BSD: mixer.step(y_BSD, positions, longest))
        self.lengths = [length + 1 for length in self.lengths]
        return self._logits(x_BSD[:, 0])

    def _run_layers(
        self, x_BSD: Tensor, mix: Callable[[CachedMixer, Tensor], Tensor], features: Sequence[Tensor] = ()
    ) -> Tensor:
        """One layer after the other. `features` of pictures are added behind the first ones, one a layer."""
        for block, mixer, feature_BSD in zip_longest(self.blocks, self.mixers, features):
            added: tuple[Tensor, ...] = ()
            if mixer is not None:
                x_BSD, y_BSD = block.normalize_for_mixer(x_BSD)
                added = (mix(mixer, y_BSD),)
            x_BSD, _ = block.feed_forward(x_BSD, *added)
            x_BSD = x_BSD if feature_BSD is None else x_BSD + feature_BSD
        return x_BSD

    def _embed(self, tokens_BS: Tensor) -> Tensor:
        assert self.model.embed is not None
        x_BSD: Tensor = self.model.embed(tokens_BS)
        return x_BSD * self.model.spec.embed_scale

    def _logits(self, x_BD: Tensor) -> Tensor:
        assert self.model.norm is not None
        return self.model.compute_logits(self.model.norm(x_BD))
