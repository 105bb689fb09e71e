"""Chooses the backend of low-precision GEMMs: the device's kernels if they take recipe and sizes, else emulation.

`low_precision_linear` and `layers/head_gemms.py` call it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from threefold.engine.device import is_simulated
from threefold.engine.precision.emulated_backend import EmulatedBackend
from threefold.engine.precision.recipes import Recipe
from threefold.engine.precision.scaled_mm_backends import (
    SimulatedBackend,
    compute_capability_major,
    native_backend,
    sizes_are_aligned,
)

EMULATED, SIMULATED = EmulatedBackend(), SimulatedBackend()


def choose_backend(recipe: Recipe, x_TI: Tensor, weights: Sequence[Tensor]) -> EmulatedBackend:
    """The backend for this input and these weights, (O, I). Without weights nothing is multiplied, and any sizes do."""
    if is_simulated():
        return SIMULATED
    if not x_TI.is_cuda or x_TI.dtype != torch.bfloat16:
        return EMULATED
    sizes = (*x_TI.shape, *(len(weight) for weight in weights)) if weights else ()
    found = native_backend(recipe, compute_capability_major(x_TI.device))
    return found if found is not None and sizes_are_aligned(sizes, recipe.input.format) else EMULATED
