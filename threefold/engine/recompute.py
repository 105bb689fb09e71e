"""Recompute: of a module only the inputs are kept; what its backward needs is made again when it is asked for.

The backward runs over the graph of the first forward, so that hooks, delayed weight gradients and collectives come as
they would without. With `remade` the outputs go too: what the modules behind keep of them is made again as well.

Nothing random is repeated: no module here draws numbers.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from threefold.engine.kept import Ticket, View, open_takers, storage_of, taking

Made = TypeVar("Made")


def again(function: Callable[..., Made], *given: Tensor, on: bool = True) -> Made:
    """`function(*given)`; what it keeps is made again. Tensors that need a gradient are given, not closed over."""
    return _Region(function, given).run() if on and torch.is_grad_enabled() else function(*given)


def remade(function: Callable[..., Made], *given: Tensor, on: bool = True) -> AbstractContextManager[Made]:
    """`with remade(norm, x) as y`: what is kept of y inside is made again, so that its memory goes with y itself."""
    if not (on and torch.is_grad_enabled()):
        return nullcontext(function(*given))
    region = _Region(function, given)
    return _hiding(region, region.run())


def is_hidden(tensor: Tensor) -> bool:
    """Whether `tensor` will be made again: then so should be what is made of it."""
    return any(isinstance(taker, _Hidden) and taker.place(tensor) is not None for taker in open_takers())


@contextmanager
def _hiding(region: "_Region", outputs: Any) -> Iterator[Any]:
    with taking(_Hidden(region, outputs)):
        yield outputs


class _Region:
    """One run of a function. Takes all that is kept inside."""

    closed = True

    def __init__(self, function: Callable[..., Any], given: tuple[Tensor, ...]) -> None:
        self.function, self.given = function, given
        # Kept by autograd, not by us: an offload around it sees them, and they go when the graph goes. Torch 2.11 lets
        # a node's tensors go with its result, so that we hold on to that.
        self.inputs: Any = _Keep.apply(torch.empty(0, requires_grad=True), *given)
        self.tickets: list[ref[Ticket]] = []
        self.shapes: list[torch.Size] = []
        self.views: list[tuple[ref[Ticket], int, View]] = []  # of outputs that were hidden
        self.made: WeakKeyDictionary[Ticket, Tensor] | None = None

    def run(self) -> Any:
        given, self.given = self.given, ()
        with taking(self):
            return self.function(*given)

    def take(self, tensor: Tensor) -> Ticket:
        ticket = Ticket(self.back)
        self.tickets.append(ref(ticket))
        self.shapes.append(tensor.shape)
        return ticket

    def back(self, ticket: Ticket) -> Tensor:
        if self.made is None:
            self.made = self._make()
            self.inputs = self.function = None  # type: ignore[assignment]
        return self.made[ticket]

    def _make(self) -> WeakKeyDictionary[Ticket, Tensor]:
        given = [x.detach().requires_grad_(x.requires_grad) for x in self.inputs.grad_fn.saved_tensors]
        maker = _Maker(self)
        outputs: Any = ()
        with torch.enable_grad(), taking(maker), suppress(_Enough):
            outputs = self.function(*given)
        assert maker.count == len(self.tickets), f"{maker.count} tensors made of {len(self.tickets)}"
        for ticket_ref, place, view in self.views:
            ticket = ticket_ref()
            if ticket is not None:
                maker.made[ticket] = view.on(_each(outputs)[place])
        return maker.made


class _Maker:
    """Takes what the second run keeps, in the order of the first, for whoever still waits for it."""

    closed = True

    def __init__(self, region: _Region) -> None:
        self.region = region
        self.made: WeakKeyDictionary[Ticket, Tensor] = WeakKeyDictionary()
        self.count = 0

    def take(self, tensor: Tensor) -> str:
        tickets, shapes = self.region.tickets, self.region.shapes
        same = self.count < len(tickets) and tensor.shape == shapes[self.count]
        assert same, f"tensor {self.count} of {len(tickets)} is not what the first run kept: {tuple(tensor.shape)}"
        ticket = tickets[self.count]()
        if ticket is not None:
            self.made[ticket] = tensor.detach()
        self.count += 1
        if self.count == len(tickets) and not self.region.views:
            raise _Enough
        return "made again"


class _Enough(Exception):  # noqa: N818
    """The rest of the function is not needed."""


class _Hidden:
    """Takes what is kept of a region's outputs, and only that."""

    closed = False

    def __init__(self, region: _Region, outputs: Any) -> None:
        self.region, self.outputs = region, _each(outputs)
        self.places = {storage_of(output): place for place, output in enumerate(self.outputs)}

    def place(self, tensor: Tensor) -> int | None:
        place = self.places.get(storage_of(tensor))
        return place if place is not None and tensor.dtype == self.outputs[place].dtype else None

    def take(self, tensor: Tensor) -> Ticket | None:
        place = self.place(tensor)
        if place is None:
            return None
        ticket = Ticket(self.region.back)
        view = View.of(tensor, self.outputs[place])
        self.region.views.append((ref(ticket), place, view))
        return ticket


def _each(outputs: Any) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


class _Keep(torch.autograd.Function):
    """Never run backwards: it only keeps."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise AssertionError("nothing depends on it")
