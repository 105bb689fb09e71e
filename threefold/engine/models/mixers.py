"""The mixer of a layer: attention of a kind, the gated delta rule or Mamba-2. `decoder.py` asks here."""

from collections.abc import Callable

from torch import nn

from threefold.engine.attention.gated_delta import GatedDelta
from threefold.engine.attention.gqa import GqaAttention
from threefold.engine.attention.mla import MlaAttention
from threefold.engine.attention.sparse.compressed import CompressedAttention
from threefold.engine.attention.sparse.sparse_mla import SparseMlaAttention
from threefold.engine.attention.state_space.mamba import Mamba
from threefold.engine.layers.norm import RMSNorm
from threefold.spec.model import CompressedSpec, GqaSpec, Layer, MlaSpec, ModelSpec


def make_mixer(spec: ModelSpec, layer: Layer, make_norm: Callable[[int], nn.Module]) -> nn.Module | None:
    """The attention, gated delta rule or Mamba-2 of one layer; None where a layer is a feed-forward network alone."""
    if layer.mixer == "none":
        return None
    if layer.mixer == "mamba":
        assert spec.mamba is not None
        return Mamba(spec.mamba, spec.dim, spec.norm_eps)
    if layer.mixer == "delta":
        assert spec.delta is not None
        return GatedDelta(spec.delta, spec.dim, spec.norm_eps)
    attention = spec.attention_of(layer)
    if isinstance(attention, MlaSpec):
        # The norms of the latents do not follow rms_norm_eps: they keep 1e-6, as in DeepSeek's code.
        kind = MlaAttention if attention.indexer is None else SparseMlaAttention
        return kind(attention, spec.dim, RMSNorm)
    if isinstance(attention, CompressedSpec):
        return CompressedAttention(attention, spec.dim, make_norm)
    assert isinstance(attention, GqaSpec)
    return GqaAttention(attention, spec.dim, make_norm)
