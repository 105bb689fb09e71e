"""Weight gradients that wait: products in a chunk leave theirs in a queue, to be computed when the schedule says.

torch's own split walks the autograd graph twice, and so runs every custom Function with a weight twice, with the
collectives and the recompute in it. Here the backward runs once, and only products of weights are left over
(`products.py`, `precision/linear.py`, `kernels/`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# A weight, as the product used it, and how to compute its gradient; None comes of one that is in the weight's sink.
Left = tuple[Tensor, Callable[[], Tensor | None]]

# No context variable: a recompute asks from the thread of the backward.
_open: list["Delay"] = []


class Delay:
    """Around forward and backward of one microbatch; `finish` computes what waits. Hooks of the weights fire then."""

    def __init__(self) -> None:
        self.left: list[Left] = []

    def __enter__(self) -> None:
        _open.append(self)

    def __exit__(self, *_: Any) -> None:
        _open.pop()

    def finish(self) -> None:
        """Parameter by parameter, so that the gradient of one is there at a time and what it was made of goes."""
        by_parameter = _by_parameter(self.left)
        self.left.clear()
        for parts in by_parameter:
            with torch.enable_grad():
                ends = [_Late.apply(*parts.pop(0)) for _ in range(len(parts))]
            # In one call: a parameter used in several views is told of its gradient once.
            torch.autograd.backward(ends, [end.detach() for end in ends])


def _by_parameter(left: list[Left]) -> list[list[Left]]:
    found: dict[int, list[Left]] = {}
    for weight, compute in left:
        found.setdefault(id(_parameter(weight)), []).append((weight, compute))
    return list(found.values())


class _Late(torch.autograd.Function):
    """A weight's gradient, made where autograd asks for it: nobody else holds it, so that it is not copied."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, compute: Callable[[], Tensor | None]) -> Tensor:
        ctx.compute = compute
        return weight.new_empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, None]:
        compute, ctx.compute = ctx.compute, None
        return compute(), None


def left_of(x: Tensor, weight: Tensor) -> list[Left] | None:
    """Where a product should leave its weight gradient; None: nowhere, it is computed at once."""
    return _open[-1].left if _open and _waits(x, weight) else None


def _waits(x: Tensor, weight: Tensor) -> bool:
    """A parameter or a view of one; what lies deeper (a cast, a gathered weight) has a backward of its own to run."""
    base = _parameter(weight)
    if base is None or not base.is_leaf or x.dim() < 2:
        return False
    return torch.is_grad_enabled() and x.requires_grad and weight.requires_grad


def _parameter(weight: Tensor) -> Tensor | None:
    """What it is a view of, if it is one."""
    return weight._base if weight._is_view() else weight
