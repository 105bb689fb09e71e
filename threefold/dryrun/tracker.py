"""Live bytes, by storage: what is made, grows, shrinks and goes, in the order it happens.

A dispatch mode sees every result; a storage counts once, however many views it has, and goes
when the last of them does. All changes are kept, so that afterwards the peak can be looked into.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from threefold.dryrun.where import Spot, Where

_DEVICE = torch.ops.prim.device.default


class Block:
    """A storage: where it was made and, for what has a name, which term it belongs to."""

    __slots__ = ("dtype", "name", "num_bytes", "operation", "shape", "spot", "term")

    def __init__(self, num_bytes: int, spot: Spot, operation: str, shape: tuple[int, ...], dtype: str) -> None:
        self.num_bytes, self.spot, self.operation, self.shape, self.dtype = num_bytes, spot, operation, shape, dtype
        self.term: str | None = None
        self.name = ""


# Bytes that a kernel needs beside its results while it runs.
Workspace = Callable[[tuple[Any, ...]], int]
Watcher = Callable[[Any, tuple[Any, ...]], None]
Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def _as_it_is(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


class Tracker(TorchDispatchMode):
    """`granule`: sizes are rounded up to multiples, as an allocator does. `run` runs an operator. Tensors on a device
    of the type `ignored` do not count."""

    def __init__(
        self,
        where: Where,
        granule: int = 1,
        workspaces: dict[Any, Workspace] | None = None,
        run: Run = _as_it_is,
        ignored: str = "meta",
    ) -> None:
        super().__init__()
        self.run, self.ignored = run, ignored
        self.where, self.granule, self.workspaces = where, granule, workspaces or {}
        self.live: dict[int, tuple[Block, Any]] = {}
        self.changes: list[tuple[Block, int]] = []
        self.now = self.peak = 0
        self.begun = 0  # changes that only say what was there before
        self.peak_at = 0  # changes up to and with the one that made the peak
        self.peak_spot = Spot("build")
        self.watchers: list[Watcher] = []
        self._held: list[Block] = []
        self.marks: list[tuple[int, Spot]] = []  # from which change on a phase of a microbatch lasted

    def block(self, x: Tensor) -> Block | None:
        held = self.live.get(_storage(x)._cdata)
        return held[0] if held else None

    def label(self, x: Tensor, term: str, name: str) -> None:
        block = self.block(x)
        if block is not None:
            block.term, block.name = term, name

    def hold(self, size: int, name: str) -> None:
        """Memory that no tensor has, from here on."""
        block = Block(0, self.where(), name, (), "")
        block.term, block.name = "workspace", name
        self._held.append(block)
        self._change(block, self._round(size))

    def begin(self) -> None:
        """Forget what was before, but for what is left of it."""
        left = [*self._held, *(block for block, _ in self.live.values())]
        self.changes = [(block, block.num_bytes) for block in left]
        self.begun = len(self.changes)
        self.peak, self.peak_at, self.peak_spot = self.now, len(self.changes), self.where()
        self.marks = []

    def at_peak(self) -> Iterable[tuple[Block, int]]:
        """What was live, and the size it had."""
        sizes: dict[int, int] = {}
        blocks: dict[int, Block] = {}
        for block, change in self.changes[: self.peak_at]:
            sizes[id(block)] = sizes.get(id(block), 0) + change
            blocks[id(block)] = block
        for key, size in sizes.items():
            if size:
                yield blocks[key], size

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:  # asked of fake tensors more often than all else together
            return _device(args[0])
        out = self.run(func, args, kwargs or {})
        for x in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(x, Tensor) and _device(x).type != self.ignored:
                self._see(x, func)
        if func in self.workspaces:
            block = Block(0, self.where(), str(func), (), "")
            block.term = "workspace"
            self._change(block, self._round(self.workspaces[func](args)))
            self._change(block, -block.num_bytes)
        for watcher in self.watchers:
            watcher(func, args)
        return out

    def __enter__(self) -> "Tracker":
        # FSDP frees and fills gathered weights by resizing their storage, which no dispatch sees.
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = self._resized  # type: ignore[assignment, method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    @property
    def _resized(self) -> Callable[[torch.UntypedStorage, int], Any]:
        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            done = self._resize(storage, size)
            held = self.live.get(storage._cdata)
            if held:
                self._change(held[0], self._round(size) - held[0].num_bytes)
                held[0].term = held[0].term or "workspace"
            return done

        return resize

    def _see(self, x: Tensor, func: Any) -> None:
        storage = _storage(x)
        key, size = storage._cdata, self._round(storage.nbytes())
        held = self.live.get(key)
        if held is not None:
            if held[0].num_bytes != size:
                self._change(held[0], size - held[0].num_bytes)
            return
        block = Block(0, self._mark(), str(func), tuple(x.shape), str(x.dtype).removeprefix("torch."))

        def gone(_: Any) -> None:
            self.live.pop(key, None)
            self._change(block, -block.num_bytes)

        self.live[key] = block, weakref.ref(storage, gone)
        self._change(block, size)

    def _mark(self) -> Spot:
        spot = self.where()
        last = self.marks[-1][1] if self.marks else None
        if last is None or (last.phase, last.microbatch) != (spot.phase, spot.microbatch):
            self.marks.append((len(self.changes), spot))
        return spot

    def _change(self, block: Block, change: int) -> None:
        if not change:
            return
        block.num_bytes += change
        self.now += change
        self.changes.append((block, change))
        if self.now > self.peak:
            self.peak, self.peak_at, self.peak_spot = self.now, len(self.changes), self.where()

    def _round(self, size: int) -> int:
        return -(-size // self.granule) * self.granule


def _storage(x: Tensor) -> torch.UntypedStorage:
    local = getattr(x, "_local_tensor", x)  # of a DTensor
    storage: torch.UntypedStorage = local.untyped_storage()
    return storage


def _device(x: Tensor) -> torch.device:
    """Without a dispatch, which asking a fake tensor would be."""
    found: torch.device = getattr(x, "fake_device", None) or x.device
    return found
