"""Which products of a model a recipe takes: projections of mixers, dense and shared feed-forward parts, routed experts.

Routers, embeddings, the head, norms, the core of attention, gates and the join of a prediction depth stay as they are.
"""

from torch import nn

from threefold.engine.attention.delta import GatedDelta
from threefold.engine.attention.gqa import GqaAttention
from threefold.engine.attention.mla import MlaAttention
from threefold.engine.mlp import Mlp
from threefold.engine.moe.experts import Experts
from threefold.engine.precision.experts import LowExperts
from threefold.engine.precision.linear import LowLinear
from threefold.engine.precision.recipes import Recipe

_STAY = frozenset({"ba"})  # step and decay of the delta rule: a few columns, and every later token feels them


def lower(model: nn.Module, recipe: Recipe, keep: bool) -> None:
    """`keep`: whether weights stay in the narrow format for a step; not where they are gathered only for use."""
    for module in list(model.modules()):
        if isinstance(module, GqaAttention | MlaAttention | GatedDelta | Mlp):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear) and name not in _STAY:
                    setattr(module, name, LowLinear(child, recipe, keep, _input_stays(module, name)))
        elif isinstance(module, Experts):
            module.low = LowExperts(recipe, keep)


def _input_stays(module: nn.Module, name: str) -> bool:
    """Attention keeps its own output for its backward, unless it is gated on the way."""
    if isinstance(module, GqaAttention):
        return name == "out" and not module.spec.gated
    return isinstance(module, MlaAttention) and name == "out"
