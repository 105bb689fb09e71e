"""The DeepEP dispatcher: a token travels once to each rank that holds any of its experts, and is permuted there.

`select.py` makes it. This adapter has never run with the real package. It follows the package's documentation and is
tested against a stand-in with the same signatures. Rows travel in bf16.

Shapes: T tokens, N tokens received, D model dim, K experts of a token, R rows by local expert, e experts held here.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from threefold.engine.dispatch.async_exchange import AsyncExchange, Wait, start_exchange
from threefold.engine.dispatch.capacity import Capacity
from threefold.engine.dispatch.flex_base import FlexDispatcher, FlexState, to_fp32
from threefold.engine.dispatch.packages.deepep_buffers import ClassicBuffers, DeepEpBuffers, ElasticBuffers
from threefold.engine.dispatch.packages.find_package import find_buffer_class
from threefold.engine.dispatch.rows import sort_with_drops
from threefold.engine.dist.mesh import Group


class DeepEpDispatcher(FlexDispatcher):
    """DeepEP, V1 or V2, whichever is installed (`deepep_buffers.py`)."""

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
        api, buffer_class, package = find_buffer_class("deepep", chip)
        self.buffers: DeepEpBuffers
        if api == "elastic":
            self.buffers = ElasticBuffers(buffer_class, package, ep.handle, num_experts, num_sms)
        else:
            self.buffers = ClassicBuffers(buffer_class, ep.handle, num_experts, num_sms)

    def token_dispatch(self, x_TD: Tensor, weight_TK: Tensor, state: FlexState) -> tuple[Tensor, Tensor]:
        arrival, expert_TK = state.arrival, state.expert_TK

        def forward(x_TD: Tensor, weight_TK: Tensor) -> tuple[Sequence[Tensor], Wait]:
            received = self.buffers.dispatch(x_TD, expert_TK, weight_TK)
            arrival.handle, arrival.received = received.handle, (received.expert_NK, received.counts)
            return (received.x_ND, received.weight_NK), received.wait

        def backward(grad_ND: Tensor, grad_NK: Tensor) -> tuple[Sequence[Tensor], Wait]:
            x_TD, weight_TK, wait = self.buffers.combine(grad_ND.contiguous(), grad_NK.contiguous(), arrival.handle)
            assert weight_TK is not None
            return (x_TD, weight_TK), wait

        state.dispatch_exchange = AsyncExchange(forward, backward)
        x_ND, weight_NK = start_exchange(state.dispatch_exchange, x_TD.contiguous(), to_fp32(weight_TK))
        return x_ND, weight_NK

    def permute(self, x: Tensor, weight: Tensor, state: FlexState) -> tuple[Tensor, Tensor, Tensor]:
        expert_NK, counts = state.arrival.received
        state.arrival.received = None  # the sorted rows say it all from here on
        rows, _ = sort_with_drops(expert_NK.long(), len(counts))
        state.sorted_rows = rows = rows.truncate(sum(counts))
        count_e = torch.tensor(counts, dtype=torch.long).to(x.device, non_blocking=True)
        return rows.permute_tokens(x), rows.permute_weights(weight), count_e

    def unpermute(self, y_PD: Tensor, state: FlexState) -> Tensor:
        summed: Tensor = state.sorted_rows.unpermute_sum(y_PD)
        return summed

    def make_combine_exchange(self, state: FlexState) -> AsyncExchange:
        arrival = state.arrival

        def forward(y_ND: Tensor) -> tuple[Sequence[Tensor], Wait]:
            y_TD, _, wait = self.buffers.combine(y_ND.contiguous(), None, arrival.handle)
            return (y_TD,), wait

        def backward(grad_TD: Tensor) -> tuple[Sequence[Tensor], Wait]:
            grad_ND, wait = self.buffers.dispatch_with_handle(grad_TD.contiguous(), arrival.handle)
            return (grad_ND,), wait

        return AsyncExchange(forward, backward)
