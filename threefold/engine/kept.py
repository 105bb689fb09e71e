"""What autograd keeps for the backward, and who may take it out of its hands.

Takers stand in a stack, the innermost on top. A tensor that autograd wants to keep is offered from the top down: who
takes it gives a ticket, from which the tensor comes back when the backward asks.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class Ticket:
    """Identity matters: when autograd lets go of it, so does whoever keeps something for it."""

    __slots__ = ("__weakref__", "_back")

    def __init__(self, back: "Callable[[Ticket], Tensor]") -> None:
        self._back = back

    def tensor(self) -> Tensor:
        return self._back(self)


class Taker(Protocol):
    closed: bool  # takes everything: nothing below it is asked

    def take(self, tensor: Tensor) -> Any | None:
        """None: not mine."""
        ...


class _Stack(threading.local):
    """A recompute keeps nothing for another thread: on CUDA the backward has one of its own."""

    def __init__(self) -> None:
        self.takers: list[Taker] = []


_stack = _Stack()


@contextmanager
def taking(taker: Taker) -> Iterator[None]:
    takers = _stack.takers
    takers.append(taker)
    try:
        if len(takers) > 1:
            yield
        else:
            with saved_tensors_hooks(_pack, _unpack):
                yield
    finally:
        takers.remove(taker)


def open_takers() -> list[Taker]:
    """From the top down to the first that is closed."""
    found: list[Taker] = []
    for taker in reversed(_stack.takers):
        if taker.closed:
            break
        found.append(taker)
    return found


def inside_closed() -> bool:
    return any(taker.closed for taker in _stack.takers)


def _pack(tensor: Tensor) -> Any:
    for taker in reversed(_stack.takers):
        taken = taker.take(tensor)
        if taken is not None:
            return taken
    # The result of a node, kept by it as it is, would be a cycle that nobody frees.
    return tensor.detach()


def _unpack(kept: Any) -> Any:
    return kept.tensor() if isinstance(kept, Ticket) else kept


def storage_of(tensor: Tensor) -> int:
    """A key of its memory while that lives."""
    return tensor.untyped_storage()._cdata


@dataclass(frozen=True, slots=True)
class View:
    """How a tensor looks at memory of its dtype that begins with another one."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor, base: Tensor | None = None) -> "View":
        start = 0 if base is None else base.storage_offset()
        return cls(tensor.shape, tensor.stride(), int(tensor.storage_offset() - start))

    def on(self, tensor: Tensor) -> Tensor:
        return tensor.detach().as_strided(self.size, self.stride, self.offset + tensor.storage_offset())
