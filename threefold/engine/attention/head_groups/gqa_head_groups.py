"""Grouped-query attention some heads at a time, from the layer's input to the output projection.

At a million tokens the queries of all heads, their gradients and the gradient of the output take several times the
memory of the residual stream. Here queries, keys and values of a group are projected from the input, attend, and are
freed; the backward projects them once more, and makes the part of the output's gradient that the group needs. Outputs
and log-sum-exps are saved, so that the backward does not attend a second time (`autograd/saved_tensors.py`).
`models/head_groups.py` chooses this path in recomputed layers.

Shapes: B batch, S sequence, T = B * S tokens, D model dim, X heads of a group times their dim, I and O dims of weights.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threefold.engine.attention.gqa import GqaAttention
from threefold.engine.attention.head_groups.cudnn_head_groups import head_groups
from threefold.engine.autograd.saved_tensors import CORE_ATTENTION, SavedOutputs
from threefold.engine.autograd.token_chunks import chunk_size
from threefold.engine.layers.positions import Positions


@dataclass(frozen=True)
class _Group:
    """One group of heads: its query heads, and the rows of the weights that project to it."""

    heads: slice
    rows: tuple[slice, ...]  # of the weights of queries, keys and, where there are any, values
    columns: slice  # of the output projection


def attend_in_groups(gqa: GqaAttention, x_BSD: Tensor, positions: Positions, heads: int) -> Tensor:
    """`gqa(x, positions)` with `heads` query heads at a time (`query_heads_per_group`)."""
    call = _Call(gqa, positions, tuple(_groups(gqa, heads)))
    parameters = [linear.weight for linear in call.linears] + [linear.bias for linear in call.linears]
    y_BSD: Tensor = _GroupedAttention.apply(x_BSD, call, *parameters, *call.others)
    return y_BSD if gqa.out_norm is None else gqa.out_norm(y_BSD)


def _groups(gqa: GqaAttention, size: int) -> Iterator[_Group]:
    dim, num_inputs = gqa.spec.head_dim, 2 if gqa.v is None else 3
    query_rows = dim * (2 if gqa.spec.gated else 1)
    for heads, kv in head_groups(len(gqa.q.weight) // query_rows, len(gqa.k.weight) // dim, size):
        rows = (_scaled(heads, query_rows), _scaled(kv, dim), _scaled(kv, dim))
        yield _Group(heads, rows[:num_inputs], _scaled(heads, dim))


def _scaled(heads: slice, size: int) -> slice:
    return slice(heads.start * size, heads.stop * size)


@dataclass(frozen=True)
class _Call:
    """One call of a module, and its groups of heads."""

    gqa: GqaAttention
    positions: Positions
    groups: tuple[_Group, ...]

    @property
    def linears(self) -> list[nn.Linear]:
        """The input projections and, last, the output projection."""
        gqa = self.gqa
        return [gqa.q, gqa.k, *([] if gqa.v is None else [gqa.v]), gqa.out]

    @property
    def others(self) -> list[nn.Parameter]:
        """Parameters that groups share, or that belong to heads: those of norms, and sinks."""
        sinks = [] if self.gqa.sinks is None else [self.gqa.sinks]
        return [*self.gqa.q_norm.parameters(), *self.gqa.k_norm.parameters(), *sinks]

    def attend(self, group: _Group, projected: Sequence[Tensor]) -> Tensor:
        """The outputs of a group, (B, S, X), from its projected queries, keys and values."""
        q_BSX, k_BSX, *v_BSX = projected
        heads = GqaAttention.prepare(self.gqa, self.positions, q_BSX, k_BSX, *(v_BSX or (k_BSX,)))
        return GqaAttention.core(self.gqa, self.positions, *heads, group.heads)


class _GroupedAttention(torch.autograd.Function):
    """`parameters` are the weights of `_Call.linears`, then their biases, then `_Call.others`."""

    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, call: _Call, *parameters: Tensor | None) -> Tensor:
        weights, biases = _weights_and_biases(call, parameters)
        outputs, saved, counts = [], [], []
        for group in call.groups:
            store = SavedOutputs((CORE_ATTENTION,))
            with store.while_recording():
                outputs.append(call.attend(group, _project(x_BSD, group, weights, biases)))
            saved += store.tensors
            counts.append(len(store.tensors))
        ctx.save_for_backward(x_BSD, *parameters, *saved)
        ctx.call, ctx.counts = call, counts
        return _project_out(outputs, weights[-1], biases[-1])

    @staticmethod
    def backward(ctx: Any, y_grad_BSD: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        num_parameters = 2 * len(call.linears) + len(call.others)
        x_BSD, *rest = ctx.saved_tensors
        parameters, saved = rest[:num_parameters], iter(rest[num_parameters:])
        grads = _Gradients(call, x_BSD, y_grad_BSD, parameters, ctx.needs_input_grad)
        for group, count in zip(call.groups, ctx.counts, strict=True):
            store = SavedOutputs((CORE_ATTENTION,), [next(saved) for _ in range(count)])
            grads.add(group, store)
        return grads.x_grad, None, *grads.of_parameters


class _Gradients:
    """The gradients of one backward, to which groups add theirs."""

    def __init__(
        self, call: _Call, x_BSD: Tensor, y_grad_BSD: Tensor, parameters: Sequence[Any], wants: Sequence[bool]
    ) -> None:
        self.call, self.x_BSD, self.wants_x, self.wants = call, x_BSD, wants[0], wants[2:]
        self.y_grad_TD = y_grad_BSD.flatten(0, 1)
        self.weights, self.biases = _weights_and_biases(call, parameters)
        self.x_grad: Tensor | None = None
        self.of_parameters: list[Tensor | None] = [None] * len(parameters)
        if self._wants_bias(-1):
            self.of_parameters[2 * len(self.weights) - 1] = self.y_grad_TD.sum(dim=0)

    def _wants_bias(self, number: int) -> bool:
        return self.biases[number] is not None and self.wants[range(len(self.weights))[number] + len(self.weights)]

    def add(self, group: _Group, store: SavedOutputs) -> None:
        """The backward of one group, with its saved outputs."""
        projected = [one.requires_grad_() for one in _project(self.x_BSD, group, self.weights, self.biases)]
        with torch.enable_grad(), store.while_replaying():
            out_BSX = self.call.attend(group, projected)
        last, out_TX = len(self.weights) - 1, out_BSX.detach().flatten(0, 1)
        if self.wants[last]:
            self._grad_of(last)[:, group.columns] = self.y_grad_TD.t() @ out_TX
        others = [p for p, wanted in zip(self.call.others, self.wants[2 * last + 2 :], strict=True) if wanted]
        out_grad = (self.y_grad_TD @ self.weights[-1][:, group.columns]).view_as(out_BSX)
        found = torch.autograd.grad(out_BSX, [*projected, *others], out_grad)
        del out_BSX, out_TX, out_grad, projected
        self._add_others(found[last:])
        self._add_projected(group, [grad.flatten(0, 1) for grad in found[:last]])

    def _add_projected(self, group: _Group, grads_TO: list[Tensor]) -> None:
        x_TD = self.x_BSD.flatten(0, 1)
        for number, (rows, grad_TO) in enumerate(zip(group.rows, grads_TO, strict=True)):
            if self.wants[number]:
                self._grad_of(number)[rows] += grad_TO.t() @ x_TD
            if self._wants_bias(number):
                self._grad_of(len(self.weights) + number)[rows] += grad_TO.sum(dim=0)
            if not self.wants_x:
                continue
            weight_OI = self.weights[number][rows]
            if self.x_grad is None:
                self.x_grad = (grad_TO @ weight_OI).view_as(self.x_BSD)
            else:
                self.x_grad.view_as(x_TD).addmm_(grad_TO, weight_OI)

    def _add_others(self, grads: Sequence[Tensor]) -> None:
        found = iter(grads)
        for number, wanted in enumerate(self.wants[2 * len(self.weights) :], 2 * len(self.weights)):
            if wanted:
                before, grad = self.of_parameters[number], next(found)
                self.of_parameters[number] = grad if before is None else before.add_(grad)

    def _grad_of(self, number: int) -> Tensor:
        """The gradient of a weight or bias, of which groups fill parts."""
        grad = self.of_parameters[number]
        if grad is None:
            parameter = (*self.weights, *self.biases)[number]
            assert parameter is not None
            self.of_parameters[number] = grad = torch.zeros_like(parameter)
        return grad


def _weights_and_biases(call: _Call, parameters: Sequence[Any]) -> tuple[list[Tensor], list[Tensor | None]]:
    count = len(call.linears)
    return list(parameters[:count]), list(parameters[count : 2 * count])


def _project(x_BSD: Tensor, group: _Group, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """Queries, keys and values of a group as the linears make them."""
    linears = zip(group.rows, weights, biases, strict=False)
    return [F.linear(x_BSD, weight[rows], None if bias is None else bias[rows]) for rows, weight, bias in linears]


def _project_out(outputs_BSX: Sequence[Tensor], weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """The output projection of all groups, some tokens at a time: their outputs are concatenated for these alone."""
    outputs_TX = [out.flatten(0, 1) for out in outputs_BSX]
    num_tokens = len(outputs_TX[0])
    y_TD = weight_OI.new_empty(num_tokens, len(weight_OI))
    size = chunk_size(num_tokens, weight_OI.shape[1] * weight_OI.element_size())
    for first in range(0, num_tokens, max(1, size)):
        tokens = slice(first, first + size)
        y_TD[tokens] = F.linear(torch.cat([out[tokens] for out in outputs_TX], dim=1), weight_OI, bias_O)
    return y_TD.view(*outputs_BSX[0].shape[:2], -1)
