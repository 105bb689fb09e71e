"""A cache of quantized weights: made once an optimizer step, used by microbatches, recompute and the backward.

Low-precision layers hold one `WeightCache` per weight. `engine/step.py` calls `mark_weights_changed` after the update.
A CUDA graph reads the quantized copies at the addresses they had when it was recorded. From then on they are quantized
in place, and `graphs/` calls `refresh` before each replay.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from threefold.engine.context import context

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
        self.cached: Value | None = None
        self._key: tuple[object, ...] = ()
        self._source: tuple[Callable[[], Value], object, tuple[Tensor, ...]] | None = None  # of the last call
        self._is_in_graph = False  # a CUDA graph reads the copies

    def get_or_make(self, make: Callable[[], Value], kind: object, *weights: Tensor) -> Value:
        """The value that `make` computes from the weights, from the cache if neither they nor `kind` have changed."""
        if not self.enabled:
            return make()
        is_other_kind = self._source is not None and self._source[1] != kind
        if context.recording_graph:
            if self.cached is None or is_other_kind:
                return make()  # the graph quantizes at every replay
            self._is_in_graph = True
            return self.cached
        if self._is_in_graph and is_other_kind:
            return make()  # the cached copies belong to the graph
        self._source = make, kind, weights
        self.refresh()
        assert self.cached is not None
        return self.cached

    def refresh(self) -> None:
        """Quantize the weights once more if they have changed since: in place if a CUDA graph reads the copies."""
        if self._source is None:
            return
        make, kind, weights = self._source
        key = (_num_changes, kind, *(weight._version for weight in weights))
        if self.cached is not None and self._key == key:
            return
        if self._is_in_graph and self.cached is not None:
            with torch.no_grad():
                for fixed, x in zip(_tensors(self.cached), _tensors(make()), strict=True):
                    fixed.copy_(x)
        else:
            self.cached = None  # freed before the new ones are allocated
            self.cached = make()
        self._key = key


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of nested tuples and dataclasses, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))
