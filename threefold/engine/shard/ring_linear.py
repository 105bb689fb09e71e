"""Linears whose tensor-parallel communication overlaps with their GEMM (`knobs.tp_overlap`).

The all-gather in front of a column-parallel linear and the reduce-scatter behind a row-parallel one become rings: a
piece of the sequence is multiplied while the next one travels. The bytes are the same; sums are taken in the order of
the ring. `tensor_parallel.py` calls these functions.

Shapes: ... any dims, s this rank's piece of the sequence, S all pieces, I inner dim, O outer dim of a GEMM.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threefold.engine.autograd.linear import linear
from threefold.engine.context import count_event
from threefold.engine.dist.collectives import send_recv
from threefold.engine.dist.mesh import Group


def all_gather_linears(x_sI: Tensor, linears: Sequence[nn.Linear], group: Group) -> list[Tensor]:
    """The output of each linear for the whole sequence, from this rank's piece of the input."""
    if group.is_trivial:
        return [linear(x_sI) for linear in linears]
    outs = _AllGatherLinears.apply(x_sI, group, *(linear.weight for linear in linears))
    biases = [linear.bias for linear in linears]
    return [out if bias is None else out + bias for out, bias in zip(outs, biases, strict=True)]


def linear_reduce_scatter(x_SI: Tensor, weight_OI: Tensor, group: Group) -> Tensor:
    """This rank's piece of the output, summed over ranks."""
    return linear(x_SI, weight_OI) if group.is_trivial else _LinearReduceScatter.apply(x_SI, weight_OI, group)


def ring_pieces(piece: Tensor, group: Group) -> Iterator[tuple[int, Tensor]]:
    """Every rank's piece with its index, this rank's first. The next piece arrives while the caller uses one."""
    rank, size = group.rank, group.size
    for step in range(size):
        pending, arriving = None, piece
        if step < size - 1:
            arriving = torch.empty_like(piece)
            pending = send_recv([arriving], [piece], group, (rank + 1) % size, (rank - 1) % size)
        yield (rank - step) % size, piece
        if pending is not None:
            pending.wait()
        piece = arriving


def ring_reduce(parts: "_PartialGemms", group: Group) -> Tensor:
    """This rank's piece of the sum over ranks. The next partial product is computed while the sum so far travels."""
    rank, size = group.rank, group.size
    summed = parts((rank - 1) % size)
    for step in range(1, size):
        arriving = torch.empty_like(summed)
        pending = send_recv([arriving], [summed.contiguous()], group, (rank + 1) % size, (rank - 1) % size)
        part = parts((rank - 1 - step) % size)
        pending.wait()
        summed = arriving.add_(part)
    return summed


class _PartialGemms:
    """This rank's partial products, computed one piece of the sequence at a time."""

    def __init__(self, inputs: Sequence[Tensor], weights: Sequence[Tensor], size: int) -> None:
        self.inputs, self.weights, self.size = inputs, weights, size

    def __call__(self, index: int) -> Tensor:
        products = [_piece(x, index, self.size) @ w for x, w in zip(self.inputs, self.weights, strict=True)]
        return products[0] if len(products) == 1 else torch.stack(products).sum(dim=0)


def _piece(x: Tensor, index: int, size: int) -> Tensor:
    step = x.shape[-2] // size
    return x.narrow(-2, index * step, step)


def _weight_grad(grad_SO: Tensor, x_SI: Tensor) -> Tensor:
    return grad_SO.flatten(0, -2).T @ x_SI.flatten(0, -2)


class _AllGatherLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_sI: Tensor, group: Group, *weights: Tensor) -> tuple[Tensor, ...]:
        count_event("tensor-parallel ring", "all-gather")
        size = group.size
        lead, length = x_sI.shape[:-2], x_sI.shape[-2] * size
        x_SI = x_sI.new_empty(*lead, length, x_sI.shape[-1])
        outs = [x_sI.new_empty(*lead, length, len(weight)) for weight in weights]
        for index, piece in ring_pieces(x_sI.contiguous(), group):
            _piece(x_SI, index, size).copy_(piece)
            for out, weight in zip(outs, weights, strict=True):
                _piece(out, index, size).copy_(F.linear(piece, weight))
        # The gathered input is for the weight gradients alone: frozen weights need none.
        ctx.save_for_backward(x_SI if any(ctx.needs_input_grad[2:]) else None, *weights)
        ctx.group = group
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_SI, *weights = ctx.saved_tensors
        wants_x, _, *wants = ctx.needs_input_grad
        x_grad = ring_reduce(_PartialGemms(grads, weights, ctx.group.size), ctx.group) if wants_x else None
        return x_grad, None, *(_weight_grad(grad, x_SI) if w else None for grad, w in zip(grads, wants, strict=True))


class _LinearReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SI: Tensor, weight_OI: Tensor, group: Group) -> Tensor:
        count_event("tensor-parallel ring", "reduce-scatter")
        ctx.save_for_backward(x_SI if ctx.needs_input_grad[1] else None, weight_OI)
        ctx.group, ctx.shape = group, x_SI.shape
        return ring_reduce(_PartialGemms([x_SI], [weight_OI.T], group.size), group)

    @staticmethod
    def backward(ctx: Any, grad_sO: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x_SI, weight_OI = ctx.saved_tensors
        size = ctx.group.size
        x_grad = grad_sO.new_empty(ctx.shape)
        weight_grad = None if x_SI is None else torch.zeros_like(weight_OI)
        for index, piece in ring_pieces(grad_sO.contiguous(), ctx.group):
            _piece(x_grad, index, size).copy_(piece @ weight_OI)
            if weight_grad is not None:
                weight_grad += _weight_grad(piece, _piece(x_SI, index, size))
        return x_grad, weight_grad, None
