"""A cache of quantized weights: made once an optimizer step, used by microbatches, recompute and the backward.

Low-precision layers hold one `WeightCache` per weight. `engine/step.py` calls `mark_weights_changed` after the update.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

Value = TypeVar("Value")
_num_changes = 0


def mark_weights_changed() -> None:
    """Invalidate all caches. Called after writes that autograd does not count: optimizer, gather, loaded checkpoint."""
    global _num_changes
    _num_changes += 1


class WeightCache(Generic[Value]):
    """Quantized copies of one weight, or of several that are quantized together.

    It is not `enabled` where weights are gathered for use and freed: the quantized copy would outlive them.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self._key: tuple[object, ...] = ()
        self.cached: Value | None = None

    def get_or_make(self, make: Callable[[], Value], kind: object, *weights: Tensor) -> Value:
        """The value that `make` computes from the weights, from the cache if neither they nor `kind` have changed."""
        # A CUDA graph quantizes at every replay: a cached copy would be that of the step in which it was captured.
        if not self.enabled or (weights[0].is_cuda and torch.cuda.is_current_stream_capturing()):
            return make()
        key = (_num_changes, kind, *(weight._version for weight in weights))
        if self.cached is None or self._key != key:
            self.cached = None  # freed before the new ones are allocated
            self.cached, self._key = make(), key
        return self.cached
