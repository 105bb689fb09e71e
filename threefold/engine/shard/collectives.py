"""Every collective of the engine goes through here: one place to count bytes, to watch, and to know torch's versions.

`gather`, `scatter`, `exchange` and `total` can be differentiated; the others start a call on plain tensors and return
what to wait for. A group of one rank costs nothing, unless it was made a real one on purpose.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from threefold.engine.mesh import Group
from threefold.engine.ways import way

_NARROW = (torch.bfloat16, torch.float16)
# torch 2.13 renamed both and warns about the old names; 2.11 has no others.
_ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True, slots=True)
class Call:
    """One collective: `num_bytes` is what this rank sends to others."""

    group: Group
    operation: str
    num_bytes: int


class Watch:
    """What an observer may return to see more of a call than its end."""

    def started(self, work: Any) -> None: ...

    def waits(self) -> None:
        """Somebody needs the result now."""

    def ended(self) -> None: ...


@dataclass(frozen=True)
class _Told(Watch):
    tell: Callable[[], None]

    def ended(self) -> None:
        self.tell()


Observer = Callable[[Call], Watch | Callable[[], None] | None]
_observers: list[Observer] = []


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """`observer` sees each call before it starts; what it returns is called when the call has ended."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


class Pending:
    """A collective under way. `wait` may be called more than once."""

    def __init__(self, work: Any, after: Callable[[], object] | None, watches: list[Watch]) -> None:
        self._work, self._after, self._watches = work, after, watches

    def wait(self) -> None:
        for watch in self._watches:
            watch.waits()
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._after is not None:
            self._after()
            self._after = None
        for watch in self._watches:
            watch.ended()
        self._watches = []


def _start(
    group: Group, operation: str, num_bytes: int, call: Callable[[], Any], after: Callable[[], object] | None = None
) -> Pending:
    seen = Call(group, operation, num_bytes)
    said = [answer for observer in list(_observers) if (answer := observer(seen)) is not None]
    watches = [answer if isinstance(answer, Watch) else _Told(answer) for answer in said]
    work = call()
    for watch in watches:
        watch.started(work)
    return Pending(work, after, watches)


def _size(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _sums_narrowly(x: Tensor, group: Group) -> bool:
    """gloo adds bf16 in bf16; NCCL in fp32."""
    return x.dtype in _NARROW and way(x.device) == "cpu"


def all_reduce(x: Tensor, group: Group, op: str = "sum") -> Pending:
    """In place."""
    if group.alone:
        return Pending(None, None, [])
    kind = dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM
    wide = x.float() if _sums_narrowly(x, group) else x
    sent = 2 * _size(x) * (group.size - 1) // group.size
    copy = (lambda: x.copy_(wide)) if wide is not x else None
    return _start(
        group, "all_reduce", sent, lambda: dist.all_reduce(wide, kind, group=group.handle, async_op=True), copy
    )


def all_gather(out: Tensor, x: Tensor, group: Group) -> Pending:
    """`out` is (size * n, ...) for an `x` of (n, ...), in the order of ranks."""
    if group.alone:
        out.copy_(x)
        return Pending(None, None, [])
    sent = _size(x) * (group.size - 1)
    return _start(
        group,
        "all_gather",
        sent,
        lambda: _ALL_GATHER(out, x.contiguous(), group=group.handle, async_op=True),
    )


def reduce_scatter(out: Tensor, x: Tensor, group: Group) -> Pending:
    """`out` is (n, ...): this rank's part of the sum over ranks of their (size * n, ...)."""
    if group.alone:
        out.copy_(x)
        return Pending(None, None, [])
    sent = _size(x) * (group.size - 1) // group.size
    narrow = _sums_narrowly(x, group)
    source = x.float() if narrow else x.contiguous()
    direct = out.is_contiguous() and out.dtype == source.dtype
    target = out if direct else torch.empty(out.shape, dtype=source.dtype, device=out.device)
    copy = (lambda: out.copy_(target)) if target is not out else None
    return _start(
        group,
        "reduce_scatter",
        sent,
        lambda: _REDUCE_SCATTER(target, source, group=group.handle, async_op=True),
        copy,
    )


def all_to_all(
    out: Tensor, x: Tensor, group: Group, out_sizes: Sequence[int] | None = None, sizes: Sequence[int] | None = None
) -> Pending:
    """Rows of `x` in `sizes` to each rank, `out_sizes` from each; even where absent."""
    if group.alone:
        out.copy_(x)
        return Pending(None, None, [])
    row = _size(x) // max(1, len(x))
    own = len(x) // group.size if sizes is None else sizes[group.rank]
    return _start(
        group,
        "all_to_all",
        _size(x) - own * row,
        lambda: dist.all_to_all_single(
            out,
            x.contiguous(),
            None if out_sizes is None else list(out_sizes),
            None if sizes is None else list(sizes),
            group=group.handle,
            async_op=True,
        ),
    )


class _Several:
    def __init__(self, works: list[Any]) -> None:
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def pass_on(out: list[Tensor], x: list[Tensor], group: Group, to: int, source: int) -> Pending:
    """Tensors to the rank at place `to` of the group, and as many from the one at `source`."""
    if group.alone:
        for mine, given in zip(out, x, strict=True):
            mine.copy_(given)
        return Pending(None, None, [])
    ops = [dist.P2POp(dist.isend, t.contiguous(), group.ranks[to], group.handle) for t in x]
    ops += [dist.P2POp(dist.irecv, t, group.ranks[source], group.handle) for t in out]
    return _start(group, "send", sum(map(_size, x)), lambda: _Several(dist.batch_isend_irecv(ops)))


def gather(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """All parts along `dim`; the backward adds up what each rank says of this rank's part."""
    return x if group.alone else _Gather.apply(x, group, dim)


def scatter(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """This rank's part along `dim` of the sum over ranks; the backward gathers."""
    return x if group.alone else _Scatter.apply(x, group, dim)


def total(x: Tensor, group: Group) -> Tensor:
    """The sum over ranks. Each rank's gradient is its own: the sum is used alike on every rank, once in all."""
    return x if group.alone else _Total.apply(x, group)


def exchange(
    x: Tensor, group: Group, out_sizes: Sequence[int] | None = None, sizes: Sequence[int] | None = None
) -> Tensor:
    """All-to-all of rows; the backward sends them home."""
    return x if group.alone else _Exchange.apply(x, group, out_sizes, sizes)


def _gathered(x: Tensor, group: Group, dim: int) -> Tensor:
    front = x.movedim(dim, 0).contiguous()
    out = front.new_empty(group.size * front.shape[0], *front.shape[1:])
    all_gather(out, front, group).wait()
    return out.movedim(0, dim).contiguous()  # once here, or every product that reads it keeps a copy of its own


def _scattered(x: Tensor, group: Group, dim: int) -> Tensor:
    front = x.movedim(dim, 0).contiguous()
    out = front.new_empty(front.shape[0] // group.size, *front.shape[1:])
    reduce_scatter(out, front, group).wait()
    return out.movedim(0, dim)


def _exchanged(x: Tensor, group: Group, out_sizes: Sequence[int] | None, sizes: Sequence[int] | None) -> Tensor:
    rows = len(x) if out_sizes is None else sum(out_sizes)
    out = x.new_empty(rows, *x.shape[1:])
    all_to_all(out, x, group, out_sizes, sizes).wait()
    return out


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.call = group, dim
        return _gathered(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _scattered(grad, *ctx.call), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.call = group, dim
        return _scattered(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(grad, *ctx.call), None, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        out = x.clone()
        all_reduce(out, group).wait()
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group, out_sizes: Sequence[int] | None, sizes: Sequence[int] | None
    ) -> Tensor:
        ctx.call = group, sizes, out_sizes
        return _exchanged(x, group, out_sizes, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(grad, *ctx.call), None, None, None
