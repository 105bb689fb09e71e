"""DeepSeek-V3: latent attention, first layers dense, sigmoid router in groups with a balancing bias, shared experts."""

from torch import nn

from threefold.engine.attention.mla import MlaAttention
from threefold.engine.models.decoder import Decoder
from threefold.engine.norm import RMSNorm
from threefold.spec.model import Layer, MlaSpec


class DeepseekV3(Decoder):
    init_std = 0.006  # DeepSeek-V3 technical report, section 4.2

    def make_mixer(self, layer: Layer) -> nn.Module:
        assert isinstance(self.spec.attention, MlaSpec)
        # The norms of the latents do not follow rms_norm_eps: they keep 1e-6, as in DeepSeek's code.
        return MlaAttention(self.spec.attention, self.spec.dim, RMSNorm)
