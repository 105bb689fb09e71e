"""Dispatch by HybridEP, the hybrid-ep branch of DeepEP: rows arrive sorted by expert.

Never run with the real package: written after its documentation and tested against a stand-in with its signatures.
Its rows are bf16, and every rank must have as many tokens.

Shapes: T tokens, D model dim, K experts of a token, R rows by local expert, E experts, e experts held here.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from threefold.engine.dispatch.capacity import Capacity
from threefold.engine.dispatch.flex import FlexDispatcher, FlexTicket, narrow
from threefold.engine.dispatch.flight import Flight, Wait, begin
from threefold.engine.dispatch.packages import accepted, find
from threefold.engine.mesh import Group


class HybridEpDispatcher(FlexDispatcher):
    def __init__(
        self,
        num_experts: int,
        ep: Group,
        etp: Group,
        capacity: Capacity | None,
        chip: str,
        num_sms: int | None = None,
    ) -> None:
        super().__init__(num_experts, ep, etp, capacity)
        _, self._kind, _ = find("hybridep", chip)
        self._num_sms = num_sms
        self._buffer: Any = None
        self._largest = (0, 0)

    def _fit(self, num_tokens: int, dim: int) -> Any:
        """Made anew when something grows."""
        if num_tokens > self._largest[0] or dim > self._largest[1]:
            self._largest = max(num_tokens, self._largest[0]), max(dim, self._largest[1])
            named = {
                "num_local_experts": self.num_experts // self.ep.size,
                "num_of_experts": self.num_experts,  # asked for by older releases only
                "num_sms_dispatch_api": self._num_sms,
                "num_sms_combine_api": self._num_sms,
            }
            known = accepted(self._kind, "__init__")
            some = {name: value for name, value in named.items() if value is not None and name in known}
            tokens, hidden = self._largest
            self._buffer = self._kind(self.ep.handle, hidden_dim=hidden, max_num_of_tokens_per_rank=tokens, **some)
        return self._buffer

    def send(self, x_TD: Tensor, weight_TK: Tensor, ticket: FlexTicket) -> tuple[Tensor, Tensor]:
        kept_TK = ticket.expert_TK >= 0
        expert_TK = ticket.expert_TK.clamp(min=0)
        weight_TE = weight_TK.new_zeros(len(weight_TK), self.num_experts)
        # Added, not set: a dropped copy's place may be that of another expert.
        weight_TE = weight_TE.scatter_add(1, expert_TK, weight_TK.masked_fill(~kept_TK, 0))
        routed_TE = torch.zeros_like(weight_TE, dtype=torch.long).scatter_add_(1, expert_TK, kept_TK.long()).bool()

        def there(x_TD: Tensor, weight_TE: Tensor) -> tuple[Sequence[Tensor], Wait]:
            x_RD, weight_R, _, count_e, ticket.handle = self._fit(*x_TD.shape).dispatch_with_permute(
                hidden=x_TD, routing_map=routed_TE, probs=weight_TE
            )
            ticket.came = count_e, len(x_RD)
            return (x_RD, weight_R), _arrived

        def home(grad_RD: Tensor, grad_R: Tensor) -> tuple[Sequence[Tensor], Wait]:
            grad_TD, grad_TE = self._buffer.combine_with_unpermute(
                hidden=grad_RD.contiguous(), probs=grad_R.contiguous(), handle=ticket.handle
            )
            return (grad_TD, grad_TE), _arrived

        ticket.there = Flight(there, home)
        x_RD, weight_R = begin(ticket.there, x_TD.contiguous(), narrow(weight_TE))
        return x_RD, weight_R

    def unpack(self, x: Tensor, weight: Tensor, ticket: FlexTicket) -> tuple[Tensor, Tensor, Tensor]:
        return x, weight, ticket.came[0].to(x.device, torch.long)

    def pack(self, y_PD: Tensor, ticket: FlexTicket) -> Tensor:
        return y_PD

    def way_back(self, ticket: FlexTicket) -> Flight:
        def there(y_RD: Tensor) -> tuple[Sequence[Tensor], Wait]:
            y_TD, _ = self._buffer.combine_with_unpermute(hidden=y_RD.contiguous(), handle=ticket.handle)
            return (y_TD,), _arrived

        def home(grad_TD: Tensor) -> tuple[Sequence[Tensor], Wait]:
            grad_RD, *_ = self._buffer.dispatch_with_permute(
                hidden=grad_TD.contiguous(), handle=ticket.handle, num_permuted_tokens=ticket.came[1]
            )
            return (grad_RD,), _arrived

        return Flight(there, home)


def _arrived() -> None:
    """The package works on the current stream."""
