"""Applies a low-precision recipe to a model: which linear layers and experts it replaces.

These are the projections of attention, the delta rule and Mamba, dense and shared feed-forward parts, and routed
experts. Routers, embeddings, the head, norms, the core of attention, gates and the input join of an MTP depth stay in
bf16. `models/build.py` calls it.
"""

from torch import nn

from threefold.engine.attention.gated_delta import GatedDelta
from threefold.engine.attention.gqa import GqaAttention
from threefold.engine.attention.mla import MlaAttention
from threefold.engine.attention.sparse.compressed import CompressedAttention
from threefold.engine.attention.state_space.mamba import Mamba
from threefold.engine.layers.mlp import Mlp
from threefold.engine.moe.experts import Experts
from threefold.engine.precision.low_precision_experts import LowPrecisionExperts
from threefold.engine.precision.low_precision_linear import LowPrecisionLinear
from threefold.engine.precision.recipes import Recipe

_KEPT_IN_BF16 = frozenset(
    {"ba"}
)  # step and decay of the delta rule: few columns, and an error reaches every later token


def apply_low_precision(model: nn.Module, recipe: Recipe, cache_weights: bool) -> None:
    """Replace layers. With `cache_weights` quantized weights live for a step; it is off where weights are gathered."""
    for module in list(model.modules()):
        if isinstance(module, CompressedAttention | GqaAttention | MlaAttention | GatedDelta | Mamba | Mlp):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear) and name not in _KEPT_IN_BF16:
                    setattr(
                        module,
                        name,
                        LowPrecisionLinear(child, recipe, cache_weights, _input_is_saved_anyway(module, name)),
                    )
        elif isinstance(module, Experts):
            module.low_precision = LowPrecisionExperts(recipe, cache_weights)


def _input_is_saved_anyway(module: nn.Module, name: str) -> bool:
    """Attention saves its output for its own backward; a gate between it and the projection makes another tensor."""
    if isinstance(module, GqaAttention):
        return name == "out" and not module.spec.gated
    return isinstance(module, MlaAttention) and name == "out"
