"""A microbatch's way through a model as nodes with borders between: each node's backward can be run on its own.

A node has three parts: its forward, the gradients of its inputs, and those of its weights, which may wait. Values that
cross a border are cut from the graph; what comes back for them is kept at the border until the node before runs.
Of a value only its border stays: a cut costs no memory that an uncut graph would not hold.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from threefold.engine.overlap.whole_pass import WholePass
from threefold.engine.pipeline.delay import Delay

Work = Callable[..., Any]  # tensors -> a tensor or a tuple of them


@dataclass(eq=False)
class Border:
    """Where a value came from, and the gradient that later nodes sent back."""

    edge: GradientEdge | None
    grad: Tensor | None = None

    def add(self, grad: Tensor) -> None:
        # Never in place: what is there may be on its way to other ranks.
        self.grad = grad if self.grad is None else self.grad + grad


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor that crosses a border; without one it needs no gradient."""

    tensor: Tensor
    border: Border | None = None


class Owner(Protocol):
    def hold(self, work: Work, *given: Tensor) -> Any: ...


@dataclass(eq=False)
class Node:
    name: str  # attention, dispatch, shared, experts, combine, sum; or what else a chunk has
    layer: str
    lands: bool  # the forward begins with the end of an exchange: the backward ends by starting one
    owner: Owner | None
    borders: list[Border]


# (part, node) -> what to do around it; parts are "forward", "backward" and "weights".
Watcher = Callable[[str, str, str], AbstractContextManager[None]]
_watchers: list[Watcher] = []


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """`watcher(part, name, layer)` is entered around each part of each node."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def _around(part: str, name: str, layer: str) -> AbstractContextManager[None]:
    return _watchers[-1](part, name, layer) if _watchers else nullcontext()


class Nodes:
    """Of one microbatch, in the order of the forward. `delay`: weight gradients wait for `run_weights`."""

    def __init__(self, delay: bool, root: nn.Module) -> None:
        self._nodes: list[Node] = []
        self._whole = WholePass(root)
        self._delay = Delay() if delay else None
        self._waiting: Node | None = None

    def run(
        self, name: str, layer: str, work: Work, *given: Value, owner: Owner | None = None, lands: bool = False
    ) -> tuple[Value, ...]:
        """Forward. `owner` is a module whose own parameters the work uses."""
        with _around("forward", name, layer), self._delay or nullcontext():
            tensors = [enter(value) for value in given]
            made = work(*tensors) if owner is None else owner.hold(work, *tensors)
        values = tuple(_leave(tensor) for tensor in (made if isinstance(made, tuple) else (made,)))
        borders = [value.border for value in values if value.border is not None]
        if borders:
            self._nodes.append(Node(name, layer, lands, owner, borders))
        return values

    def __bool__(self) -> bool:
        return bool(self._nodes)

    def run_back(self) -> Node:
        """Gradients of the inputs of the last node that is left."""
        node = self._waiting = self._nodes.pop()
        got = [border for border in node.borders if border.grad is not None]
        if got:
            self._whole.before(node.owner, any(other.owner is node.owner for other in self._nodes))
            with _around("backward", node.name, node.layer), self._delay or nullcontext():
                # The Delay mode is set aside where a backward begins at a tensor: begin at its place in the graph.
                edges = [border.edge for border in got]
                torch.autograd.backward(edges, [border.grad for border in got])  # type: ignore[arg-type]
            self._whole.behind()
        for border in node.borders:
            border.edge = border.grad = None
        return node

    def end(self) -> None:
        """All nodes have run back."""
        self._whole.end()

    def run_weights(self) -> None:
        """Gradients of weights that wait."""
        if self._delay is not None and self._delay.left and self._waiting is not None:
            with _around("weights", self._waiting.name, self._waiting.layer):
                self._delay.finish()


def enter(value: Value) -> Tensor:
    if value.border is None or not torch.is_grad_enabled():
        return value.tensor
    anchor = value.tensor.new_empty(0).requires_grad_() if value.tensor.is_floating_point() else None
    entered: Tensor = _Enter.apply(value.border, anchor, value.tensor)
    return entered


def _leave(tensor: Tensor) -> Value:
    if not tensor.requires_grad:
        return Value(tensor)
    return Value(tensor.detach(), Border(get_gradient_edge(tensor)))


class _Enter(torch.autograd.Function):
    """No leaf, which would hold the tensor and add to its gradient in place: the anchor only makes it need one."""

    @staticmethod
    def forward(ctx: Any, border: Border, anchor: Tensor, tensor: Tensor) -> Tensor:
        ctx.border = border
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.border.add(grad)
        return None, None, None


def first(values: Sequence[Value]) -> Value:
    (only,) = values
    return only
