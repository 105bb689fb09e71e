"""The forward of one microbatch as a list of graph nodes, each of which can run its backward on its own.

A node has three parts: its forward, its input gradients, and its weight gradients, which may be delayed. Tensors that
go from node to node are cut from the autograd graph (`autograd_cuts.py`); their gradients wait at the cut until the
node that made them runs its backward. Each node costs the host a call of autograd: there are as few as the exchanges
allow. `overlappable_pass.py` builds the nodes.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from threefold.engine.autograd.delayed_wgrad import WgradQueue
from threefold.engine.context import context, override
from threefold.engine.schedule.autograd_cuts import CutEdge, NodeValue, cut_from_graph, reenter_graph
from threefold.engine.schedule.fsdp_node_backward import FsdpBackward

Work = Callable[..., Any]  # tensors -> a tensor or a tuple of them


@dataclass(eq=False)
class DeferredValue:
    """A value that is computed by the node which consumes it, with no cut between. It is consumed once."""

    name: str
    layer: str
    work: Work
    inputs: tuple[NodeValue, ...]

    def take(self) -> tuple[NodeValue, ...]:
        # The caller may hold this object while the node runs, so the object must not hold the rows.
        taken, self.inputs = self.inputs, ()
        return taken


NodeInput = NodeValue | DeferredValue


class ParameterOwner(Protocol):
    """A module whose parameters a node uses without calling the module (`Block`, `Decoder`)."""

    def run_with_parameters(self, work: Work, *inputs: Tensor) -> Any: ...


@dataclass(eq=False)
class GraphNode:
    """One node of a microbatch."""

    name: str  # attention, shared, experts, and others of a chunk
    layer: str
    owner: ParameterOwner | None
    # The layer whose exchange ends at the start of this node's forward. The node's backward ends by starting the
    # exchange of the gradients. None where the node begins without an exchange.
    ends_exchange_of: str | None
    outputs: tuple[Tensor, ...] = ()  # while the node is open
    cut_edges: list[CutEdge] = field(default_factory=list)  # of the outputs, once it is closed


# (part, name, layer) -> a context manager to enter around it; parts are "forward", "backward" and "weights".
NodeObserver = Callable[[str, str, str], AbstractContextManager[None]]


def observe_nodes(observer: NodeObserver) -> AbstractContextManager[None]:
    """Enter `observer(part, name, layer)` around each part of each node inside the `with` block."""
    return override("node_observer", observer)


def _observed(part: str, name: str, layer: str) -> AbstractContextManager[None]:
    observer = context.node_observer
    return nullcontext() if observer is None else observer(part, name, layer)


class GraphNodes:
    """The nodes of one microbatch in the order of the forward. With `delay_wgrad`, `run_wgrads` computes the wgrads."""

    def __init__(self, delay_wgrad: bool, root: nn.Module) -> None:
        self._nodes: list[GraphNode] = []
        self._fsdp = FsdpBackward(root)
        self._wgrad_queue = WgradQueue() if delay_wgrad else None
        self._last_node: GraphNode | None = None

    def run(
        self, name: str, layer: str, work: Work, *inputs: NodeInput, owner: ParameterOwner | None = None
    ) -> tuple[NodeValue, ...]:
        """The forward of a node. `owner` is a module whose own parameters the work uses."""
        return self.close(self.open(name, layer, work, *inputs, owner=owner))

    def open(
        self,
        name: str,
        layer: str,
        work: Work,
        *inputs: NodeInput,
        owner: ParameterOwner | None = None,
        ends_exchange: bool = False,
    ) -> GraphNode:
        """The first part of a node's forward. Its outputs are not cut, so that `extend` can work on them."""
        deferred = [each.layer for each in inputs if isinstance(each, DeferredValue)]
        node = GraphNode(name, layer, owner, deferred[0] if deferred else layer if ends_exchange else None)
        tensors = self._enter(inputs)
        with self._wgrad_queue or nullcontext(), _observed("forward", name, layer):
            node.outputs = _as_tuple(work(*tensors) if owner is None else owner.run_with_parameters(work, *tensors))
        return node

    def extend(self, node: GraphNode, name: str, work: Work) -> None:
        """A further part of an open node's forward, on the outputs of the part before."""
        with self._wgrad_queue or nullcontext(), _observed("forward", name, node.layer):
            node.outputs = _as_tuple(work(*node.outputs))

    def close(self, node: GraphNode) -> tuple[NodeValue, ...]:
        """Cut the outputs of a node from the graph."""
        values = tuple(map(cut_from_graph, node.outputs))
        node.outputs, node.cut_edges = (), [value.cut_edge for value in values if value.cut_edge is not None]
        if node.cut_edges:
            self._nodes.append(node)
        return values

    def _enter(self, inputs: Sequence[NodeInput]) -> list[Tensor]:
        """The inputs as tensors of a new node, which also computes the deferred ones."""
        values = [each.take() if isinstance(each, DeferredValue) else (each,) for each in inputs]
        entered = iter(reenter_graph([value for row in values for value in row]))
        tensors = []
        for each, row in zip(inputs, values, strict=True):
            own = list(islice(entered, len(row)))
            if isinstance(each, DeferredValue):
                with self._wgrad_queue or nullcontext(), _observed("forward", each.name, each.layer):
                    own = [each.work(*own)]
            tensors += own
        return tensors

    def __bool__(self) -> bool:
        return bool(self._nodes)

    def run_backward(self) -> GraphNode:
        """Compute the input gradients of the last node whose backward has not run."""
        node = self._last_node = self._nodes.pop()
        reached = [cut_edge for cut_edge in node.cut_edges if cut_edge.grad is not None]
        if reached:
            self._fsdp.before_node(node.owner, any(other.owner is node.owner for other in self._nodes))
            # The exchange that this backward starts belongs to the layer whose exchange the node ended.
            with (
                _observed("backward", node.name, node.ends_exchange_of or node.layer),
                self._wgrad_queue or nullcontext(),
            ):
                edges = [cut_edge.edge for cut_edge in reached]
                torch.autograd.backward(edges, [cut_edge.grad for cut_edge in reached])  # type: ignore[arg-type]
            self._fsdp.after_node()
        for cut_edge in node.cut_edges:
            cut_edge.edge = cut_edge.grad = None
        return node

    def end(self) -> None:
        """End the pass, after the backward of all nodes."""
        self._fsdp.finish()

    def run_wgrads(self) -> None:
        """Compute the delayed weight gradients."""
        if self._wgrad_queue is not None and self._wgrad_queue.pending and self._last_node is not None:
            with _observed("weights", self._last_node.name, self._last_node.layer):
                self._wgrad_queue.finish()


def _as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def single_value(values: Sequence[NodeValue]) -> NodeValue:
    (only,) = values
    return only
