"""Bytes that recompute and offload keep from being saved on the device in a step, and the seconds that they take.

`ActivationObserver` sits in `context.activation_observer` during one step. It sees every tensor that autograd
saves, that a recompute drops and that an offload copies, and counts each storage once:

    would be saved without recompute and offload    an operation saved it, wherever it ended up
    is saved with recompute alone                   an operation holds it, or a recomputed function holds it as input,
                                                    on the device or on the host
    is saved with both                              the same, on the device

The first minus the second is what recompute keeps from being saved, the second minus the third what offload does. A
recomputed function whose input nobody else saves costs bytes: they are subtracted. Weights are not counted.

With low-precision GEMMs a discarded output is counted as it is, although the GEMM would have saved it quantized.
Parts that are replayed as CUDA graphs are not seen.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from threefold.engine.autograd.saved_tensors import saved_tensor_handler, storage_key
from threefold.engine.context import context, override


@dataclass
class ActivationUse:
    """The effect of one name of `knobs.recompute` or `knobs.activation_offload` on one rank in the observed step."""

    kept_bytes: float = 0.0  # kept from being saved on the device in a microbatch, on average
    seconds: float = 0.0  # of recompute in the step, or of copies, which run next to compute on a GPU
    times: int = 0  # second runs, or copies


@dataclass(slots=True)
class _Storage:
    """One storage that was saved, dropped or offloaded."""

    alive: Any  # a weak reference: keys are used again for other storages
    num_bytes: int
    is_wanted: bool = False  # an operation saved it, and not only a region as its input
    is_held: bool = False  # autograd holds it on the device for an operation
    input_of: str | None = None  # autograd holds it on the device as the input of this recompute
    offloaded_by: str | None = None
    dropped_by: str | None = None
    discarded_by: str | None = None  # it is an output that this recompute discards

    def settle(self, recompute: dict[str, float], offload: dict[str, float]) -> None:
        """Add the bytes to the names that keep them from being saved."""
        on_device = self.is_held or self.input_of is not None
        is_saved = on_device or self.offloaded_by is not None
        if self.is_wanted and not is_saved:
            name = self.discarded_by or self.dropped_by
            if name is not None:
                recompute[name] = recompute.get(name, 0.0) + self.num_bytes
        elif self.input_of is not None and not self.is_wanted:
            recompute[self.input_of] = recompute.get(self.input_of, 0.0) - self.num_bytes
        if self.offloaded_by is not None and not on_device:
            offload[self.offloaded_by] = offload.get(self.offloaded_by, 0.0) + self.num_bytes


@dataclass
class _Span:
    """One second run or one copy, between two marks of the clock."""

    name: str
    outer: "_Span | None"
    start: Any
    end: Any = None
    inner_seconds: float = 0.0  # of second runs that this one waited for


@dataclass(eq=False)
class ActivationObserver:
    """Follows saved tensors on one rank. `step` is entered around a training step."""

    chunks: Iterable[nn.Module]
    device: torch.device
    is_recompute = False  # as a handler of saved tensors: it takes none
    _storages: dict[int, _Storage] = field(default_factory=dict)
    _weights: set[int] = field(default_factory=set)
    _input_of: str | None = None  # the region whose inputs are being saved
    _recompute_bytes: dict[str, float] = field(default_factory=dict)
    _offload_bytes: dict[str, float] = field(default_factory=dict)
    _open: _Span | None = None
    _runs: list[_Span] = field(default_factory=list)
    _copies: list[_Span] = field(default_factory=list)

    @contextmanager
    def step(self) -> Iterator[None]:
        self._weights = {
            storage_key(x)
            for chunk in self.chunks
            for x in (*chunk.parameters(), *chunk.buffers())
            if type(x) in (Tensor, nn.Parameter)
        }
        with override("activation_observer", self), saved_tensor_handler(self):
            yield
        for storage in self._storages.values():
            storage.settle(self._recompute_bytes, self._offload_bytes)
        self._storages.clear()

    # Called while tensors are saved.

    def pack(self, tensor: Tensor) -> None:
        """A tensor that no recompute or offload takes."""
        storage = self._storage_of(tensor)
        if storage is None:
            return
        if self._input_of is None:
            storage.is_wanted = storage.is_held = True
        elif storage.input_of is None:
            storage.input_of = self._input_of

    def drop(self, name: str, tensor: Tensor, is_output: bool = False) -> None:
        """A recompute drops the tensor; `is_output` where it is an output that is discarded."""
        storage = self._storage_of(tensor)
        if storage is None:
            return
        if is_output:
            storage.discarded_by = name
        if self._input_of is None:
            storage.is_wanted = True
            storage.dropped_by = storage.dropped_by or name

    def offload(self, name: str, tensor: Tensor) -> None:
        storage = self._storage_of(tensor)
        if storage is not None:
            storage.is_wanted = storage.is_wanted or self._input_of is None
            storage.offloaded_by = storage.offloaded_by or name

    @contextmanager
    def saving_inputs(self, name: str) -> Iterator[None]:
        before, self._input_of = self._input_of, name
        try:
            yield
        finally:
            self._input_of = before

    def _storage_of(self, tensor: Tensor) -> _Storage | None:
        """The record of a tensor's storage; None for a weight and for what a second run saves."""
        handlers = context.saved_tensor_handlers
        if not handlers or handlers[0] is not self or self._is_weight(tensor):
            return None
        key, memory = storage_key(tensor), tensor.untyped_storage()
        known = self._storages.get(key)
        if known is not None and known.alive() is memory:
            return known
        if known is not None:
            known.settle(self._recompute_bytes, self._offload_bytes)
        self._storages[key] = made = _Storage(ref(memory), memory.nbytes())
        return made

    def _is_weight(self, tensor: Tensor) -> bool:
        base = tensor._base if tensor._is_view() else tensor
        is_parameter = base is not None and base.is_leaf and base.requires_grad
        return is_parameter or storage_key(tensor) in self._weights

    # Called around second runs and copies.

    def recomputing(self, name: str) -> AbstractContextManager[None]:
        return self._timed(name, self._runs)

    def copying(self, name: str) -> AbstractContextManager[None]:
        return self._timed(name, self._copies)

    @contextmanager
    def _timed(self, name: str, spans: list[_Span]) -> Iterator[None]:
        outer = self._open
        self._open = span = _Span(name, outer if spans is self._runs else None, self._mark())
        spans.append(span)
        try:
            yield
        finally:
            self._open, span.end = outer, self._mark()

    def _mark(self) -> Any:
        """The time on the host, or an event on the current stream. None while a CUDA graph is recorded."""
        if self.device.type != "cuda":
            return time.perf_counter()
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def results(self, num_microbatches: int) -> tuple[dict[str, ActivationUse], dict[str, ActivationUse]]:
        """The effect of each name of recompute and of offload, after the step."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        uses = (
            _uses(self._recompute_bytes, self._runs, num_microbatches),
            _uses(self._offload_bytes, self._copies, num_microbatches),
        )
        self._runs, self._copies = [], []
        return uses


def _uses(kept: dict[str, float], spans: list[_Span], num_microbatches: int) -> dict[str, ActivationUse]:
    uses: dict[str, ActivationUse] = {name: ActivationUse(total / num_microbatches) for name, total in kept.items()}
    for span in reversed(spans):  # a span ends after those inside it, which were opened later
        if span.start is None or span.end is None:
            continue
        whole = _seconds_between(span.start, span.end)
        if span.outer is not None:
            span.outer.inner_seconds += whole
        use = uses.setdefault(span.name, ActivationUse())
        use.seconds += max(0.0, whole - span.inner_seconds)
        use.times += 1
    return uses


def _seconds_between(start: Any, end: Any) -> float:
    return float(end - start) if isinstance(start, float) else float(start.elapsed_time(end)) / 1e3
