"""Several linear layers of one input, such as the projections to queries, keys and values.

The gradient of the input is accumulated inside the GEMMs of the layers, where autograd would add the parts in passes of
their own. Weight gradients can be delayed and can accumulate in `main_grad`, as in `linear.py`.
`layers/input_linears.py` calls it on devices that have fused kernels.

Shapes: N rows, I dim in, O dim out, ... any dims before.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from threefold.engine.autograd.delayed_wgrad import WgradTarget, compute_or_delay, wgrad_targets
from threefold.engine.autograd.linear import compute_wgrad


def shared_input_linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """`F.linear(x, weight, bias)` for each weight and its bias."""
    parameters, targets = wgrad_targets(x, *weights)
    return list(_SharedInputLinears.apply(x, targets, *parameters, *biases))


class _SharedInputLinears(torch.autograd.Function):
    """`parameters` are all weights and then all biases."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, targets: list[WgradTarget], *parameters: Tensor | None) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.targets = targets
        half = len(parameters) // 2
        weights, biases = parameters[:half], parameters[half:]
        # The input is for the weight gradients alone: frozen weights need none.
        is_frozen = all(target.queue is None for target in targets) and not any(ctx.needs_input_grad[2 : 2 + half])
        ctx.save_for_backward(None if is_frozen else x, *weights)
        ctx.shape = x.shape
        return tuple(F.linear(x, w, b) for w, b in zip(weights, biases, strict=True) if w is not None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        wants_x, _, *wants = ctx.needs_input_grad
        x_NI: Any = None if x is None else x.flatten(0, -2)
        x_grad: Tensor | None = None
        parameter_grads: list[Tensor | None] = [None] * len(wants)
        for n, (grad, weight_OI) in enumerate(zip(grads, weights, strict=True)):
            if grad is None:
                continue
            grad_NO = grad.reshape(-1, grad.shape[-1])
            if wants_x:
                x_grad = grad_NO @ weight_OI if x_grad is None else x_grad.addmm_(grad_NO, weight_OI)
            parameter_grads[n] = compute_or_delay(ctx.targets[n], wants[n], partial(compute_wgrad, grad_NO, x_NI))
            if wants[len(weights) + n]:
                parameter_grads[len(weights) + n] = grad_NO.sum(dim=0)
        return None if x_grad is None else x_grad.view(ctx.shape), None, *parameter_grads
