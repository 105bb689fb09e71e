"""Weight gradients that are added where they are summed, as they are made.

Where gradients are summed in a wider dtype than the weights', autograd would make each of them narrow and whole first:
memory for the largest of them, and half as much traffic again. What knows of a weight's sink adds to it and gives
autograd nothing.

Shapes: R rows, I and O dims in and out.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threefold.engine.ways import stood_for, way


def give_sink(weight: Tensor, total: Tensor, arrived: Callable[[Tensor], None]) -> object:
    """`arrived` is told of every backward that reaches the weight, whether or not autograd brings a gradient.

    -> what must be kept, or it is told no more.
    """
    weight._sink = total  # type: ignore[attr-defined]
    through = weight.view_as(weight).grad_fn
    assert through is not None
    node = through.next_functions[0][0]
    assert node is not None
    node.register_hook(lambda *_: arrived(weight))
    return node


def sink_of(weight: Tensor) -> Tensor | None:
    return getattr(weight, "_sink", None)


def fuse_linears(model: nn.Module) -> None:
    """Plain linear layers whose weight has a sink."""
    for module in model.modules():
        if type(module) is nn.Linear and "forward" not in module.__dict__ and sink_of(module.weight) is not None:
            module.forward = partial(_linear, module)  # type: ignore[method-assign]


def _linear(module: nn.Linear, x: Tensor) -> Tensor:
    return _Linear.apply(x, module.weight, module.bias, sink_of(module.weight))


def add_product(total: Tensor | None, a_OR: Tensor, b_RI: Tensor, dtype: torch.dtype) -> Tensor:
    """total + a b in `dtype`, in place; a GPU adds to the wide sum as it stores."""
    if dtype != a_OR.dtype and way(a_OR.device) == "cuda":
        if stood_for():
            return a_OR.new_empty(len(a_OR), b_RI.shape[1], dtype=dtype) if total is None else total
        if total is None:
            return torch.mm(a_OR, b_RI, out_dtype=dtype)
        return torch.addmm(total, a_OR, b_RI, out_dtype=dtype, out=total)
    product = a_OR @ b_RI
    return product.to(dtype) if total is None else total.add_(product)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, total_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        ctx.total_OI = total_OI
        return F.linear(x, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_OI = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        grad_RO = grad.flatten(0, -2)
        if wants_weight:
            add_product(ctx.total_OI, grad_RO.T, x.flatten(0, -2), ctx.total_OI.dtype)
        bias_grad = grad_RO.sum(dim=0) if wants_bias else None
        return grad @ weight_OI if wants_x else None, None, bias_grad, None
