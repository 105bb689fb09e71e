"""Dispatch on one rank: rows sorted by expert, and summed back. The protocol of every other transport.

Shapes: T tokens, D model dim, K experts of a token, R rows, E experts, C capacity of an expert.

    x_RD, weight_R, count_E, ticket = dispatcher.dispatch(x_TD, expert_TK, weight_TK)
    y_TD = dispatcher.combine(y_RD, ticket)

`combine` only sums: the experts have multiplied by `weight_R`.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Dispatcher(Protocol):
    def dispatch(self, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> tuple[Tensor, Tensor, Tensor, Any]: ...

    def combine(self, y_RD: Tensor, ticket: Any) -> Tensor: ...


@dataclass(frozen=True)
class Ticket:
    """The way there and back. -1 where a row is padding, and where a copy of a token was dropped."""

    slot_R: Tensor  # t * K + k that each row came from
    row_TK: Tensor  # row that each copy of a token went to
    padded: bool


@dataclass(frozen=True)
class LocalDispatcher:
    num_experts: int
    capacity_factor: float | None = None  # None: dropless

    def dispatch(self, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> tuple[Tensor, Tensor, Tensor, Ticket]:
        if self.capacity_factor is None:
            ticket, count_E = sort_by_expert(expert_TK, self.num_experts)
        else:
            fair = expert_TK.numel() / self.num_experts
            capacity = max(1, math.ceil(fair * self.capacity_factor))
            ticket, count_E = drop_and_pad(expert_TK, weight_TK, self.num_experts, capacity)
        token_R = ticket.slot_R.div(expert_TK.shape[1], rounding_mode="floor")
        x_RD = _Spread.apply(x_TD, token_R, ticket.row_TK, ticket.padded)
        weight_R = _Spread.apply(weight_TK.reshape(-1, 1), ticket.slot_R, ticket.row_TK.view(-1, 1), ticket.padded)
        return x_RD, weight_R[:, 0], count_E, ticket

    def combine(self, y_RD: Tensor, ticket: Ticket) -> Tensor:
        token_R = ticket.slot_R.div(ticket.row_TK.shape[1], rounding_mode="floor")
        return _Gather.apply(y_RD, token_R, ticket.row_TK, ticket.padded)


def sort_by_expert(expert_TK: Tensor, num_experts: int) -> tuple[Ticket, Tensor]:
    flat = expert_TK.flatten()
    # Stable: equal experts keep token order, so dispatch and recompute agree bit for bit.
    slot_R = flat.argsort(stable=True)
    row = torch.empty_like(slot_R).scatter_(0, slot_R, torch.arange(len(slot_R), device=slot_R.device))
    return Ticket(slot_R, row.view_as(expert_TK), padded=False), count(flat, num_experts)


def drop_and_pad(expert_TK: Tensor, weight_TK: Tensor, num_experts: int, capacity: int) -> tuple[Ticket, Tensor]:
    """Exactly `capacity` rows an expert: its heaviest tokens (the earlier of equals), then padding."""
    flat, device = expert_TK.flatten(), expert_TK.device
    heaviest = weight_TK.detach().flatten().argsort(descending=True, stable=True)
    order = heaviest[flat[heaviest].argsort(stable=True)]
    count_E = count(flat, num_experts)
    first_E = count_E.cumsum(0) - count_E
    rank = torch.arange(len(order), device=device) - first_E[flat[order]]
    row = torch.where(rank < capacity, flat[order] * capacity + rank, -1)
    row_TK = torch.empty_like(row).scatter_(0, order, row).view_as(expert_TK)
    # One place more than rows: where what was dropped is written and forgotten.
    slot_R = torch.full((num_experts * capacity + 1,), -1, device=device)
    slot_R = slot_R.scatter_(0, torch.where(row < 0, len(slot_R) - 1, row), order)[:-1]
    return Ticket(slot_R, row_TK, padded=True), torch.full_like(count_E, capacity)


def count(expert_R: Tensor, num_experts: int) -> Tensor:
    """How many rows each expert gets; no wait for the device, unlike bincount."""
    zeros_E = torch.zeros(num_experts, dtype=torch.long, device=expert_R.device)
    return zeros_E.scatter_add_(0, expert_R, torch.ones_like(expert_R))


def _take(x: Tensor, index: Tensor, padded: bool) -> Tensor:
    """Rows by index, zeros for -1."""
    if not padded:
        return x[index]
    rows = x[index.clamp(min=0)]
    return rows.masked_fill((index < 0).unsqueeze(-1), 0)


class _Spread(torch.autograd.Function):
    """Each token to its rows. The backward sums by token in a fixed order, where autograd's own would not."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, token_R: Tensor, row_TK: Tensor, padded: bool) -> Tensor:
        ctx.save_for_backward(row_TK)
        ctx.padded = padded
        return _take(x_TD, token_R, padded)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        (row_TK,) = ctx.saved_tensors
        return _take(grad_RD, row_TK, ctx.padded).sum(dim=1), None, None, None


class _Gather(torch.autograd.Function):
    """The rows of each token, summed: the transpose of `_Spread`."""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, token_R: Tensor, row_TK: Tensor, padded: bool) -> Tensor:
        ctx.save_for_backward(token_R)
        ctx.padded = padded
        return _take(y_RD, row_TK, padded).sum(dim=1)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        (token_R,) = ctx.saved_tensors
        return _take(grad_TD, token_R, ctx.padded), None, None, None
