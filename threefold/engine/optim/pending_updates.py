"""Updates of parameters that run during the next forward, which waits for each parameter just before its first use.

`AdamW` starts them where states are on the host. Data parallelism (`DataParallel.defer_updates`) lets them stay pending
and says which tensors they write. On a GPU the updates run on a stream of their own. On a CPU an update runs when it is
waited for: there is nothing to gain, but a wait that is missing shows in any test.

`mark_pending` gives a tensor another class until its values are there: a subclass of its own, whose
`__torch_function__` torch calls before any operation on the tensor, whoever asks for it and wherever the reference
comes from. It waits, the tensor becomes a plain one again, and the operation runs. So no reader has to know that
updates or gathers of weights (`data_parallel/zero1.py`) may be under way, none can forget to wait, and a tensor that is
ready costs nothing.

Some of torch's functions read a tensor without asking its class: `torch.tensor`, `torch.func.grad`, scripted modules.
On a CPU they find NaN, because the tensor has no memory of its own until its values are there. So a reader that does
not wait shows in every test, and never trains on old weights.

What nothing sees is memory that was taken from the tensor before it was marked: views, detached aliases, and addresses
in CUDA graphs. `tests/engine/optim/test_raw_reads.py` lists who keeps such memory, and why that is right.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from threefold.engine.device import is_simulated

_ATTRIBUTES = "grad requires_grad grad_fn is_leaf shape dtype device layout is_cuda is_cpu is_meta ndim"
# What may be asked of a pending tensor: its gradient and what describes it. Anything else waits, also what is unknown.
_DESCRIPTIONS: frozenset[Any] = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES.split()),
        getattr(Tensor, "grad").__set__,  # noqa: B009  mypy takes it for a tensor
        *(Tensor.numel, Tensor.size, Tensor.dim, Tensor.element_size, Tensor.__len__),
    }
)


class _Pending:
    """The part of a pending tensor's class that waits."""

    __slots__ = ()
    _wait_for_values: Callable[[], None]
    _memory: Tensor | None  # what the tensor is given back when its values are there; None: it was left in place

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _DESCRIPTIONS:
            with without_waiting():
                return func(*args, **(kwargs or {}))
        wait_for(args)
        if kwargs:
            wait_for(kwargs.values())
        return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        wait_for([self])
        return self.__deepcopy__(memo)  # that of the plain class

    def __reduce_ex__(self, protocol: Any) -> Any:
        wait_for([self])
        return self.__reduce_ex__(protocol)


@cache
def _pending_class(plain: type[Tensor]) -> type[Tensor]:
    make_class: Callable[..., Any] = type(plain)  # parameters have a metaclass of their own
    return cast(type[Tensor], make_class(f"Pending{plain.__name__}", (_Pending, plain), {"__slots__": ()}))


def mark_pending(tensors: Iterable[Tensor], wait: Callable[[], None]) -> None:
    """Call `wait` before anything reads one of these tensors. It must call `mark_ready` when their values are there."""
    for tensor in tensors:
        plain = _plain_class(tensor)
        if not isinstance(tensor, _Pending):
            tensor._memory = _take_memory(tensor)  # type: ignore[attr-defined]
        tensor._wait_for_values = wait  # type: ignore[attr-defined]
        tensor.__class__ = _pending_class(plain)


def mark_ready(tensors: Iterable[Tensor]) -> None:
    """The values of these tensors are there: they are plain tensors again."""
    for tensor in tensors:
        if isinstance(tensor, _Pending):
            memory = tensor._memory
            tensor.__class__ = _plain_class(tensor)  # type: ignore[assignment]
            del tensor._wait_for_values, tensor._memory
            if memory is not None:
                tensor.data = memory


def _take_memory(tensor: Tensor) -> Tensor | None:
    """The memory of a tensor, which holds NaN instead. On a GPU it stays: a graph may be recorded meanwhile, and all
    that computes there is tested on a CPU too."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.device.type != "cpu" or not tensor.is_floating_point():
        return None
    memory = tensor.data
    tensor.data = _not_a_number(tensor.dtype).expand(tensor.shape)
    return memory


@cache
def _not_a_number(dtype: torch.dtype) -> Tensor:
    return torch.full((), math.nan, dtype=dtype)


def wait_for(values: Iterable[object]) -> None:
    """Wait for the pending tensors among these values and in lists inside of them."""
    for value in values:
        if isinstance(value, _Pending):
            value._wait_for_values()
        elif isinstance(value, list | tuple):
            wait_for(value)


def is_pending(tensor: Tensor) -> bool:
    return isinstance(tensor, _Pending)


def without_waiting() -> AbstractContextManager[object]:
    """Inside the `with` block nothing waits: for loops over gradients of many parameters, whose cost on the host is a
    tenth then."""
    return torch._C.DisableTorchFunctionSubclass()  # type: ignore[no-any-return]


def _plain_class(tensor: Tensor) -> type[Tensor]:
    kind = type(tensor)
    return kind.__mro__[2] if issubclass(kind, _Pending) else kind


class PendingUpdates:
    """The updates of one optimizer step, in the order of `names`.

    A gradient is held until its update was waited for. The stream that waits is the one on which gradients were
    allocated, so that their memory can be used again from then on.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.device = device
        self.positions: Mapping[str, int] = {name: n for n, name in enumerate(names)}
        self.is_deferred = False  # whether `start` returns while updates are pending
        self._tensors: Mapping[str, Sequence[Tensor]] = {}  # what deferred updates write, by name
        self._names = list(names)
        self._pending: deque[tuple[int, torch.cuda.Event | None, Tensor | None]] = deque()
        self._updates: Iterator[Tensor] = iter(())

    def defer(self, tensors: Mapping[str, Sequence[Tensor]]) -> None:
        """Let updates stay pending from now on. `tensors`, by name of the parameter, wait for its update when they are
        read; who defers waits for other memory that an update writes."""
        self.is_deferred, self._tensors = True, tensors

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        # A high priority: the kernels are short, and the link to the host waits for them.
        return torch.cuda.Stream(self.device, priority=-1)

    @cached_property
    def _gather_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    def hold(self, memory: Tensor) -> None:
        """Keep memory that the updates use from being used again before they are done, should its owner free it."""
        memory.record_stream(self._stream)

    def start(self, positions: Sequence[int], updates: Iterator[Tensor]) -> None:
        """Start the updates of the parameters at these positions, which rise. Each item that `updates` yields is the
        gradient of a parameter that was updated."""
        self.wait()
        if not positions:
            return
        if is_simulated() or self.device.type != "cuda":
            self._updates = updates
            self._pending.extend((position, None, None) for position in positions)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream):
                for position, grad in zip(positions, updates, strict=True):
                    updated = torch.cuda.Event()
                    updated.record(self._stream)
                    self._pending.append((position, updated, grad))
        if is_simulated() or not self.is_deferred:
            self.wait()
            return
        for position in positions:
            mark_pending(self._written_at(position), partial(self.wait_through, position))

    def _written_at(self, position: int) -> Sequence[Tensor]:
        return self._tensors.get(self._names[position], ())

    def is_pending(self, position: int) -> bool:
        """Return whether an update at this position or before it was not waited for yet."""
        return bool(self._pending) and self._pending[0][0] <= position

    def wait_through(self, position: int) -> None:
        """Wait for the updates up to this position. The host continues; the current stream waits."""
        if not self.is_pending(position):
            return
        last = None
        with torch.no_grad():
            while self._pending and self._pending[0][0] <= position:
                done, last, _ = self._pending.popleft()
                if last is None:
                    next(self._updates)
                mark_ready(self._written_at(done))
        if last is not None:
            torch.cuda.current_stream(self.device).wait_event(last)
        if not self._pending:
            next(self._updates, None)  # the end of the generator, which may have work there
            self._updates = iter(())

    def wait(self) -> None:
        """Wait for all updates."""
        self.wait_through(len(self.positions))

    def after(self, position: int) -> AbstractContextManager[object]:
        """Inside the `with` block, work that is started waits for the updates up to this position, and the current
        stream outside does not. A CPU waits here."""
        waited_for = next((event for at, event, _ in reversed(self._pending) if at <= position), None)
        if waited_for is None:
            self.wait_through(position)
            return nullcontext()
        self._gather_stream.wait_event(waited_for)
        return torch.cuda.stream(self._gather_stream)
