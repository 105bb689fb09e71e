"""Cuts in the autograd graph: tensors that leave one graph node and enter another without an autograd edge between.

`autograd_nodes.py` cuts the graph of a microbatch so that the backward of each node can run on its own. A cut keeps
only the gradient edge of a tensor, not the tensor: it costs no memory that an uncut graph would not hold.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge


@dataclass(eq=False)
class CutEdge:
    """One cut: the gradient edge of the tensor that was cut, and the gradient that later nodes computed for it."""

    edge: GradientEdge | None
    grad: Tensor | None = None

    def add(self, grad: Tensor) -> None:
        # Not in place: the present gradient may be under way to other ranks.
        self.grad = grad if self.grad is None else self.grad + grad


@dataclass(frozen=True, eq=False)
class NodeValue:
    """A tensor that goes from one node to another."""

    tensor: Tensor
    cut_edge: CutEdge | None = None  # None: the tensor needs no gradient


def reenter_graph(values: Sequence[NodeValue]) -> list[Tensor]:
    """The tensors as inputs of a new node. The backward of the node leaves their gradients at their cuts."""
    crossing = [value for value in values if value.cut_edge is not None]
    if not crossing or not torch.is_grad_enabled():
        return [value.tensor for value in values]
    anchor = crossing[0].tensor.new_empty(0).requires_grad_()
    reentered = iter(
        _ReenterGraph.apply([value.cut_edge for value in crossing], anchor, *(value.tensor for value in crossing))
    )
    return [value.tensor if value.cut_edge is None else next(reentered) for value in values]


def cut_from_graph(tensor: Tensor) -> NodeValue:
    """A tensor as the output of a node, detached from the graph that made it."""
    if not tensor.requires_grad:
        return NodeValue(tensor)
    return NodeValue(tensor.detach(), CutEdge(get_gradient_edge(tensor)))


class _ReenterGraph(torch.autograd.Function):
    """Makes tensors part of a new graph, whose backward ends here.

    Leaves would hold the tensors and accumulate gradients in place. The empty `anchor` requires a gradient instead.
    """

    @staticmethod
    def forward(ctx: Any, cut_edges: list[CutEdge], anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.cut_edges = cut_edges
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        for cut_edge, grad in zip(ctx.cut_edges, grads, strict=True):
            if grad is not None:
                cut_edge.add(grad)
        return (None, None, *(None for _ in grads))
