"""Handlers of the tensors that autograd saves for the backward.

Recompute and activation offload take saved tensors out of autograd's hands: a handler returns a `Placeholder` in place
of the tensor, and autograd asks the placeholder when the backward needs the tensor. Handlers form a stack in
`context.saved_tensor_handlers`. A tensor is offered to the innermost handler first; the first that does not return None
has it. Without handlers nothing changes: torch's `saved_tensors_hooks` are installed with the first one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from threefold.engine.context import context


class Placeholder:
    """What autograd holds in place of a saved tensor.

    Its identity matters: when autograd frees the placeholder, the handler can free what it keeps for it.
    """

    __slots__ = ("__weakref__", "_restore")

    def __init__(self, restore: "Callable[[Placeholder], Tensor]") -> None:
        self._restore = restore

    def tensor(self) -> Tensor:
        return self._restore(self)


class SavedTensorHandler(Protocol):
    """Decides what becomes of a tensor that autograd is about to save."""

    is_recompute: bool  # takes every tensor, so that handlers outside of it are never asked

    def pack(self, tensor: Tensor) -> Any | None:
        """What autograd holds in place of the tensor; None leaves it to the next handler."""
        ...


@contextmanager
def saved_tensor_handler(handler: SavedTensorHandler, alone: bool = False) -> Iterator[None]:
    """Offer saved tensors to `handler` first inside the `with` block.

    With `alone` it is the only handler: a recompute inside the backward must not depend on what surrounds the backward,
    and may run on another thread than the forward did.
    """
    before = context.saved_tensor_handlers
    outer = () if alone else before
    context.saved_tensor_handlers = (*outer, handler)
    try:
        if outer:
            yield
        else:
            with saved_tensors_hooks(pack_tensor, unpack_tensor):
                yield
    finally:
        context.saved_tensor_handlers = before


def reachable_handlers() -> list[SavedTensorHandler]:
    """Handlers from the innermost out to the first recompute, which takes everything."""
    found: list[SavedTensorHandler] = []
    for handler in reversed(context.saved_tensor_handlers):
        if handler.is_recompute:
            break
        found.append(handler)
    return found


def inside_recompute() -> bool:
    """Whether the code that runs now is recomputed in the backward, or is being recomputed."""
    return any(handler.is_recompute for handler in context.saved_tensor_handlers)


def pack_tensor(tensor: Tensor) -> Any:
    """What is held in place of a tensor that is saved now."""
    for handler in reversed(context.saved_tensor_handlers):
        packed = handler.pack(tensor)
        if packed is not None:
            return packed
    # A node that saves its own output as it is would form a reference cycle that nobody frees.
    return tensor.detach()


def unpack_tensor(saved: Any) -> Any:
    return saved.tensor() if isinstance(saved, Placeholder) else saved


def storage_key(tensor: Tensor) -> int:
    """A key of the tensor's storage, unique while the storage lives."""
    return tensor.untyped_storage()._cdata


@dataclass(frozen=True, slots=True)
class StridedView:
    """Size, stride and offset by which a tensor can be viewed again in memory that was restored."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # in elements, from the beginning of the memory

    @classmethod
    def of(cls, tensor: Tensor, base: Tensor | None = None) -> "StridedView":
        """How `tensor` lies in its storage, or relative to `base` in the same storage."""
        start = 0 if base is None else base.storage_offset()
        return cls(tensor.shape, tensor.stride(), int(tensor.storage_offset() - start))

    def apply(self, memory: Tensor) -> Tensor:
        return memory.detach().as_strided(self.size, self.stride, self.offset + memory.storage_offset())
