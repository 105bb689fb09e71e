"""The quantized weights that a CUDA graph reads at fixed addresses.

`GraphedFunction` and `FullIterationGraph` refresh them before each replay: they are quantized in place, once an
optimizer step, by the first replay behind it.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from threefold.engine.precision.low_precision_experts import LowPrecisionExperts
from threefold.engine.precision.low_precision_linear import LinearPrecision
from threefold.engine.precision.weight_cache import WeightCache


def weight_caches(modules: Iterable[nn.Module]) -> Iterator[WeightCache[Any]]:
    """The caches of all low-precision layers among the modules and inside of them."""
    for submodule in (submodule for module in modules for submodule in module.modules()):
        for value in vars(submodule).values():
            if isinstance(value, LinearPrecision):
                yield value.cache
            elif isinstance(value, LowPrecisionExperts):
                yield from value.weight_caches()


def refresh_weights(modules: Iterable[nn.Module]) -> None:
    for cache in weight_caches(modules):
        cache.refresh()
