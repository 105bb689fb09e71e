"""Live bytes of a step, counted by storage, in the order in which storages are made, resized and freed.

`MemoryTracker` is a torch dispatch mode, so it sees the result of every operator. A storage counts once, however many
views it has, and is freed when its last view is. All changes are recorded, so that the allocations that are live at the
peak can be listed after the step. `rehearse_rank` uses it on meta tensors, `benchmarks/peak_breakdown.py` on a GPU.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from threefold.cost.memory.threefold.graphs.torch_pool import GraphPool
from threefold.dryrun.tracking.allocation_origin import Origin, OriginTracker

_GET_DEVICE = torch.ops.prim.device.default


class Allocation:
    """One storage: its size now, its origin and, once it is labeled, its memory term and the name of its tensor."""

    __slots__ = ("dtype", "is_transient", "name", "num_bytes", "operation", "origin", "pool", "shape", "term")

    def __init__(self, num_bytes: int, origin: Origin, operation: Any, shape: tuple[int, ...], dtype: Any) -> None:
        self.num_bytes, self.origin, self.operation = num_bytes, origin, operation
        self.shape, self.dtype = shape, dtype
        self.term: str | None = None
        self.name = ""
        self.is_transient = False  # whether the forward that made it has freed it too
        self.pool: GraphPool | None = None  # None: the common memory, to which freed memory returns

    @property
    def dtype_name(self) -> str:
        """The dtype as text. Few allocations are ever printed, so that it is made only then."""
        return str(self.dtype).removeprefix("torch.")


Workspace = Callable[[tuple[Any, ...]], int]  # arguments of an operator -> bytes its kernel needs beside the results
OperatorObserver = Callable[[Any, tuple[Any, ...]], None]
OperatorRunner = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


class MemoryTracker(TorchDispatchMode):
    """Counts the live bytes of all tensors that are made while the mode is on."""

    def __init__(
        self,
        origins: OriginTracker,
        granule_bytes: int = 1,
        workspaces: dict[Any, Workspace] | None = None,
        run_operator: OperatorRunner = _call,
        ignored_device: str = "meta",
    ) -> None:
        """Make a tracker; `with tracker:` turns it on.

        Args:
            origins: answers which module, phase and microbatch runs now.
            granule_bytes: sizes are rounded up to a multiple, as an allocator does.
            workspaces: scratch memory of operators, which counts only while the operator runs.
            run_operator: runs an operator; a rehearsal replaces some of them.
            ignored_device: tensors on a device of this type do not count.
        """
        super().__init__()
        self.origins, self.granule_bytes = origins, granule_bytes
        # By the operator's address here and below: operators live for ever, and their hash is computed in Python.
        self.workspaces = {id(func): size for func, size in (workspaces or {}).items()}
        self.run_operator, self.ignored_device = run_operator, ignored_device
        self.observers: list[OperatorObserver] = []  # called after every operator
        self.live: dict[int, tuple[Allocation, Any]] = {}  # by the address of the storage, with a weak reference to it
        self.changes: list[tuple[Allocation, int]] = []
        self.num_initial_changes = 0  # the first changes state what was live when the step started
        self.live_bytes = self.peak_bytes = 0
        self.num_changes_at_peak = 0  # up to and including the change that reaches the peak
        self.peak_origin = Origin("build")
        self.phase_starts: list[tuple[int, Origin]] = []  # number of changes when a phase or a microbatch starts
        self._reserved: list[Allocation] = []
        self._pools: dict[GraphPool, Allocation] = {}  # each with the allocation that counts what the pool holds
        self._pool: GraphPool | None = None  # in which allocations are made now

    def allocation(self, x: Tensor) -> Allocation | None:
        found = self.live.get(_storage(x)._cdata)
        return found[0] if found else None

    def label(self, x: Tensor, term: str, name: str) -> None:
        allocation = self.allocation(x)
        if allocation is not None:
            allocation.term, allocation.name = term, name

    def reserve(self, size: int, name: str) -> None:
        """Count memory that no tensor holds, such as a library's workspace, from now on."""
        allocation = Allocation(0, self.origins.current(), name, (), "")
        allocation.term, allocation.name = "workspace", name
        self._reserved.append(allocation)
        self._record(allocation, self._round(size))

    def make_pool(self) -> GraphPool:
        allocation = Allocation(0, self.origins.current(), "pool", (), "")
        allocation.term, allocation.name = "graphs", "memory pool of CUDA graphs"
        pool = GraphPool()
        self._pools[pool] = allocation
        return pool

    @contextmanager
    def allocating_in(self, pool: GraphPool) -> Iterator[None]:
        """Make allocations inside the `with` block in this pool."""
        before, self._pool = self._pool, pool
        try:
            yield
        finally:
            self._pool = before

    def start_step(self) -> None:
        """Forget the history so far. What is live now, and what pools hold, becomes the initial state."""
        left = [*self._reserved, *(allocation for allocation, _ in self.live.values() if allocation.pool is None)]
        left += self._pools.values()
        self.changes = [(allocation, allocation.num_bytes) for allocation in left]
        self.num_initial_changes = len(self.changes)
        self._record_peak()
        self.phase_starts = []

    def live_at_peak(self) -> Iterable[tuple[Allocation, int]]:
        """The allocations that were live at the peak, with the size that each had then."""
        sizes: dict[int, int] = {}
        allocations: dict[int, Allocation] = {}
        for allocation, change in self.changes[: self.num_changes_at_peak]:
            sizes[id(allocation)] = sizes.get(id(allocation), 0) + change
            allocations[id(allocation)] = allocation
        for key, size in sizes.items():
            if size:
                yield allocations[key], size

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is _GET_DEVICE:  # called on fake tensors more often than all other operators together
            return _device(args[0])
        out = self.run_operator(func, args, kwargs or {})
        for x in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(x, Tensor) and _device(x).type != self.ignored_device:
                self._track(x, func)
        if id(func) in self.workspaces:
            allocation = Allocation(0, self.origins.current(), func, (), "")
            allocation.term, allocation.pool = "workspace", self._pool
            self._record(allocation, self._round(self.workspaces[id(func)](args)))
            self._record(allocation, -allocation.num_bytes)
        for observer in self.observers:
            observer(func, args)
        return out

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No operator is compiled under this mode, so torch need not guard each call of it against that."""
        return False

    def __enter__(self) -> "MemoryTracker":
        # FSDP frees and refills gathered weights by resizing their storage, which is no dispatched operator.
        self._torch_resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = self._tracked_resize  # type: ignore[assignment, method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._torch_resize  # type: ignore[method-assign]
        super().__exit__(*error)

    @property
    def _tracked_resize(self) -> Callable[[torch.UntypedStorage, int], Any]:
        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            resized = self._torch_resize(storage, size)
            found = self.live.get(storage._cdata)
            if found:
                self._record(found[0], self._round(size) - found[0].num_bytes)
                found[0].term = found[0].term or "workspace"
            return resized

        return resize

    def _track(self, x: Tensor, func: Any) -> None:
        storage = _storage(x)
        key, size = storage._cdata, self._round(storage.nbytes())
        found = self.live.get(key)
        if found is not None:
            if found[0].num_bytes != size:
                self._record(found[0], size - found[0].num_bytes)
            return
        allocation = Allocation(0, self._current_origin(), func, x.shape, x.dtype)
        allocation.pool = self._pool

        def on_free(_: Any) -> None:
            self.live.pop(key, None)
            now, made = self.origins.current(), allocation.origin
            allocation.is_transient = made.phase == "forward" == now.phase and made.microbatch == now.microbatch
            self._record(allocation, -allocation.num_bytes)

        self.live[key] = allocation, weakref.ref(storage, on_free)
        self._record(allocation, size)

    def _current_origin(self) -> Origin:
        origin = self.origins.current()
        last = self.phase_starts[-1][1] if self.phase_starts else None
        if last is None or (last.phase, last.microbatch) != (origin.phase, origin.microbatch):
            self.phase_starts.append((len(self.changes), origin))
        return origin

    def _record(self, allocation: Allocation, change: int) -> None:
        if not change:
            return
        allocation.num_bytes += change
        if allocation.pool is not None:
            growth = allocation.pool.resize(id(allocation), allocation.num_bytes)
            self._record(self._pools[allocation.pool], growth)
            return
        self.live_bytes += change
        self.changes.append((allocation, change))
        if self.live_bytes > self.peak_bytes:
            self._record_peak()

    def _record_peak(self) -> None:
        self.peak_bytes, self.num_changes_at_peak = self.live_bytes, len(self.changes)
        self.peak_origin = self.origins.current()

    def _round(self, size: int) -> int:
        return -(-size // self.granule_bytes) * self.granule_bytes


def _storage(x: Tensor) -> torch.UntypedStorage:
    local = getattr(x, "_local_tensor", x)  # the local shard of a DTensor
    storage: torch.UntypedStorage = local.untyped_storage()
    return storage


def _device(x: Tensor) -> torch.device:
    """The device of a tensor. Asking a fake tensor for `.device` would dispatch an operator; its field does not."""
    found: torch.device = getattr(x, "fake_device", None) or x.device
    return found


MAX_POINTS = 1000


class LiveChange(NamedTuple):
    """An allocation is made, resized or released. `--snapshot` writes them for PyTorch's memory viewer."""

    key: int  # of the allocation
    num_bytes: int  # of the change; negative where memory is released
    term: str
    places: tuple[str, ...]  # the operator, then the tensor's name or the phase and module that made it


def live_changes(tracker: MemoryTracker, term_of: Callable[[Allocation], str]) -> tuple[LiveChange, ...]:
    """All changes since the step started, with what was live then as the first ones."""
    labels: dict[int, tuple[int, str, tuple[str, ...]]] = {}
    found = []
    for allocation, change in list(tracker.changes):
        if id(allocation) not in labels:
            place = (str(allocation.operation), allocation.name or str(allocation.origin))
            labels[id(allocation)] = (len(labels), term_of(allocation), place)
        key, term, places = labels[id(allocation)]
        found.append(LiveChange(key, change, term, places))
    return tuple(found)


def live_bytes_timeline(tracker: MemoryTracker, max_points: int = MAX_POINTS) -> list[dict[str, Any]]:
    """One point for each interval of equally many changes: the highest live bytes in it.

    `change` is the number of allocations and releases since the step started.
    """
    changes = list(tracker.changes)  # a copy, because garbage collection during this loop adds releases to the list
    begin = tracker.num_initial_changes
    interval = -(-(len(changes) - begin) // max_points) or 1
    phase_starts = iter([*tracker.phase_starts, (len(changes) + 1, None)])
    _, origin = next(phase_starts)
    next_start, next_origin = next(phase_starts)
    points: list[dict[str, Any]] = []
    live = highest = sum(change for _, change in changes[:begin])
    for number, (_, change) in enumerate(changes[begin:], begin):
        live += change
        highest = max(highest, live)
        while number >= next_start:
            origin = next_origin or origin
            next_start, next_origin = next(phase_starts)
        if number % interval == interval - 1 or number == len(changes) - 1:
            assert origin is not None
            points.append(
                {"change": number - begin, "bytes": highest, "phase": origin.phase, "microbatch": origin.microbatch}
            )
            highest = live
    return points
