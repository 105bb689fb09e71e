"""A decoder that reads every token once: prompts first, then one token of each row at a time.

`generate.py` calls it. A batch may hold prompts of different length; each row counts its own positions.

Shapes: B rows, S tokens, D model dim, V vocabulary.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from threefold.engine.generate.cached_mixers import cached_mixer
from threefold.engine.layers.positions import Positions
from threefold.engine.models.decoder import Block, Decoder


class CachedDecoder:
    """The whole model on one rank with a cache for each layer. MTP depths are not run."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.device = model.head_weight.device
        self.blocks = [block for block in model.layers.values() if isinstance(block, Block)]
        with torch.no_grad():
            self.mixers = [cached_mixer(block.mixer) for block in self.blocks]
        self.lengths: list[int] = []  # tokens of each row so far

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Read the prompts, none of them empty. Returns the logits behind the last token of each, (B, V)."""
        self.lengths = [len(prompt) for prompt in prompts]
        assert min(self.lengths) > 0
        tokens_BS = torch.zeros(len(prompts), max(self.lengths), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            tokens_BS[row, : len(prompt)] = torch.tensor(prompt)
        tokens_BS = tokens_BS.to(self.device)
        positions = Positions.from_tokens(tokens_BS)
        x_BSD = self._embed(tokens_BS)
        for block, mixer in zip(self.blocks, self.mixers, strict=True):
            x_BSD, y_BSD = block.normalize_for_mixer(x_BSD)
            x_BSD, _ = block.feed_forward(x_BSD, mixer.prefill(y_BSD, positions, self.lengths))
        last_B = torch.tensor(self.lengths, device=self.device) - 1
        return self._logits(x_BSD[torch.arange(len(prompts), device=self.device), last_B])

    @torch.no_grad()
    def step(self, tokens: Sequence[int]) -> Tensor:
        """Read one more token of each row. Returns the logits behind it, (B, V)."""
        positions = Positions(torch.tensor(self.lengths, device=self.device)[:, None])
        longest = max(self.lengths)
        x_BSD = self._embed(torch.tensor(tokens, device=self.device)[:, None])
        for block, mixer in zip(self.blocks, self.mixers, strict=True):
            x_BSD, y_BSD = block.normalize_for_mixer(x_BSD)
            x_BSD, _ = block.feed_forward(x_BSD, mixer.step(y_BSD, positions, longest))
        self.lengths = [length + 1 for length in self.lengths]
        return self._logits(x_BSD[:, 0])

    def _embed(self, tokens_BS: Tensor) -> Tensor:
        assert self.model.embed is not None
        x_BSD: Tensor = self.model.embed(tokens_BS)
        return x_BSD

    def _logits(self, x_BD: Tensor) -> Tensor:
        assert self.model.norm is not None
        return F.linear(self.model.norm(x_BD), self.model.head_weight)
