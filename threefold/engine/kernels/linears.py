"""Several products of one input, such as queries, keys and values: the gradient of the input is summed in the products
that make its parts, not in passes behind them. A weight's may wait, and goes to its sink, where it has one.

Shapes: N rows, I dim in, O dim out, ... any dims before.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from threefold.engine.pipeline.delay import left_of
from threefold.engine.products import weight_grad
from threefold.engine.sinks import sink_of


def linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    owners = [(left_of(x, weight), weight, sink_of(weight)) for weight in weights]
    given = (weight if left is None else weight.detach() for left, weight, _ in owners)
    return list(_Linears.apply(x, owners, *given, *biases))


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, owners: list[Any], *parameters: Tensor | None) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.owners = owners
        half = len(parameters) // 2
        weights, biases = parameters[:half], parameters[half:]
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, w, b) for w, b in zip(weights, biases, strict=True) if w is not None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        wants_x, _, *wants = ctx.needs_input_grad
        x_NI, x_grad = x.flatten(0, -2), None
        made: list[Tensor | None] = [None] * len(wants)
        for n, (grad, weight_OI) in enumerate(zip(grads, weights, strict=True)):
            if grad is None:
                continue
            grad_NO = grad.reshape(-1, grad.shape[-1])
            if wants_x:
                x_grad = grad_NO @ weight_OI if x_grad is None else x_grad.addmm_(grad_NO, weight_OI)
            left, weight, sink = ctx.owners[n]
            if left is not None:
                left.append((weight, partial(weight_grad, sink, grad_NO, x_NI)))
            elif wants[n]:
                made[n] = weight_grad(sink, grad_NO, x_NI)
            if wants[len(weights) + n]:
                made[len(weights) + n] = grad_NO.sum(dim=0)
        return None if x_grad is None else x_grad.view_as(x), None, *made
