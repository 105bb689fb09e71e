"""Tensors that autograd saves for the backward: their handlers, and outputs that a recompute need not make again.

Recompute and activation offload take saved tensors out of autograd's hands: a handler returns a `Placeholder` in place
of the tensor, and autograd asks the placeholder when the backward needs the tensor. Handlers form a stack in
`context.saved_tensor_handlers`. A tensor is offered to the innermost handler first; the first that does not return None
has it. Without handlers nothing changes: torch's `saved_tensors_hooks` are installed with the first one.

A recompute runs a function twice. Attention takes nearly all of the time of a long sequence, and its output and
log-sum-exps are small next to the rest of a layer: a plan can have them saved (`knobs.recompute_save`) although the
layer around them is recomputed. Attention kernels call `save_output`. Each function that is run a second time and has
such outputs has a `SavedOutputs`: it is filled `while_recording` and read `while_replaying`. `recompute.py` makes one
for a recomputed function, and `attention/head_groups/gqa_head_groups.py` one for each group of heads. The stores of
nested functions are a stack in `context.output_stores`, the outermost first.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from threefold.engine.context import context, count_event, override


class Placeholder:
    """A stand-in that autograd holds for a saved tensor.

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
        """Return the placeholder of the tensor; None leaves it to the next handler."""
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
    reachable: list[SavedTensorHandler] = []
    for handler in reversed(context.saved_tensor_handlers):
        if handler.is_recompute:
            break
        reachable.append(handler)
    return reachable


def inside_recompute() -> bool:
    """Return whether the code that runs now is recomputed in the backward, or is being recomputed."""
    return any(handler.is_recompute for handler in context.saved_tensor_handlers)


def pack_tensor(tensor: Tensor) -> Any:
    """Return the object that is held in place of a tensor that is saved now."""
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
        """Describe the layout of `tensor` in its storage, or relative to `base` in the same storage."""
        start = 0 if base is None else base.storage_offset()
        return cls(tensor.shape, tensor.stride(), int(tensor.storage_offset() - start))

    def apply(self, memory: Tensor) -> Tensor:
        return memory.detach().as_strided(self.size, self.stride, self.offset + memory.storage_offset())


CORE_ATTENTION = "core_attn"  # the name in a plan


class SavedOutputs:
    """Outputs that the first run of one function made, in the order of its calls of `save_output`."""

    def __init__(self, names: Iterable[str], tensors: Iterable[Tensor] = ()) -> None:
        self.names = frozenset(names)
        self.tensors: list[Any] = [*tensors]
        self._num_taken: int | None = None  # None in the first run

    @contextmanager
    def while_recording(self) -> Iterator[None]:
        """Around the first run."""
        with override("output_stores", (*context.output_stores, self)):
            yield

    @contextmanager
    def while_replaying(self) -> Iterator[None]:
        """Around the second run, which must not depend on what surrounds the backward."""
        self._num_taken = 0
        with override("output_stores", (self,)):
            yield

    @property
    def is_replaying(self) -> bool:
        return self._num_taken is not None

    def add(self, name: str, outputs: tuple[Tensor, ...]) -> None:
        self.tensors += [output.detach() for output in outputs]

    def take(self, count: int) -> tuple[Tensor, ...]:
        assert self._num_taken is not None
        first, self._num_taken = self._num_taken, self._num_taken + count
        packed = self.tensors[first : self._num_taken]
        # Nothing holds on to a tensor that was taken, unless the second run does.
        self.tensors[first : self._num_taken] = [None] * count
        return tuple(unpack_tensor(each).detach() for each in packed)  # a kernel's autograd node owns its result


class PackedOutputs(SavedOutputs):
    """Outputs that are held as autograd holds what it saves: an offload around the function takes them to the host."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__(names)
        self._handlers: tuple[Any, ...] = ()  # of saved tensors, outside the function

    @contextmanager
    def while_recording(self) -> Iterator[None]:
        self._handlers = context.saved_tensor_handlers
        try:
            with super().while_recording():
                yield
        finally:
            self._handlers = ()

    def add(self, name: str, outputs: tuple[Tensor, ...]) -> None:
        layer, handlers = context.offloaded_layer, self._handlers
        by_name = layer is not None and name in layer.names and not any(handler.is_recompute for handler in handlers)
        handlers = (*handlers, layer) if by_name else handlers
        with override("saved_tensor_handlers", handlers), layer.naming(name) if by_name else nullcontext():
            self.tensors += [pack_tensor(output) for output in outputs]


def saves_outputs(name: str) -> bool:
    """Return whether a function around saves outputs of this name: then a kernel that calls `save_output` should
    run."""
    return any(name in store.names for store in context.output_stores)


def save_output(name: str, compute: Callable[[], tuple[Tensor, ...]], count: int) -> tuple[Tensor, ...]:
    """The `count` tensors of `compute()`: in a second run those that the first run made."""
    stores = [store for store in context.output_stores if name in store.names]
    source = next((store for store in stores if store.is_replaying), None)
    if isinstance(source, PackedOutputs):
        count_event("saved outputs", name)
    outputs = compute() if source is None else source.take(count)
    for store in stores:
        if store is not source:
            store.add(name, outputs)
    return outputs
