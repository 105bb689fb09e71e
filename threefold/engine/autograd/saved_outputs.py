"""Outputs of costly functions inside a recomputed one, which the second run takes from the first.

A recompute runs a function twice. Attention takes nearly all of the time of a long sequence, and its output and
log-sum-exps are small beside the rest of a layer: a plan can have them saved (`knobs.recompute_save`) although the
layer around them is recomputed. Attention kernels call `save_output`. Each function that is run a second time and has
such outputs has a `SavedOutputs`: it is filled `while_recording` and read `while_replaying`. `recompute.py` makes one
for a recomputed function, and `attention/head_groups/gqa_head_groups.py` one for each group of heads.

The stores of nested functions are a stack in `context.output_stores`, the outermost first.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor

from threefold.engine.autograd.saved_tensors import pack_tensor, unpack_tensor
from threefold.engine.context import context, count_event, override

CORE_ATTENTION = "core_attn"  # the name in a plan


class SavedOutputs:
    """What the first run of one function made, in the order of its calls of `save_output`."""

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
        return tuple(unpack_tensor(one).detach() for one in packed)  # a kernel's autograd node owns its result


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
        by_name = layer is not None and name in layer.names and not any(one.is_recompute for one in handlers)
        handlers = (*handlers, layer) if by_name else handlers
        with override("saved_tensor_handlers", handlers), layer.naming(name) if by_name else nullcontext():
            self.tensors += [pack_tensor(output) for output in outputs]


def saves_outputs(name: str) -> bool:
    """Whether a function around saves outputs of this name: then a kernel that calls `save_output` should run."""
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
