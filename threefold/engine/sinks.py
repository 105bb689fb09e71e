"""Weight gradients that are added where they are summed, as they are made.

Where gradients are summed in a wider dtype than the weights', autograd would make each of them narrow and whole first:
memory for the largest of them, and half as much traffic again. What knows of a weight's sink (`products.py`,
`kernels/`) adds to it and gives autograd nothing.

Shapes: R rows, I and O dims in and out.
"""

from collections.abc import Callable

import torch
from torch import Tensor

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
