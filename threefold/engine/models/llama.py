"""Llama and the dense Qwen3: grouped-query attention, dense feed-forward parts."""

from torch import nn

from threefold.engine.attention.gqa import GqaAttention
from threefold.engine.models.decoder import Decoder
from threefold.spec.model import GqaSpec, Layer


class Llama(Decoder):
    def make_mixer(self, layer: Layer) -> nn.Module:
        assert isinstance(self.spec.attention, GqaSpec)
        return GqaAttention(self.spec.attention, self.spec.dim, self.make_norm)
