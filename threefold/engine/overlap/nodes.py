"""A microbatch's way through a model as nodes with borders between: each node's backward can be run on its own.

A node has three parts: its forward, the gradients of its inputs, and those of its weights, which may wait. Values that
cross a border are cut from the graph; what comes back for them is kept at the border until the node before runs. Each
node costs the host a run of autograd: there are as few as the exchanges allow.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from threefold.engine.overlap.borders import Border, Value, enter, leave
from threefold.engine.overlap.whole_pass import WholePass
from threefold.engine.pipeline.delay import Delay

Work = Callable[..., Any]  # tensors -> a tensor or a tuple of them


@dataclass(eq=False)
class Late:
    """A value that the node which takes it makes first, and so with no border between. It is taken once."""

    name: str
    layer: str
    work: Work
    given: tuple[Value, ...]

    def take(self) -> tuple[Value, ...]:
        # Whoever handed this on may keep it for as long as the node runs: not the rows.
        taken, self.given = self.given, ()
        return taken


Given = Value | Late


class Owner(Protocol):
    def hold(self, work: Work, *given: Tensor) -> Any: ...


@dataclass(eq=False)
class Node:
    name: str  # attention, shared, experts; or what else a chunk has
    layer: str
    owner: Owner | None
    lands: str | None  # the layer whose exchange ends where the forward begins: the backward ends by starting one
    made: tuple[Tensor, ...] = ()  # while it is open
    borders: list[Border] = field(default_factory=list)


# (part, name, layer) -> what to do around it; parts are "forward", "backward" and "weights".
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

    def run(self, name: str, layer: str, work: Work, *given: Given, owner: Owner | None = None) -> tuple[Value, ...]:
        """Forward. `owner` is a module whose own parameters the work uses."""
        return self.close(self.open(name, layer, work, *given, owner=owner))

    def open(
        self, name: str, layer: str, work: Work, *given: Given, owner: Owner | None = None, lands: bool = False
    ) -> Node:
        """The first part of a forward: what it makes is not cut, and `go_on` takes it."""
        late = [each.layer for each in given if isinstance(each, Late)]
        node = Node(name, layer, owner, late[0] if late else layer if lands else None)
        tensors = self._enter(given)
        with self._delay or nullcontext(), _around("forward", name, layer):
            node.made = _each(work(*tensors) if owner is None else owner.hold(work, *tensors))
        return node

    def go_on(self, node: Node, name: str, work: Work) -> None:
        with self._delay or nullcontext(), _around("forward", name, node.layer):
            node.made = _each(work(*node.made))

    def close(self, node: Node) -> tuple[Value, ...]:
        values = tuple(map(leave, node.made))
        node.made, node.borders = (), [value.border for value in values if value.border is not None]
        if node.borders:
            self._nodes.append(node)
        return values

    def _enter(self, given: Sequence[Given]) -> list[Tensor]:
        """Inside of the next node, where what is late is made."""
        values = [each.take() if isinstance(each, Late) else (each,) for each in given]
        entered = iter(enter([value for row in values for value in row]))
        tensors = []
        for each, row in zip(given, values, strict=True):
            own = list(islice(entered, len(row)))
            if isinstance(each, Late):
                with self._delay or nullcontext(), _around("forward", each.name, each.layer):
                    own = [each.work(*own)]
            tensors += own
        return tensors

    def __bool__(self) -> bool:
        return bool(self._nodes)

    def run_back(self) -> Node:
        """Gradients of the inputs of the last node that is left."""
        node = self._waiting = self._nodes.pop()
        got = [border for border in node.borders if border.grad is not None]
        if got:
            self._whole.before(node.owner, any(other.owner is node.owner for other in self._nodes))
            # What it starts belongs to the layer that lands in it.
            with _around("backward", node.name, node.lands or node.layer), self._delay or nullcontext():
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


def _each(made: Any) -> tuple[Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)


def first(values: Sequence[Value]) -> Value:
    (only,) = values
    return only
