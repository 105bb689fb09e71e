"""Linear layers whose three products run in a narrow format.

For the backward only the input is kept, turned and rounded as the weight gradient will use it: one byte a number, and
once for all layers that share it. Where the input is made again by a recompute, or whoever made it keeps it anyhow, it
is kept as it is, which costs nothing, and rounded then.

Shapes: ... any dims before, T tokens, I and O dims in and out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from threefold.engine.pipeline.delay import left_of
from threefold.engine.precision.choose import products_for
from threefold.engine.precision.emulated import Emulated
from threefold.engine.precision.quantize import Quantized
from threefold.engine.precision.recipes import Recipe
from threefold.engine.precision.weights import Kept
from threefold.engine.recompute import is_hidden


class LowLinear(nn.Linear):
    """Parameters and their names are those of `nn.Linear`."""

    def __init__(self, plain: nn.Linear, recipe: Recipe, keep: bool = True, input_stays: bool = False) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight, self.bias = plain.weight, plain.bias
        self.low = Low(recipe, Kept(keep), input_stays)

    def forward(self, x: Tensor) -> Tensor:
        [y] = low_linears(x, [(self.weight, self.low)])
        return self.biased(y)

    def biased(self, y: Tensor) -> Tensor:
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True)
class Low:
    """How a weight takes part in products."""

    recipe: Recipe
    kept: Kept[tuple[Quantized, Quantized]]
    input_stays: bool = False  # whoever made it keeps it for a backward of its own


def low_linear(x: Tensor, weight_OI: Tensor, recipe: Recipe) -> Tensor:
    """x W^T, by the recipe in all three products."""
    [y] = low_linears(x, [(weight_OI, Low(recipe, Kept(keep=False)))])
    return y


def low_linears(x: Tensor, layers: Sequence[tuple[Tensor, Low]]) -> list[Tensor]:
    """Of one input, which is rounded and kept once."""
    weights, lows = zip(*layers, strict=True)
    owners = [(left_of(x, weight), weight) for weight in weights]
    given = (weight if left is None else weight.detach() for left, weight in owners)
    # Inside the Function nobody would know of recompute.
    there = is_hidden(x) or all(low.input_stays for low in lows)
    return list(_LowLinears.apply(x, (lows, owners, there), *given))


class _LowLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, known: tuple[Any, ...], *weights: Tensor) -> tuple[Tensor, ...]:
        lows, ctx.owners, there = known
        recipe = lows[0].recipe
        x_TI = x.reshape(-1, x.shape[-1])
        products = products_for(recipe, x_TI, weights)
        ctx.lows, ctx.shape, ctx.products = lows, x.shape, products
        ctx.wanted = [
            left is not None or wanted for (left, _), wanted in zip(ctx.owners, ctx.needs_input_grad[2:], strict=True)
        ]
        needed = any(ctx.wanted)
        if needed and recipe.input_t is not None and not there:
            rows, kept = products.both(x_TI, recipe.input, recipe.input_t)
            ctx.kept = kept.like(tuple(x_TI.new_empty(0) for _ in kept.tensors))
            ctx.save_for_backward(*weights, *kept.tensors)
        else:
            rows, ctx.kept = products.along_rows(x_TI, recipe.input), None
            ctx.save_for_backward(*weights, *([x] if needed else []))
        narrow = [_weight(low, weight, products)[0] for low, weight in zip(lows, weights, strict=True)]
        return tuple(products.multiply(rows, w, x.dtype).view(*x.shape[:-1], w.shape[0]) for w in narrow)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        number = len(ctx.lows)
        weights, saved = ctx.saved_tensors[:number], ctx.saved_tensors[number:]
        x_grad: Tensor | None = None
        weight_grads: list[Tensor | None] = []
        inputs = _Inputs(ctx, saved)
        for n, (low, weight, grad) in enumerate(zip(ctx.lows, weights, grads, strict=True)):
            grad_TO = grad.reshape(-1, grad.shape[-1])
            wants_weight, (left, owner) = ctx.wanted[n], ctx.owners[n]
            rows, turned = _grad_sides(low.recipe, ctx.products, grad_TO, ctx.needs_input_grad[0], wants_weight)
            if rows is not None:
                part = ctx.products.multiply(rows, _weight(low, weight, ctx.products)[1], grad.dtype)
                x_grad = part if x_grad is None else x_grad + part
            if left is not None:
                left.append((owner, inputs.weight_grad(turned, grad_TO)))
            weight_grads.append(inputs.weight_grad(turned, grad_TO)() if wants_weight and left is None else None)
        return None if x_grad is None else x_grad.view(ctx.shape), None, *weight_grads


class _Inputs:
    """What was kept of x, once for all weights."""

    def __init__(self, ctx: Any, saved: tuple[Tensor, ...]) -> None:
        self.recipe: Recipe = ctx.lows[0].recipe
        self.products: Emulated = ctx.products
        self.turned: Quantized | None = None
        self.x_TI: Tensor | None = None
        if ctx.kept is not None:
            self.turned = ctx.kept.like(saved)
        elif saved:
            self.x_TI = saved[0].reshape(-1, saved[0].shape[-1])

    def weight_grad(self, grad: Quantized | None, grad_TO: Tensor) -> Callable[[], Tensor]:
        """How to compute it, of which only what that needs is held."""
        if self.recipe.input_t is None or grad is None:
            return partial(self._wide, grad_TO)
        return partial(self._narrow, grad, grad_TO.dtype)

    def _wide(self, grad_TO: Tensor) -> Tensor:
        assert self.x_TI is not None
        return grad_TO.T @ self.x_TI

    def _narrow(self, grad: Quantized, dtype: torch.dtype) -> Tensor:
        if self.turned is None:
            assert self.x_TI is not None
            assert self.recipe.input_t is not None
            self.turned = self.products.turned(self.x_TI, self.recipe.input_t)
        return self.products.multiply(grad, self.turned, dtype)


def _grad_sides(
    recipe: Recipe, products: Emulated, grad_TO: Tensor, wants_x: bool, wants_weight: bool
) -> tuple[Quantized | None, Quantized | None]:
    if wants_x and wants_weight and recipe.grad_t is not None:
        return products.both(grad_TO, recipe.grad, recipe.grad_t)
    rows = products.along_rows(grad_TO, recipe.grad) if wants_x else None
    return rows, products.turned(grad_TO, recipe.grad_t) if wants_weight and recipe.grad_t is not None else None


def _weight(low: Low, weight: Tensor, products: Emulated) -> tuple[Quantized, Quantized]:
    """For the product forward, and turned for the gradient of its input."""

    def make() -> tuple[Quantized, Quantized]:
        return products.weights(weight.detach(), low.recipe.weight)

    return low.kept.of(make, type(products), weight)
