"""Weights in a narrow format, made once an optimizer step: microbatches, recompute and the backward use them again."""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

Made = TypeVar("Made")
_changes = 0


def weights_changed() -> None:
    """Whoever writes weights where autograd cannot count it (an optimizer, a gather, a loaded checkpoint) says so."""
    global _changes
    _changes += 1


class Kept(Generic[Made]):
    """With `keep` off nothing stays: a weight that is gathered for use and let go would otherwise live on narrow."""

    def __init__(self, keep: bool = True) -> None:
        self.keep = keep
        self._key: tuple[object, ...] = ()
        self._made: Made | None = None

    def of(self, make: Callable[[], Made], kind: object, *weights: Tensor) -> Made:
        """What `make` makes of the weights, of which there is more than one `kind`."""
        # A graph that is replayed would go on with what was made before a later step: it makes its own, every time.
        if not self.keep or (weights[0].is_cuda and torch.cuda.is_current_stream_capturing()):
            return make()
        key = (_changes, kind, *(weight._version for weight in weights))
        if self._made is None or self._key != key:
            self._made = None  # let go before there are new ones
            self._made, self._key = make(), key
        return self._made
