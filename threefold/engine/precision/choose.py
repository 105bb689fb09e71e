"""Who multiplies: the device's own kernels where they take the recipe and the sizes, else exact emulation."""

from collections.abc import Sequence

import torch
from torch import Tensor

from threefold.engine.precision.emulated import Emulated
from threefold.engine.precision.native import Unmade, aligned, capability, native
from threefold.engine.precision.recipes import Recipe
from threefold.engine.ways import stood_for

EMULATED, UNMADE = Emulated(), Unmade()


def products_for(recipe: Recipe, x_TI: Tensor, weights: Sequence[Tensor]) -> Emulated:
    """`weights` are (O, I); without any, nothing will be multiplied, and any sizes do."""
    if stood_for():
        return UNMADE
    if not x_TI.is_cuda or x_TI.dtype != torch.bfloat16:
        return EMULATED
    sizes = (*x_TI.shape, *(len(weight) for weight in weights)) if weights else ()
    found = native(recipe, capability(x_TI.device))
    return found if found is not None and aligned(sizes, recipe.input.format) else EMULATED
