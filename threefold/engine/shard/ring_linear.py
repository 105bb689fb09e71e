"""Products whose sequence travels while they compute: `knobs.tp_overlap`.

Gathering before a product and summing behind one are rings here: a piece of the sequence is multiplied while the next
is under way. The bytes are those of an all-gather and a reduce-scatter. Sums are taken in the order of the ring.

Shapes: ... any dims, s this rank's piece of the sequence, S all pieces, I inner dim, O outer dim of a product.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threefold.engine.mesh import Group
from threefold.engine.products import linear
from threefold.engine.shard.collectives import pass_on


def gathered_linears(x_sI: Tensor, linears: Sequence[nn.Linear], group: Group) -> list[Tensor]:
    """Each product of the whole sequence."""
    if group.alone:
        return [linear(x_sI) for linear in linears]
    outs = _GatheredLinears.apply(x_sI, group, *(linear.weight for linear in linears))
    biases = [linear.bias for linear in linears]
    return [out if bias is None else out + bias for out, bias in zip(outs, biases, strict=True)]


def scattered_linear(x_SI: Tensor, weight_OI: Tensor, group: Group) -> Tensor:
    """This rank's piece of the sum over ranks."""
    return linear(x_SI, weight_OI) if group.alone else _ScatteredLinear.apply(x_SI, weight_OI, group)


def visits(piece: Tensor, group: Group) -> Iterator[tuple[int, Tensor]]:
    """Every rank's piece with its number, this rank's first; the next arrives while one is looked at."""
    here, size = group.rank, group.size
    for step in range(size):
        pending, arriving = None, piece
        if step < size - 1:
            arriving = torch.empty_like(piece)
            pending = pass_on([arriving], [piece], group, (here + 1) % size, (here - 1) % size)
        yield (here - step) % size, piece
        if pending is not None:
            pending.wait()
        piece = arriving


def summed(parts: "_Parts", group: Group) -> Tensor:
    """This rank's piece of the sum of all ranks' parts; a part is made while the sum so far is under way."""
    here, size = group.rank, group.size
    total = parts((here - 1) % size)
    for step in range(1, size):
        arriving = torch.empty_like(total)
        pending = pass_on([arriving], [total.contiguous()], group, (here + 1) % size, (here - 1) % size)
        part = parts((here - 1 - step) % size)
        pending.wait()
        total = arriving.add_(part)
    return total


class _Parts:
    """Piece by piece: rows of the inputs times their weights, added up."""

    def __init__(self, inputs: Sequence[Tensor], weights: Sequence[Tensor], size: int) -> None:
        self.inputs, self.weights, self.size = inputs, weights, size

    def __call__(self, number: int) -> Tensor:
        made = [_piece(x, number, self.size) @ w for x, w in zip(self.inputs, self.weights, strict=True)]
        return made[0] if len(made) == 1 else torch.stack(made).sum(dim=0)


def _piece(x: Tensor, number: int, size: int) -> Tensor:
    step = x.shape[-2] // size
    return x.narrow(-2, number * step, step)


def _weight_grad(grad_SO: Tensor, x_SI: Tensor) -> Tensor:
    return grad_SO.flatten(0, -2).T @ x_SI.flatten(0, -2)


class _GatheredLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_sI: Tensor, group: Group, *weights: Tensor) -> tuple[Tensor, ...]:
        size = group.size
        lead, length = x_sI.shape[:-2], x_sI.shape[-2] * size
        x_SI = x_sI.new_empty(*lead, length, x_sI.shape[-1])
        outs = [x_sI.new_empty(*lead, length, len(weight)) for weight in weights]
        for number, piece in visits(x_sI.contiguous(), group):
            _piece(x_SI, number, size).copy_(piece)
            for out, weight in zip(outs, weights, strict=True):
                _piece(out, number, size).copy_(F.linear(piece, weight))
        ctx.save_for_backward(x_SI, *weights)
        ctx.group = group
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_SI, *weights = ctx.saved_tensors
        x_grad = summed(_Parts(grads, weights, ctx.group.size), ctx.group)
        return x_grad, None, *(_weight_grad(grad, x_SI) for grad in grads)


class _ScatteredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SI: Tensor, weight_OI: Tensor, group: Group) -> Tensor:
        ctx.save_for_backward(x_SI, weight_OI)
        ctx.group = group
        return summed(_Parts([x_SI], [weight_OI.T], group.size), group)

    @staticmethod
    def backward(ctx: Any, grad_sO: Tensor) -> tuple[Tensor, Tensor, None]:
        x_SI, weight_OI = ctx.saved_tensors
        size = ctx.group.size
        x_grad = torch.empty_like(x_SI)
        weight_grad = torch.zeros_like(weight_OI)
        for number, piece in visits(grad_sO.contiguous(), ctx.group):
            _piece(x_grad, number, size).copy_(piece @ weight_OI)
            weight_grad += _weight_grad(piece, _piece(x_SI, number, size))
        return x_grad, weight_grad, None
