"""An exchange whose start and end are two nodes of the graph, in the backward as in the forward.

`begin` starts it and `end` waits. In the backward `end` starts the way of the gradients and `begin` waits for them, so
whatever lies between the two runs beside the exchange both times.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from threefold.engine.mesh import Group
from threefold.engine.shard.collectives import all_to_all

Wait = Callable[[], object]
Start = Callable[..., tuple[Sequence[Tensor], Wait]]  # tensors -> what they become, and how to wait for it


class Flight:
    """`go` carries tensors, `home` their gradients."""

    def __init__(self, go: Start, home: Start) -> None:
        self._go, self._home = go, home
        self._wait: Wait | None = None
        self._back: tuple[Sequence[Tensor], Wait] | None = None

    def start(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        out, self._wait = self._go(*tensors)
        return out

    def land(self) -> None:
        if self._wait is not None:
            self._wait()
            self._wait = None

    def start_back(self, grads: Sequence[Tensor]) -> None:
        self._back = self._home(*grads)

    def land_back(self, grads: Sequence[Tensor]) -> Sequence[Tensor]:
        if self._back is None:  # the graph was cut behind `begin` and nobody ran `end`'s backward
            self.start_back(grads)
        assert self._back is not None
        out, wait = self._back
        self._back = None
        wait()
        return out


def begin(flight: Flight | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """What arrives, perhaps not yet. Without a flight everything is where it should be."""
    return tensors if flight is None else _Begin.apply(flight, *tensors)


def end(flight: Flight | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tensors if flight is None else _End.apply(flight, *tensors)


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flight: Flight, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.flight = flight
        return tuple(flight.start(tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.flight.land_back(grads)


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flight: Flight, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.flight = flight
        flight.land()
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.flight.start_back(grads)
        return None, *grads


def swap(group: Group, sizes: Sequence[int], out_sizes: Sequence[int]) -> Flight | None:
    """An all-to-all of rows: `sizes` to each rank, `out_sizes` from each."""
    if group.alone:
        return None

    def there(*tensors: Tensor) -> tuple[Sequence[Tensor], Wait]:
        return start_all(tensors, group, out_sizes, sizes)

    def home(*grads: Tensor) -> tuple[Sequence[Tensor], Wait]:
        return start_all(grads, group, sizes, out_sizes)

    return Flight(there, home)


def start_all(
    tensors: Sequence[Tensor], group: Group, out_sizes: Sequence[int], sizes: Sequence[int]
) -> tuple[Sequence[Tensor], Wait]:
    out = [x.new_empty(sum(out_sizes), *x.shape[1:]) for x in tensors]
    pending = [all_to_all(y, x, group, out_sizes, sizes) for y, x in zip(out, tensors, strict=True)]

    def wait() -> None:
        for each in pending:
            each.wait()

    return out, wait
