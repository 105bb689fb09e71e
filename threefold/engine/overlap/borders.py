"""Values that cross from one node to another, cut from the graph.

Of a value only its border stays: a cut costs no memory that an uncut graph would not hold.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge


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


def enter(values: Sequence[Value]) -> list[Tensor]:
    cut = [value for value in values if value.border is not None]
    if not cut or not torch.is_grad_enabled():
        return [value.tensor for value in values]
    anchor = cut[0].tensor.new_empty(0).requires_grad_()
    inside = iter(_Enter.apply([value.border for value in cut], anchor, *(value.tensor for value in cut)))
    return [value.tensor if value.border is None else next(inside) for value in values]


def leave(tensor: Tensor) -> Value:
    if not tensor.requires_grad:
        return Value(tensor)
    return Value(tensor.detach(), Border(get_gradient_edge(tensor)))


class _Enter(torch.autograd.Function):
    """No leaves, which would hold tensors and add to their gradients in place: the anchor makes them need one."""

    @staticmethod
    def forward(ctx: Any, borders: list[Border], anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.borders = borders
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        for border, grad in zip(ctx.borders, grads, strict=True):
            if grad is not None:
                border.add(grad)
        return (None, None, *(None for _ in grads))
