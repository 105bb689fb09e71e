"""Linear layers and grouped GEMMs whose weight gradients can be delayed and can accumulate in `main_grad`.

Modules call `linear` and `grouped_gemm` in place of `F.linear` and `F.grouped_mm`. Where the weight has no `main_grad`
(`main_grad.py`) and no queue is open (`delayed_wgrad.py`), torch's own functions run. `shared_input_linears` computes
several linear layers of one input, such as the projections to queries, keys and values: the gradient of the input is
accumulated inside their GEMMs, where autograd would add the parts in passes of their own. `layers/input_linears.py`
calls it on devices that have fused kernels.

Shapes: X any leading dims, R or N rows, I and O dims in and out, E experts, ... any dims before.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threefold.engine.autograd.delayed_wgrad import (
    DelayedWgrad,
    WgradTarget,
    compute_or_delay,
    open_queue_for,
    wgrad_targets,
)
from threefold.engine.autograd.main_grad import accumulate_gemm, main_grad_of

QueuedWeight = tuple[list[DelayedWgrad], Tensor]  # a weight, after the queue of its gradient


def use_main_grad_linears(model: nn.Module) -> None:
    """Make every plain `nn.Linear` of the model run `linear`."""
    for module in model.modules():
        if type(module) is nn.Linear and "forward" not in module.__dict__ and module.weight.requires_grad:
            module.forward = partial(_forward, module)  # type: ignore[method-assign]


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, module.weight, module.bias)


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`F.linear` with the weight gradient delayed or accumulated in `main_grad`, where the weight asks for it."""
    main_grad_OI, queue = main_grad_of(weight_OI), open_queue_for(x, weight_OI)
    if queue is not None:
        return _Linear.apply(x, weight_OI.detach(), bias_O, main_grad_OI, (queue, weight_OI))
    if main_grad_OI is not None:
        return _Linear.apply(x, weight_OI, bias_O, main_grad_OI, None)
    return F.linear(x, weight_OI, bias_O)


def grouped_gemm(x_RI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """Multiply the rows of each expert, which end at `ends_E`, by its own weight. The weight gradient can be
    delayed."""
    queue = open_queue_for(x_RI, weight_EIO)
    if queue is None:
        return F.grouped_mm(x_RI, weight_EIO, offs=ends_E)
    return _GroupedGemm.apply(x_RI, weight_EIO.detach(), ends_E, (queue, weight_EIO))


def compute_wgrad(grad_RO: Tensor, x_RI: Tensor, main_grad_OI: Tensor | None) -> Tensor | None:
    """The weight gradient; with a `main_grad` it is added there, and None comes back."""
    if main_grad_OI is None:
        return grad_RO.t() @ x_RI
    accumulate_gemm(main_grad_OI, grad_RO.t(), x_RI, main_grad_OI.dtype)
    return None


class _Linear(torch.autograd.Function):
    """`queued` is given where the weight gradient is delayed; `weight_OI` is detached then."""

    @staticmethod
    def forward(
        ctx: Any,
        x_XI: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        main_grad_OI: Tensor | None,
        queued: QueuedWeight | None,
    ) -> Tensor:
        ctx.save_for_backward(x_XI, weight_OI)
        ctx.main_grad_OI, ctx.queued = main_grad_OI, queued
        return F.linear(x_XI, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, grad_XO: Tensor) -> tuple[Tensor | None, ...]:
        x_XI, weight_OI = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_RO, x_RI, weight_grad = grad_XO.flatten(0, -2), x_XI.flatten(0, -2), None
        if ctx.queued is not None:
            queue, weight = ctx.queued
            queue.append((weight, partial(compute_wgrad, grad_RO, x_RI, ctx.main_grad_OI)))
        elif wants_weight:
            weight_grad = compute_wgrad(grad_RO, x_RI, ctx.main_grad_OI)
        bias_grad = grad_RO.sum(dim=0) if wants_bias else None
        return grad_XO @ weight_OI if wants_x else None, weight_grad, bias_grad, None, None


class _GroupedGemm(torch.autograd.Function):
    """A grouped GEMM whose weight gradient is delayed."""

    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, weight_EIO: Tensor, ends_E: Tensor, queued: QueuedWeight) -> Tensor:
        ctx.save_for_backward(x_RI, weight_EIO, ends_E)
        ctx.queued = queued
        return F.grouped_mm(x_RI, weight_EIO, offs=ends_E)

    @staticmethod
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor, None, None, None]:
        x_RI, weight_EIO, ends_E = ctx.saved_tensors
        queue, weight = ctx.queued
        grad_RO = grad_RO.contiguous()

        def compute_grouped_wgrad() -> Tensor:
            return F.grouped_mm(grad_RO.t(), x_RI, offs=ends_E).transpose(-2, -1)

        queue.append((weight, compute_grouped_wgrad))
        return F.grouped_mm(grad_RO, weight_EIO.transpose(-2, -1), offs=ends_E), None, None, None


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
