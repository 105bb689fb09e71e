"""Bytes of tensors that were made inside a `with` block and are still alive, such as saved tensors of a forward."""

import gc
import weakref
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveTensors(TorchDispatchMode):
    """Counts each storage once. Tensors of the dtypes in `without` do not count."""

    def __init__(self, without: tuple[torch.dtype, ...] = ()) -> None:
        super().__init__()
        self.without = without
        self._seen: dict[int, tuple[Any, int]] = {}

    def __enter__(self) -> Self:
        gc.freeze()  # what was there before need not be looked at when bytes are counted
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.dtype not in self.without:
                storage = x.untyped_storage()
                if storage._cdata not in given:
                    self._seen[storage._cdata] = weakref.ref(storage), storage.nbytes()
        return out

    @property
    def num_bytes(self) -> int:
        gc.collect()
        return sum(size for storage, size in self._seen.values() if storage() is not None)


class PeakTensors(LiveTensors):
    """Measures the largest number of bytes that were alive at once."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.most = max(self.most, sum(size for storage, size in self._seen.values() if storage() is not None))
        return out


def peak_bytes(model: Any, num_tokens: int) -> int:
    """The most bytes that are alive at once in a forward and backward, without weights and their gradients."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    tokens = torch.zeros(1, num_tokens, dtype=torch.long)
    with PeakTensors() as living:
        model(tokens, tokens).loss.backward()
    return living.most
