"""Activation offload: saved tensors of named modules, or of whole layers, wait for the backward in host memory.

Copies run next to the compute on CUDA streams of their own. The backward fetches one layer ahead: when it first needs a
tensor of a layer, the copies of the layer that it reaches next start too. On a CPU the copies are made all the same, so
that tests run the same code.

`models/activation_memory.py` makes one `LayerOffloads` per forward, and `schedule/overlappable_pass.py` makes one per
layer. `offload_activations` wraps the methods of a module that a plan can name.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn

from threefold.engine.autograd.recompute import is_recomputed
from threefold.engine.autograd.saved_tensors import (
    Placeholder,
    StridedView,
    inside_recompute,
    saved_tensor_handler,
    storage_key,
)
from threefold.engine.context import context, override
from threefold.engine.device import device_type, is_simulated

WHOLE_LAYERS = "layers"  # the name under which whole layers are reported
MIN_BYTES = 2**20  # a smaller tensor is not worth a copy on a device
Output = TypeVar("Output")


class LayerOffloads:
    """The offloads of one forward through some layers.

    `names` are modules whose saved tensors go to the host in every layer; the first `num_layers` layers go whole.
    """

    def __init__(self, names: Iterable[str], num_layers: int) -> None:
        self.names, self.num_layers = frozenset(names), num_layers
        self._previous: OffloadedLayer | None = None
        self._count = 0

    @contextmanager
    def layer(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Around the forward of the next layer, which consists of `modules`."""
        whole = self._count < self.num_layers
        self._count += 1
        if not (whole or self.names) or not torch.is_grad_enabled() or inside_recompute():
            yield
            return
        self._previous = layer = OffloadedLayer(self.names, modules, self._previous)
        try:
            with override("offloaded_layer", layer), saved_tensor_handler(layer) if whole else nullcontext():
                yield
        finally:
            layer.close()


def offload_activations(name: str, function: Callable[..., Output]) -> Callable[..., Output]:
    """`function`, whose saved tensors go to the host where the offload of the layer under way names `name`."""

    def offloading(*args: Any, **kwargs: Any) -> Output:
        layer: OffloadedLayer | None = context.offloaded_layer
        # A recomputed function saves nothing, and its second run must save what the first did.
        if layer is None or name not in layer.names or inside_recompute():
            return function(*args, **kwargs)
        with layer.naming(name), saved_tensor_handler(layer):
            return function(*args, **kwargs)

    return offloading


class OffloadedLayer:
    """The saved tensors of one layer on the host. Parameters stay where they are."""

    is_recompute = False

    def __init__(self, names: frozenset[str], modules: Iterable[nn.Module], previous: "OffloadedLayer | None") -> None:
        self.names, self.previous = names, previous
        self._name = WHOLE_LAYERS  # of the module whose saved tensors are offloaded now
        self._modules = tuple(modules)
        self._weights: set[int] | None = None
        self._copies: list[ref[_HostCopy]] = []
        # By storage key, with a weak reference that tells whether the key still means the same storage.
        self._copy_of: dict[int, tuple[Any, ref[_HostCopy]]] = {}

    @contextmanager
    def naming(self, name: str) -> Iterator[None]:
        before, self._name = self._name, name
        try:
            yield
        finally:
            self._name = before

    def pack(self, tensor: Tensor) -> Placeholder | None:
        storage = tensor.untyped_storage()
        is_small = device_type(tensor.device) == "cuda" and storage.nbytes() < MIN_BYTES
        # What a recompute around this module discards is left to it: a copy on the host would serve nobody.
        if is_small or not storage.nbytes() or self._is_weight(tensor) or is_recomputed(tensor):
            return None
        known = self._copy_of.get(storage_key(tensor))
        copy = known[1]() if known is not None and known[0]() is storage else None
        if copy is None:
            copy = _copy_to_host(tensor, self._name)
            self._copies.append(ref(copy))
            self._copy_of[storage_key(tensor)] = ref(storage), ref(copy)
        if context.activation_observer is not None:
            context.activation_observer.offload(self._name, tensor)
        return _OffloadedTensor(self, copy, tensor)

    def _is_weight(self, tensor: Tensor) -> bool:
        base = tensor._base if tensor._is_view() else tensor
        if base is not None and base.is_leaf and base.requires_grad:
            return True
        if self._weights is None:
            self._weights = {storage_key(p) for module in self._modules for p in module.parameters() if _has_memory(p)}
        return storage_key(tensor) in self._weights

    def close(self) -> None:
        """End the forward of the layer."""
        self._modules, self._weights = (), None
        self._copy_of.clear()

    def prefetch(self) -> None:
        """Start to bring back every tensor of the layer that autograd still holds."""
        for weak_copy in self._copies:
            copy = weak_copy()
            if copy is not None:
                copy.fetch()
        self._copies.clear()

    def restore(self, copy: "_HostCopy", view: StridedView, dtype: torch.dtype) -> Tensor:
        self.prefetch()
        if self.previous is not None:
            self.previous.prefetch()
            self.previous = None
        return view.apply(copy.wait().view(dtype))


class _OffloadedTensor(Placeholder):
    __slots__ = ()

    def __init__(self, layer: OffloadedLayer, copy: "_HostCopy", tensor: Tensor) -> None:
        view, dtype = StridedView.of(tensor), tensor.dtype
        super().__init__(lambda _: layer.restore(copy, view, dtype))


def _has_memory(parameter: Tensor) -> bool:
    """Return whether a module can use the parameter as it is: FSDP has not gathered a `DTensor` yet."""
    return type(parameter) is nn.Parameter


@dataclass(eq=False)
class _HostCopy:
    """The bytes of one storage in host memory, and back on the device once they were fetched."""

    host: Tensor
    device: torch.device
    name: str  # of the module that saved it
    sent: Any = None  # CUDA event: the copy to the host is complete
    fetched: Any = None  # CUDA event: the copy to the device is complete
    on_device: Tensor | None = None

    def fetch(self) -> None:
        if self.on_device is not None:
            return
        if self.device.type != "cuda":
            with _observed_copy(self.name):
                self.on_device = self.host.contiguous() if is_simulated() else self.host.clone()
            return
        stream = _streams(self.device)[1]
        stream.wait_event(self.sent)
        with torch.cuda.stream(stream), _observed_copy(self.name):
            self.on_device = self.host.to(self.device, non_blocking=True)
        self.fetched = torch.cuda.Event()
        self.fetched.record(stream)

    def wait(self) -> Tensor:
        self.fetch()
        assert self.on_device is not None
        if self.fetched is not None:
            now = torch.cuda.current_stream(self.device)
            now.wait_event(self.fetched)
            self.on_device.record_stream(now)
        return self.on_device


def _observed_copy(name: str) -> AbstractContextManager[None]:
    observer = context.activation_observer
    return nullcontext() if observer is None else observer.copying(name)


def _copy_to_host(tensor: Tensor, name: str) -> _HostCopy:
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    if is_simulated():  # host memory must not count as memory of the device that a dry run measures
        return _HostCopy(flat.new_zeros(()).expand(flat.shape), tensor.device, name)
    if not tensor.is_cuda:
        with _observed_copy(name):
            return _HostCopy(flat.clone(), tensor.device, name)
    stream = _streams(tensor.device)[0]
    stream.wait_stream(torch.cuda.current_stream(tensor.device))
    host = torch.empty(flat.shape, dtype=torch.uint8, pin_memory=True)
    with torch.cuda.stream(stream), _observed_copy(name):
        host.copy_(flat, non_blocking=True)
    flat.record_stream(stream)
    sent = torch.cuda.Event()
    sent.record(stream)
    return _HostCopy(host, tensor.device, name, sent)


@cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """One stream for copies to the host and one for copies back."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)
