"""Activation offload: what named modules, or whole layers, keep for the backward waits for it in host memory.

Copies go beside the compute, on streams of their own. When the backward first asks for something of a layer, that layer
has been on its way since the layer behind it was asked for: one layer ahead. On a CPU the copies are made all the same.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from threefold.engine.kept import Ticket, View, inside_closed, storage_of, taking
from threefold.engine.ways import stood_for, way

LEAST_BYTES = 2**20  # less is not worth a copy on a device


class _Current(threading.local):
    load: "Load | None" = None


_current = _Current()


class Loads:
    """Of one forward through some layers. `names` are modules, `num_layers` the first layers that go whole."""

    def __init__(self, names: Iterable[str], num_layers: int) -> None:
        self.names, self.num_layers = frozenset(names), num_layers
        self._last: Load | None = None
        self._count = 0

    @contextmanager
    def layer(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        whole = self._count < self.num_layers
        self._count += 1
        if not (whole or self.names) or not torch.is_grad_enabled() or inside_closed():
            yield
            return
        self._last = _current.load = load = Load(self.names, modules, self._last)
        try:
            with taking(load) if whole else nullcontext():
                yield
        finally:
            _current.load = None
            load.close()


def away(name: str) -> AbstractContextManager[None]:
    """Around a module's forward: what it keeps goes to the host if the plan names it."""
    load = _current.load
    # What is recomputed is not kept at all; and the second run must keep as the first did.
    return taking(load) if load is not None and name in load.names and not inside_closed() else nullcontext()


class Load:
    """What one layer keeps on the host. Parameters stay where they are."""

    closed = False

    def __init__(self, names: frozenset[str], modules: Iterable[nn.Module], before: "Load | None") -> None:
        self.names, self.before = names, before
        self._modules = tuple(modules)
        self._weights: set[int] | None = None
        self._items: list[ref[_Item]] = []
        self._known: dict[int, tuple[Any, ref[_Item]]] = {}  # by storage, with a sign that it still is the same

    def take(self, tensor: Tensor) -> Ticket | None:
        storage = tensor.untyped_storage()
        few = way(tensor.device) == "cuda" and storage.nbytes() < LEAST_BYTES
        if few or not storage.nbytes() or self._is_weight(tensor):
            return None
        known = self._known.get(storage_of(tensor))
        item = known[1]() if known is not None and known[0]() is storage else None
        if item is None:
            item = _send(tensor)
            self._items.append(ref(item))
            self._known[storage_of(tensor)] = ref(storage), ref(item)
        return _Ticket(self, item, tensor)

    def _is_weight(self, tensor: Tensor) -> bool:
        base = tensor._base if tensor._is_view() else tensor
        if base is not None and base.is_leaf and base.requires_grad:
            return True
        if self._weights is None:
            self._weights = {storage_of(p) for module in self._modules for p in module.parameters() if _is_plain(p)}
        return storage_of(tensor) in self._weights

    def close(self) -> None:
        """The forward of the layer is over."""
        self._modules, self._weights = (), None
        self._known.clear()

    def fetch(self) -> None:
        """All of it that is still wanted, on its way back."""
        for one in self._items:
            item = one()
            if item is not None:
                item.fetch()
        self._items.clear()

    def back(self, item: "_Item", view: View, dtype: torch.dtype) -> Tensor:
        self.fetch()
        if self.before is not None:
            self.before.fetch()
            self.before = None
        return view.on(item.land().view(dtype))


class _Ticket(Ticket):
    __slots__ = ()

    def __init__(self, load: Load, item: "_Item", tensor: Tensor) -> None:
        view, dtype = View.of(tensor), tensor.dtype
        super().__init__(lambda _: load.back(item, view, dtype))


def _is_plain(parameter: Tensor) -> bool:
    """With memory of its own: what FSDP has not gathered yet has none that a module could use."""
    return type(parameter) is nn.Parameter


@dataclass(eq=False)
class _Item:
    """The bytes of one storage."""

    host: Tensor
    device: torch.device
    sent: Any = None  # events
    fetched: Any = None
    here: Tensor | None = None

    def fetch(self) -> None:
        if self.here is not None:
            return
        if self.device.type != "cuda":
            self.here = self.host.contiguous() if stood_for() else self.host.clone()
            return
        stream = _streams(self.device)[1]
        stream.wait_event(self.sent)
        with torch.cuda.stream(stream):
            self.here = self.host.to(self.device, non_blocking=True)
        self.fetched = torch.cuda.Event()
        self.fetched.record(stream)

    def land(self) -> Tensor:
        self.fetch()
        assert self.here is not None
        if self.fetched is not None:
            now = torch.cuda.current_stream(self.device)
            now.wait_event(self.fetched)
            self.here.record_stream(now)
        return self.here


def _send(tensor: Tensor) -> _Item:
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    if stood_for():  # takes no memory of the device that a rehearsal looks at
        return _Item(flat.new_zeros(()).expand(flat.shape), tensor.device)
    if not tensor.is_cuda:
        return _Item(flat.clone(), tensor.device)
    stream = _streams(tensor.device)[0]
    stream.wait_stream(torch.cuda.current_stream(tensor.device))
    host = torch.empty(flat.shape, dtype=torch.uint8, pin_memory=True)
    with torch.cuda.stream(stream):
        host.copy_(flat, non_blocking=True)
    flat.record_stream(stream)
    sent = torch.cuda.Event()
    sent.record(stream)
    return _Item(host, tensor.device, sent)


@cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """There and back."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)
