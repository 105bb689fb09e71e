"""The model families as data: the kind of norm of each family, and the mixer of a layer.

`decoder.py` asks here when it builds a model. A new family that has only known mixers is one more entry of `FAMILIES`
and a reader for its configuration in `spec/hf.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from threefold.engine.attention.gated_delta import GatedDelta
from threefold.engine.attention.gqa import GqaAttention
from threefold.engine.attention.mla import MlaAttention
from threefold.engine.attention.sparse.sparse_mla import SparseMlaAttention
from threefold.engine.attention.state_space.mamba import Mamba
from threefold.engine.layers.norm import RMSNorm
from threefold.spec.model import GqaSpec, Layer, MlaSpec, ModelSpec


@dataclass(frozen=True)
class Family:
    zero_centered_norms: bool = False  # norms store weight - 1


FAMILIES = {
    "deepseek_v3": Family(),
    "deepseek_v32": Family(),
    "dots1": Family(),
    "ernie4_5_moe": Family(),
    "gemma4": Family(),
    "glm4_moe": Family(),
    "glm_moe_dsa": Family(),
    "gpt_oss": Family(),
    "granitemoe": Family(),
    "hunyuan_v1_moe": Family(),
    "llama": Family(),
    "minimax_m2": Family(),
    "mixtral": Family(),
    "nemotron_h": Family(),
    "olmoe": Family(),
    "phimoe": Family(),
    "qwen2_moe": Family(),
    "qwen3": Family(),
    "qwen3_5_moe": Family(zero_centered_norms=True),
    "qwen3_moe": Family(),
    "qwen3_next": Family(zero_centered_norms=True),
    "qwen3_vl_moe": Family(),
}


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
    attention = spec.local_attention if layer.mixer == "window" else spec.attention
    if isinstance(attention, MlaSpec):
        # The norms of the latents do not follow rms_norm_eps: they keep 1e-6, as in DeepSeek's code.
        kind = MlaAttention if attention.indexer is None else SparseMlaAttention
        return kind(attention, spec.dim, RMSNorm)
    assert isinstance(attention, GqaSpec)
    return GqaAttention(attention, spec.dim, make_norm)
