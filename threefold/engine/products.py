"""Products with weights whose gradients may wait (`pipeline/delay.py`) and go to their sinks (`sinks.py`).

Where there is neither they are torch's own.

Shapes: X any leading dims, R rows, I and O dims in and out, E experts.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threefold.engine.pipeline.delay import Left, left_of
from threefold.engine.sinks import add_product, sink_of

Owner = tuple[list[Left], Tensor]  # where a gradient waits, and the weight it is of


def own_linears(model: nn.Module) -> None:
    """Plain linear layers become `linear`."""
    for module in model.modules():
        if type(module) is nn.Linear and "forward" not in module.__dict__ and module.weight.requires_grad:
            module.forward = partial(_forward, module)  # type: ignore[method-assign]


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, module.weight, module.bias)


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    sink_OI, left = sink_of(weight_OI), left_of(x, weight_OI)
    if left is not None:
        return _Linear.apply(x, weight_OI.detach(), bias_O, sink_OI, (left, weight_OI))
    return F.linear(x, weight_OI, bias_O) if sink_OI is None else _Linear.apply(x, weight_OI, bias_O, sink_OI, None)


def grouped(x_RI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """Rows of each expert by its own weight; `ends_E` says where they end."""
    left = left_of(x_RI, weight_EIO)
    if left is None:
        return F.grouped_mm(x_RI, weight_EIO, offs=ends_E)
    return _Grouped.apply(x_RI, weight_EIO.detach(), ends_E, (left, weight_EIO))


def weight_grad(sink_OI: Tensor | None, grad_RO: Tensor, x_RI: Tensor) -> Tensor | None:
    """Into the sink, where there is one."""
    if sink_OI is None:
        return grad_RO.t() @ x_RI
    add_product(sink_OI, grad_RO.t(), x_RI, sink_OI.dtype)
    return None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_XI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, sink_OI: Tensor | None, owner: Owner | None
    ) -> Tensor:
        ctx.save_for_backward(x_XI, weight_OI)
        ctx.sink_OI, ctx.owner = sink_OI, owner
        return F.linear(x_XI, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, grad_XO: Tensor) -> tuple[Tensor | None, ...]:
        x_XI, weight_OI = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_RO, x_RI, made = grad_XO.flatten(0, -2), x_XI.flatten(0, -2), None
        if ctx.owner is not None:
            left, weight = ctx.owner
            left.append((weight, partial(weight_grad, ctx.sink_OI, grad_RO, x_RI)))
        elif wants_weight:
            made = weight_grad(ctx.sink_OI, grad_RO, x_RI)
        bias = grad_RO.sum(dim=0) if wants_bias else None
        return grad_XO @ weight_OI if wants_x else None, made, bias, None, None


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, weight_EIO: Tensor, ends_E: Tensor, owner: Owner) -> Tensor:
        ctx.save_for_backward(x_RI, weight_EIO, ends_E)
        ctx.owner = owner
        return F.grouped_mm(x_RI, weight_EIO, offs=ends_E)

    @staticmethod
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor, None, None, None]:
        x_RI, weight_EIO, ends_E = ctx.saved_tensors
        left, weight = ctx.owner
        grad_RO = grad_RO.contiguous()

        def product() -> Tensor:
            return F.grouped_mm(grad_RO.t(), x_RI, offs=ends_E).transpose(-2, -1)

        left.append((weight, product))
        return F.grouped_mm(grad_RO, weight_EIO.transpose(-2, -1), offs=ends_E), None, None, None
