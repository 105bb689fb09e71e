"""GPT-OSS: attention with sinks, every other layer in a window; experts with biases and a clamped SwiGLU."""

from torch import nn

from threefold.engine.attention.gqa import GqaAttention
from threefold.engine.models.decoder import Decoder
from threefold.spec.model import GqaSpec, Layer


class GptOss(Decoder):
    def make_mixer(self, layer: Layer) -> nn.Module:
        spec = self.spec.local_attention if layer.mixer == "window" else self.spec.attention
        assert isinstance(spec, GqaSpec)
        return GqaAttention(spec, self.spec.dim, self.make_norm)
