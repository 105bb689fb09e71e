"""Asynchronous exchanges as two autograd nodes: one starts the exchange, the other waits for it.

A dispatcher makes one `AsyncExchange` per microbatch. It calls `start_exchange` in one phase and `finish_exchange` in
the next. In the backward the order turns round: the node of `finish_exchange` starts sending the gradients and the node
of `start_exchange` waits for them. So whatever runs between the two calls overlaps with the exchange in both
directions.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from threefold.engine.dist.collectives import all_to_all
from threefold.engine.dist.mesh import Group

Wait = Callable[[], object]
Start = Callable[..., tuple[Sequence[Tensor], Wait]]  # tensors to send -> tensors to be received, and how to wait
Finish = Callable[[Sequence[Tensor]], Sequence[Tensor]]


class AsyncExchange:
    """One exchange of one microbatch: `forward` starts sending tensors, `backward` starts sending their gradients.

    `finish_backward` makes the gradients of the tensors from those that were received.
    """

    def __init__(self, forward: Start, backward: Start, finish_backward: Finish | None = None) -> None:
        self._forward, self._backward, self._finish_backward = forward, backward, finish_backward
        self._wait: Wait | None = None
        self._received_grads: tuple[Sequence[Tensor], Wait] | None = None

    def start_forward(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        received, self._wait = self._forward(*tensors)
        return received

    def wait_forward(self) -> None:
        if self._wait is not None:
            self._wait()
            self._wait = None

    def start_backward(self, grads: Sequence[Tensor]) -> None:
        self._received_grads = self._backward(*grads)

    def wait_backward(self, grads: Sequence[Tensor]) -> Sequence[Tensor]:
        # The autograd graph may be cut behind `start_exchange`, and then no `finish_exchange` has run its backward.
        if self._received_grads is None:
            self.start_backward(grads)
        assert self._received_grads is not None
        received, wait = self._received_grads
        self._received_grads = None
        wait()
        return received if self._finish_backward is None else self._finish_backward(received)


def start_exchange(exchange: AsyncExchange | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The received tensors, which may not have arrived yet; `tensors` themselves where there is no exchange."""
    return tensors if exchange is None else _StartExchange.apply(exchange, *tensors)


def finish_exchange(exchange: AsyncExchange | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The results of `start_exchange` once they have arrived."""
    return tensors if exchange is None else _FinishExchange.apply(exchange, *tensors)


class _StartExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: AsyncExchange, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return tuple(exchange.start_forward(tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.exchange.wait_backward(grads)


class _FinishExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: AsyncExchange, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        exchange.wait_forward()
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.exchange.start_backward(grads)
        # The node of `start_exchange` takes what was received. Autograd holds on to what is returned here, so it gets
        # gradients that take no memory.
        return None, *(grad.new_zeros(()).expand_as(grad) for grad in grads)


def all_to_all_exchange(group: Group, sizes: Sequence[int], out_sizes: Sequence[int]) -> AsyncExchange | None:
    """An all-to-all of rows: `sizes` to each rank, `out_sizes` from each. None where the group has one rank."""
    if group.is_trivial:
        return None

    def forward(*tensors: Tensor) -> tuple[Sequence[Tensor], Wait]:
        return start_all_to_all(tensors, group, out_sizes, sizes)

    def backward(*grads: Tensor) -> tuple[Sequence[Tensor], Wait]:
        return start_all_to_all(grads, group, sizes, out_sizes)

    return AsyncExchange(forward, backward)


def start_all_to_all(
    tensors: Sequence[Tensor], group: Group, out_sizes: Sequence[int], sizes: Sequence[int]
) -> tuple[Sequence[Tensor], Wait]:
    """Start one all-to-all for each tensor; give the buffers that receive rows, and a function that waits for all."""
    received = [x.new_empty(sum(out_sizes), *x.shape[1:]) for x in tensors]
    pending = [all_to_all(y, x, group, out_sizes, sizes) for y, x in zip(received, tensors, strict=True)]

    def wait() -> None:
        for work in pending:
            work.wait()

    return received, wait
