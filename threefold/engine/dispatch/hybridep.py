"""The HybridEP dispatcher (the hybrid-ep branch of DeepEP): rows arrive sorted by expert.

`select.py` makes it. This adapter has never run with the real package. It follows the package's documentation and is
tested against a stand-in with the same signatures. Rows travel in bf16, and every rank must have the same number of
tokens.

Shapes: T tokens, D model dim, K experts of a token, R rows by local expert, E experts, e experts held here.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from threefold.engine.dispatch.async_exchange import AsyncExchange, Wait, start_exchange
from threefold.engine.dispatch.capacity import Capacity
from threefold.engine.dispatch.flex_base import FlexDispatcher, FlexState, to_fp32
from threefold.engine.dispatch.packages.find_package import argument_names, find_buffer_class
from threefold.engine.dist.mesh import Group


class HybridEpDispatcher(FlexDispatcher):
    """HybridEP, whose buffer dispatches and permutes in one call."""

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
        _, self._buffer_class, _ = find_buffer_class("hybridep", chip)
        self._num_sms = num_sms
        self._buffer: Any = None
        self._largest = (0, 0)

    def _fit(self, num_tokens: int, dim: int) -> Any:
        """The buffer, made anew when the number of tokens or their width grows."""
        if num_tokens > self._largest[0] or dim > self._largest[1]:
            self._largest = max(num_tokens, self._largest[0]), max(dim, self._largest[1])
            optional = {
                "num_local_experts": self.num_experts // self.ep.size,
                "num_of_experts": self.num_experts,  # only older releases take it
                "num_sms_dispatch_api": self._num_sms,
                "num_sms_combine_api": self._num_sms,
            }
            accepted = argument_names(self._buffer_class, "__init__")
            supported = {name: value for name, value in optional.items() if value is not None and name in accepted}
            tokens, hidden = self._largest
            self._buffer = self._buffer_class(
                self.ep.handle, hidden_dim=hidden, max_num_of_tokens_per_rank=tokens, **supported
            )
        return self._buffer

    def token_dispatch(self, x_TD: Tensor, weight_TK: Tensor, state: FlexState) -> tuple[Tensor, Tensor]:
        kept_TK = state.expert_TK >= 0
        expert_TK = state.expert_TK.clamp(min=0)
        weight_TE = weight_TK.new_zeros(len(weight_TK), self.num_experts)
        # The scatter adds: a dropped copy is clamped to expert 0, which may also be a real choice of the token.
        weight_TE = weight_TE.scatter_add(1, expert_TK, weight_TK.masked_fill(~kept_TK, 0))
        routed_TE = torch.zeros_like(weight_TE, dtype=torch.long).scatter_add_(1, expert_TK, kept_TK.long()).bool()

        arrival = state.arrival

        def forward(x_TD: Tensor, weight_TE: Tensor) -> tuple[Sequence[Tensor], Wait]:
            x_RD, weight_R, _, count_e, arrival.handle = self._fit(*x_TD.shape).dispatch_with_permute(
                hidden=x_TD, routing_map=routed_TE, probs=weight_TE
            )
            arrival.received = count_e, len(x_RD)
            return (x_RD, weight_R), _wait

        def backward(grad_RD: Tensor, grad_R: Tensor) -> tuple[Sequence[Tensor], Wait]:
            grad_TD, grad_TE = self._buffer.combine_with_unpermute(
                hidden=grad_RD.contiguous(), probs=grad_R.contiguous(), handle=arrival.handle
            )
            return (grad_TD, grad_TE), _wait

        state.dispatch_exchange = AsyncExchange(forward, backward)
        x_RD, weight_R = start_exchange(state.dispatch_exchange, x_TD.contiguous(), to_fp32(weight_TE))
        return x_RD, weight_R

    def permute(self, x: Tensor, weight: Tensor, state: FlexState) -> tuple[Tensor, Tensor, Tensor]:
        return x, weight, state.arrival.received[0].to(x.device, torch.long)

    def unpermute(self, y_PD: Tensor, state: FlexState) -> Tensor:
        return y_PD

    def make_combine_exchange(self, state: FlexState) -> AsyncExchange:
        arrival = state.arrival

        def forward(y_RD: Tensor) -> tuple[Sequence[Tensor], Wait]:
            y_TD, _ = self._buffer.combine_with_unpermute(hidden=y_RD.contiguous(), handle=arrival.handle)
            return (y_TD,), _wait

        def backward(grad_TD: Tensor) -> tuple[Sequence[Tensor], Wait]:
            grad_RD, *_ = self._buffer.dispatch_with_permute(
                hidden=grad_TD.contiguous(), handle=arrival.handle, num_permuted_tokens=arrival.received[1]
            )
            return (grad_RD,), _wait

        return AsyncExchange(forward, backward)


def _wait() -> None:
    """Nothing to wait for: the package works on the current stream."""
