"""Linear layers whose three GEMMs (forward, input gradient, weight gradient) run in low precision.

For the backward only the input is saved, transposed and quantized as the weight-gradient GEMM reads it: one byte
per number in FP8, and once for all layers that share the input. Where the input is recomputed, or another operation
saves it anyway, the unquantized input is saved, which costs nothing, and is quantized in the backward.

`models/low_precision.py` replaces `nn.Linear` by `LowPrecisionLinear`; `layers/input_linears.py` and
`shard/tensor_parallel.py` call `low_precision_linears`.

Shapes: ... any dims before, T tokens, I and O dims in and out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from threefold.engine.autograd.delayed_wgrad import open_queue_for
from threefold.engine.autograd.recompute import is_recomputed
from threefold.engine.context import count_event
from threefold.engine.precision.choose_backend import EMULATED, choose_backend
from threefold.engine.precision.emulated_backend import EmulatedBackend
from threefold.engine.precision.quantize import Quantized
from threefold.engine.precision.recipes import Recipe
from threefold.engine.precision.weight_cache import WeightCache


class LowPrecisionLinear(nn.Linear):
    """A linear layer by a recipe. Its parameters and their names are those of `nn.Linear`."""

    def __init__(
        self, plain: nn.Linear, recipe: Recipe, cache_weights: bool = True, input_is_saved: bool = False
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight, self.bias = plain.weight, plain.bias
        self.precision = LinearPrecision(recipe, WeightCache(cache_weights), input_is_saved)

    def forward(self, x: Tensor) -> Tensor:
        [y] = low_precision_linears(x, [(self.weight, self.precision)])
        return self.add_bias(y)

    def add_bias(self, y: Tensor) -> Tensor:
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True)
class LinearPrecision:
    """How one weight is quantized, and where its quantized copies are cached."""

    recipe: Recipe
    cache: WeightCache[tuple[Quantized, Quantized]]
    input_is_saved: bool = False  # another operation saves the input for its own backward
    part: str = "linears"  # of the model, for the report of an observed step: "linears" or "experts"


def low_precision_linear(x: Tensor, weight_OI: Tensor, recipe: Recipe) -> Tensor:
    """x W^T, with all three GEMMs by the recipe."""
    [y] = low_precision_linears(x, [(weight_OI, LinearPrecision(recipe, WeightCache(enabled=False)))])
    return y


def low_precision_linears(x: Tensor, layers: Sequence[tuple[Tensor, LinearPrecision]]) -> list[Tensor]:
    """Apply several weights to one input, which is quantized and saved once."""
    weights, precisions = zip(*layers, strict=True)
    owners = [(open_queue_for(x, weight), weight) for weight in weights]
    weight_arguments = (weight if queue is None else weight.detach() for queue, weight in owners)
    # Asked here, because inside of an autograd Function it is not known whether a tensor is recomputed.
    input_is_available = is_recomputed(x) or all(precision.input_is_saved for precision in precisions)
    return list(_LowPrecisionLinears.apply(x, (precisions, owners, input_is_available), *weight_arguments))


class _LowPrecisionLinears(torch.autograd.Function):
    """The GEMMs of weights that share an input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, settings: tuple[Any, ...], *weights: Tensor) -> tuple[Tensor, ...]:
        precisions, ctx.owners, input_is_available = settings
        recipe = precisions[0].recipe
        x_TI = x.reshape(-1, x.shape[-1])
        backend = choose_backend(recipe, x_TI, weights)
        kernel = "emulated" if backend is EMULATED else type(backend).__name__
        count_event(f"low-precision {precisions[0].part}", kernel, len(weights))
        ctx.precisions, ctx.shape, ctx.backend = precisions, x.shape, backend
        ctx.wants_weights = [
            queue is not None or wants_weight
            for (queue, _), wants_weight in zip(ctx.owners, ctx.needs_input_grad[2:], strict=True)
        ]
        needed = any(ctx.wants_weights)
        if needed and recipe.input_t is not None and not input_is_available:
            rows, transposed = backend.quantize_both(x_TI, recipe.input, recipe.input_t)
            ctx.saved_layout = transposed.with_tensors(tuple(x_TI.new_empty(0) for _ in transposed.tensors))
            ctx.save_for_backward(*weights, *transposed.tensors)
        else:
            rows, ctx.saved_layout = backend.quantize_rows(x_TI, recipe.input), None
            ctx.save_for_backward(*weights, *([x] if needed else []))
        quantized_weights = [
            _quantized_weight(precision, weight, backend)[0]
            for precision, weight in zip(precisions, weights, strict=True)
        ]
        return tuple(backend.matmul(rows, w, x.dtype).view(*x.shape[:-1], w.shape[0]) for w in quantized_weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        num_weights = len(ctx.precisions)
        weights, saved = ctx.saved_tensors[:num_weights], ctx.saved_tensors[num_weights:]
        x_grad: Tensor | None = None
        weight_grads: list[Tensor | None] = []
        saved_input = _SavedInput(ctx, saved)
        for n, (precision, weight, grad) in enumerate(zip(ctx.precisions, weights, grads, strict=True)):
            grad_TO = grad.reshape(-1, grad.shape[-1])
            wants_weight, (queue, owner) = ctx.wants_weights[n], ctx.owners[n]
            rows, transposed = _quantize_grad(
                precision.recipe, ctx.backend, grad_TO, ctx.needs_input_grad[0], wants_weight
            )
            if rows is not None:
                part = ctx.backend.matmul(rows, _quantized_weight(precision, weight, ctx.backend)[1], grad.dtype)
                x_grad = part if x_grad is None else x_grad + part
            if queue is not None:
                queue.append((owner, saved_input.weight_grad(transposed, grad_TO)))
            weight_grads.append(
                saved_input.weight_grad(transposed, grad_TO)() if wants_weight and queue is None else None
            )
        return None if x_grad is None else x_grad.view(ctx.shape), None, *weight_grads


class _SavedInput:
    """The saved input, quantized or not, shared by the weight gradients of all weights."""

    def __init__(self, ctx: Any, saved: tuple[Tensor, ...]) -> None:
        self.recipe: Recipe = ctx.precisions[0].recipe
        self.backend: EmulatedBackend = ctx.backend
        self.transposed: Quantized | None = None
        self.x_TI: Tensor | None = None
        if ctx.saved_layout is not None:
            self.transposed = ctx.saved_layout.with_tensors(saved)
        elif saved:
            self.x_TI = saved[0].reshape(-1, saved[0].shape[-1])

    def weight_grad(self, grad: Quantized | None, grad_TO: Tensor) -> Callable[[], Tensor]:
        """A function that computes the gradient. It holds only what it needs: `grad`, or `grad_TO` without it."""
        if self.recipe.input_t is None or grad is None:
            return partial(self._wgrad, grad_TO)
        return partial(self._low_precision_wgrad, grad, grad_TO.dtype)

    def _wgrad(self, grad_TO: Tensor) -> Tensor:
        assert self.x_TI is not None
        return grad_TO.T @ self.x_TI

    def _low_precision_wgrad(self, grad: Quantized, dtype: torch.dtype) -> Tensor:
        if self.transposed is None:
            assert self.x_TI is not None
            assert self.recipe.input_t is not None
            self.transposed = self.backend.quantize_transposed(self.x_TI, self.recipe.input_t)
        return self.backend.matmul(grad, self.transposed, dtype)


def _quantize_grad(
    recipe: Recipe, backend: EmulatedBackend, grad_TO: Tensor, wants_x: bool, wants_weight: bool
) -> tuple[Quantized | None, Quantized | None]:
    """The output gradient by rows, for the input gradient, and transposed, for the weight gradient."""
    if wants_x and wants_weight and recipe.grad_t is not None:
        return backend.quantize_both(grad_TO, recipe.grad, recipe.grad_t)
    rows = backend.quantize_rows(grad_TO, recipe.grad) if wants_x else None
    if not wants_weight or recipe.grad_t is None:
        return rows, None
    return rows, backend.quantize_transposed(grad_TO, recipe.grad_t)


def _quantized_weight(
    precision: LinearPrecision, weight: Tensor, backend: EmulatedBackend
) -> tuple[Quantized, Quantized]:
    """The quantized weight for the forward GEMM, and transposed for the input gradient."""

    def make() -> tuple[Quantized, Quantized]:
        return backend.quantize_weight(weight.detach(), precision.recipe.weight)

    return precision.cache.get_or_make(make, type(backend), weight)
