"""Every collective of the engine: one place that counts bytes, tells observers, and knows torch's versions.

There are two kinds of functions. `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all` and `send_recv` start a
call on plain tensors and return a `PendingCollective` to wait for. `gather_along`, `reduce_scatter_along` and
`all_to_all_rows` wait for their result and have a backward. A trivial group, which is one rank
without a communicator, costs nothing: the result is the input or a copy of it.

The watchdog, the dry run's ledger of collectives and the overlap measurement see each call by `observe_collectives`.
For example, an all-reduce of 1,000 bf16 numbers over four ranks is `CollectiveCall(group, "all_reduce", 3000)`: each
rank sends 2 * 2,000 * 3/4 bytes.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from threefold.engine.context import context, override, timed_wait
from threefold.engine.device import device_type
from threefold.engine.dist.mesh import Group

_HALF_DTYPES = (torch.bfloat16, torch.float16)
# torch 2.13 renamed both functions and warns about the old names; torch 2.11 has only the old names.
_ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """One collective, as observers see it before it starts."""

    group: Group
    operation: str  # "all_reduce", "all_gather", "reduce_scatter", "all_to_all" or "send"
    num_bytes: int  # sent by this rank to other ranks


class CallListener:
    """Follows one call from its start to its end. An observer may return one."""

    def on_start(self, work: Any) -> None:
        """The call was handed to the backend, which returned `work`."""

    def on_wait(self) -> None:
        """Some code needs the result now and waits for it."""

    def on_end(self) -> None:
        """The result is there."""


@dataclass(frozen=True)
class _EndListener(CallListener):
    """A listener made of an observer's plain function, which is called at the end."""

    callback: Callable[[], None]

    def on_end(self) -> None:
        self.callback()


Observer = Callable[[CollectiveCall], CallListener | Callable[[], None] | None]


def observe_collectives(observer: Observer) -> AbstractContextManager[None]:
    """Call `observer` before each collective inside the `with` block.

    The observer may return a `CallListener`, a function to call when the collective has ended, or None.
    """
    return override("collective_observers", (*context.collective_observers, observer))


class PendingCollective:
    """A collective under way. `wait` may be called more than once."""

    def __init__(self, work: Any, after: Callable[[], object] | None, listeners: list[CallListener]) -> None:
        self._work, self._after, self._listeners = work, after, listeners

    @classmethod
    def completed(cls) -> "PendingCollective":
        """A collective that had nothing to do."""
        return cls(None, None, [])

    def wait(self) -> None:
        for listener in self._listeners:
            listener.on_wait()
        if self._work is not None:
            with timed_wait():
                self._work.wait()
            self._work = None
        if self._after is not None:
            self._after()
            self._after = None
        for listener in self._listeners:
            listener.on_end()
        self._listeners = []


def _start(
    group: Group, operation: str, num_bytes: int, call: Callable[[], Any], after: Callable[[], object] | None = None
) -> PendingCollective:
    """Tell the observers, then start the call. `after` runs once the first `wait` is over."""
    seen = CollectiveCall(group, operation, num_bytes)
    answers = [answer for observer in context.collective_observers if (answer := observer(seen)) is not None]
    listeners = [answer if isinstance(answer, CallListener) else _EndListener(answer) for answer in answers]
    work = call()
    for listener in listeners:
        listener.on_start(work)
    return PendingCollective(work, after, listeners)


def _num_bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _needs_fp32_sum(x: Tensor) -> bool:
    """gloo would add bf16 numbers in bf16, where NCCL adds them in fp32."""
    return x.dtype in _HALF_DTYPES and device_type(x.device) == "cpu"


def all_reduce(x: Tensor, group: Group, op: str = "sum") -> PendingCollective:
    """Sum, or take the maximum, over the ranks of the group, in place."""
    if group.is_trivial:
        return PendingCollective.completed()
    kind = dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM
    buffer = x.float() if _needs_fp32_sum(x) else x
    sent = 2 * _num_bytes(x) * (group.size - 1) // group.size
    copy = (lambda: x.copy_(buffer)) if buffer is not x else None
    return _start(
        group, "all_reduce", sent, lambda: dist.all_reduce(buffer, kind, group=group.handle, async_op=True), copy
    )


def all_gather(out: Tensor, x: Tensor, group: Group) -> PendingCollective:
    """Fill `out` of shape (size * n, ...) with the `x` of shape (n, ...) of every rank, in the order of ranks."""
    if group.is_trivial:
        out.copy_(x)
        return PendingCollective.completed()
    sent = _num_bytes(x) * (group.size - 1)
    return _start(
        group,
        "all_gather",
        sent,
        lambda: _ALL_GATHER(out, x.contiguous(), group=group.handle, async_op=True),
    )


def reduce_scatter(out: Tensor, x: Tensor, group: Group) -> PendingCollective:
    """Fill `out` of shape (n, ...) with this rank's part of the sum over ranks of `x` of shape (size * n, ...)."""
    if group.is_trivial:
        out.copy_(x)
        return PendingCollective.completed()
    sent = _num_bytes(x) * (group.size - 1) // group.size
    source = x.float() if _needs_fp32_sum(x) else x.contiguous()
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
) -> PendingCollective:
    """Send `sizes[i]` rows of `x` to rank i and receive `out_sizes[i]` rows from it; no sizes: an even split."""
    if group.is_trivial:
        out.copy_(x)
        return PendingCollective.completed()
    row = _num_bytes(x) // max(1, len(x))
    own = len(x) // group.size if sizes is None else sizes[group.rank]
    return _start(
        group,
        "all_to_all",
        _num_bytes(x) - own * row,
        lambda: dist.all_to_all_single(
            out,
            x.contiguous(),
            None if out_sizes is None else list(out_sizes),
            None if sizes is None else list(sizes),
            group=group.handle,
            async_op=True,
        ),
    )


class _SeveralWorks:
    """Several of the backend's works that are waited for together."""

    def __init__(self, works: list[Any]) -> None:
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def send_recv(out: list[Tensor], x: list[Tensor], group: Group, to: int, source: int) -> PendingCollective:
    """Send tensors to the rank with index `to` in the group and receive as many from the one with index `source`."""
    if group.is_trivial:
        for received, sent in zip(out, x, strict=True):
            received.copy_(sent)
        return PendingCollective.completed()
    ops = [dist.P2POp(dist.isend, t.contiguous(), group.ranks[to], group.handle) for t in x]
    ops += [dist.P2POp(dist.irecv, t, group.ranks[source], group.handle) for t in out]
    return _start(group, "send", sum(map(_num_bytes, x)), lambda: _SeveralWorks(dist.batch_isend_irecv(ops)))


def gather_along(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """All-gather along `dim`. The backward reduce-scatters the gradient."""
    return x if group.is_trivial else _GatherAlong.apply(x, group, dim)


def reduce_scatter_along(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Reduce-scatter along `dim`. The backward all-gathers the gradient."""
    return x if group.is_trivial else _ReduceScatterAlong.apply(x, group, dim)


def all_to_all_rows(
    x: Tensor, group: Group, out_sizes: Sequence[int] | None = None, sizes: Sequence[int] | None = None
) -> Tensor:
    """All-to-all of rows. The backward sends the gradients of rows back to where the rows came from."""
    return x if group.is_trivial else _AllToAllRows.apply(x, group, out_sizes, sizes)


def _gather_now(x: Tensor, group: Group, dim: int) -> Tensor:
    front = x.movedim(dim, 0).contiguous()
    out = front.new_empty(group.size * front.shape[0], *front.shape[1:])
    all_gather(out, front, group).wait()
    return out.movedim(0, dim).contiguous()  # copied once here, or every GEMM that reads it saves a copy of its own


def _reduce_scatter_now(x: Tensor, group: Group, dim: int) -> Tensor:
    front = x.movedim(dim, 0).contiguous()
    out = front.new_empty(front.shape[0] // group.size, *front.shape[1:])
    reduce_scatter(out, front, group).wait()
    return out.movedim(0, dim)


def _all_to_all_now(x: Tensor, group: Group, out_sizes: Sequence[int] | None, sizes: Sequence[int] | None) -> Tensor:
    rows = len(x) if out_sizes is None else sum(out_sizes)
    out = x.new_empty(rows, *x.shape[1:])
    all_to_all(out, x, group, out_sizes, sizes).wait()
    return out


class _GatherAlong(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.call = group, dim
        return _gather_now(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _reduce_scatter_now(grad, *ctx.call), None, None


class _ReduceScatterAlong(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.call = group, dim
        return _reduce_scatter_now(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gather_now(grad, *ctx.call), None, None


class _AllToAllRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group, out_sizes: Sequence[int] | None, sizes: Sequence[int] | None
    ) -> Tensor:
        ctx.call = group, sizes, out_sizes
        return _all_to_all_now(x, group, out_sizes, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all_now(grad, *ctx.call), None, None, None
