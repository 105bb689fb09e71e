"""Qwen3-Next: three layers of the gated delta rule, then one of gated attention; a shared expert behind a gate."""

from torch import nn

from threefold.engine.attention.delta import GatedDelta
from threefold.engine.attention.gqa import GqaAttention
from threefold.engine.models.decoder import Decoder
from threefold.engine.norm import RMSNorm
from threefold.spec.model import GqaSpec, Layer


class Qwen3Next(Decoder):
    def make_norm(self, dim: int) -> nn.Module:
        return RMSNorm(dim, self.spec.norm_eps, zero_centered=True)

    def make_mixer(self, layer: Layer) -> nn.Module:
        spec = self.spec
        if layer.mixer == "delta":
            assert spec.delta is not None
            return GatedDelta(spec.delta, spec.dim, spec.norm_eps)
        assert isinstance(spec.attention, GqaSpec)
        return GqaAttention(spec.attention, spec.dim, self.make_norm)
