"""Linear layers whose three GEMMs (forward, input gradient, weight gradient) run in low precision.

For the backward only the input is saved, transposed and quantized as the weight-gradient GEMM reads it: one byte
per number in FP8, and once for all layers that share the input. Where the input is recomputed, or another operation
saves it anyway, the unquantized input is saved, which costs nothing, and is quantized in the backward.

`models/build.py` replaces `nn.Linear` by `LowPrecisionLinear`; `layers/input_linears.py` and
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
from threefold.engine.precision.emulated_backend import EmulatedBackend, QuantizedWeights
from threefold.engine.precision.quantize import Quantized
from threefold.engine.precision.recipes import Recipe
from threefold.engine.precision.scaled_mm_backends import EMULATED, choose_backend
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
    cache: WeightCache[QuantizedWeights]  # the first of several layers that share an input caches all of their weights
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
        quantized_weights = _quantized_weights(precisions[0], weights, backend)
        ctx.joins = quantized_weights.is_joined
        outs = (backend.matmul(rows, weight, x.dtype) for weight in quantized_weights.forward)
        return tuple(y.view(*x.shape[:-1], y.shape[1]) for y in outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        num_weights = len(ctx.precisions)
        weights, saved = ctx.saved_tensors[:num_weights], ctx.saved_tensors[num_weights:]
        grads_TO = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        transposed: tuple[Quantized, ...] = ()
        if ctx.needs_input_grad[0]:
            transposed = _quantized_weights(ctx.precisions[0], weights, ctx.backend).transposed
        backward = _backward_joined if ctx.joins else _backward_each
        x_grad, weight_grads = backward(ctx, grads_TO, transposed, _SavedInput(ctx, saved))
        return None if x_grad is None else x_grad.view(ctx.shape), None, *weight_grads


Grads = tuple[Tensor | None, list[Tensor | None]]  # of the input, and of the weights


def _backward_each(
    ctx: Any, grads_TO: list[Tensor], weights: tuple[Quantized, ...], saved_input: "_SavedInput"
) -> Grads:
    """Weight by weight."""
    recipe, backend, x_grad, weight_grads = ctx.precisions[0].recipe, ctx.backend, None, []
    for n, grad_TO in enumerate(grads_TO):
        rows, transposed = _quantize_grads(recipe, backend, [grad_TO], bool(weights), ctx.wants_weights[n])
        if rows is not None:
            part = backend.matmul(rows, weights[n], grad_TO.dtype)
            x_grad = part if x_grad is None else x_grad + part
        del rows
        weight_grads.append(_weight_grad(ctx, n, saved_input, transposed, grad_TO))
    return x_grad, weight_grads


def _backward_joined(
    ctx: Any, grads_TO: list[Tensor], weights: tuple[Quantized, ...], saved_input: "_SavedInput"
) -> Grads:
    """One GEMM for the input gradient, which sums over the outputs of all weights, and one for all weight gradients."""
    recipe, backend, dtype = ctx.precisions[0].recipe, ctx.backend, grads_TO[0].dtype
    rows, transposed = _quantize_grads(recipe, backend, grads_TO, bool(weights), any(ctx.wants_weights))
    x_grad = None if rows is None else backend.matmul(rows, weights[0], dtype)
    del rows
    heights = [grad.shape[1] for grad in grads_TO]
    if transposed is None:
        return x_grad, [None] * len(heights)
    if all(ctx.wants_weights) and all(queue is None for queue, _ in ctx.owners):
        return x_grad, list(saved_input.weight_grad(transposed, grads_TO[0])().split(heights))
    parts = enumerate(_row_parts(transposed, heights))
    return x_grad, [_weight_grad(ctx, n, saved_input, part, grads_TO[n]) for n, part in parts]


def _weight_grad(
    ctx: Any, n: int, saved_input: "_SavedInput", grad: Quantized | None, grad_TO: Tensor
) -> Tensor | None:
    """The gradient of one weight; None where it is not wanted, or waits in a queue."""
    if not ctx.wants_weights[n]:
        return None
    compute, (queue, owner) = saved_input.weight_grad(grad, grad_TO), ctx.owners[n]
    if queue is None:
        return compute()
    queue.append((owner, compute))
    return None


def _row_parts(whole: Quantized, heights: list[int]) -> list[Quantized]:
    """Rows of a quantized matrix; scales are copied, because those of neighboring rows have to be contiguous."""
    values, scales = whole.values.split(heights), whole.scales.split(heights)
    return [
        Quantized(value, scale.T.contiguous().T, None, (len(value), whole.shape[1]), whole.spec)
        for value, scale in zip(values, scales, strict=True)
    ]


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


def _quantize_grads(
    recipe: Recipe, backend: EmulatedBackend, grads_TO: list[Tensor], wants_x: bool, wants_weight: bool
) -> tuple[Quantized | None, Quantized | None]:
    """The output gradients by rows, for the input gradient, and transposed, for the weight gradients."""
    return backend.quantize_joined(grads_TO, recipe.grad if wants_x else None, recipe.grad_t if wants_weight else None)


def _quantized_weights(
    precision: LinearPrecision, weights: Sequence[Tensor], backend: EmulatedBackend
) -> QuantizedWeights:
    """The quantized weights of layers that share an input; `precision` is that of the first."""

    def make() -> QuantizedWeights:
        return backend.quantize_weights([weight.detach() for weight in weights], precision.recipe.weight)

    return precision.cache.get_or_make(make, (type(backend), len(weights)), *weights)
