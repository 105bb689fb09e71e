"""Dispatch by DeepEP: a token travels once to each rank that holds any of its experts, and is sorted there.

Never run with the real package: written after its documentation and tested against a stand-in with its signatures.
Its rows are bf16.

Shapes: T tokens, N tokens that came, D model dim, K experts of a token, R rows by local expert, e experts held here.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from threefold.engine.dispatch.buffers import Buffers, ClassicBuffers, ElasticBuffers
from threefold.engine.dispatch.capacity import Capacity
from threefold.engine.dispatch.flex import FlexDispatcher, FlexTicket, narrow
from threefold.engine.dispatch.flight import Flight, Wait, begin
from threefold.engine.dispatch.packages import find
from threefold.engine.dispatch.rows import sort_kept
from threefold.engine.mesh import Group


class DeepEpDispatcher(FlexDispatcher):
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
        kind, found, package = find("deepep", chip)
        self.buffers: Buffers
        if kind == "elastic":
            self.buffers = ElasticBuffers(found, package, ep.handle, num_experts, num_sms)
        else:
            self.buffers = ClassicBuffers(found, ep.handle, num_experts, num_sms)

    def send(self, x_TD: Tensor, weight_TK: Tensor, ticket: FlexTicket) -> tuple[Tensor, Tensor]:
        def there(x_TD: Tensor, weight_TK: Tensor) -> tuple[Sequence[Tensor], Wait]:
            came = self.buffers.dispatch(x_TD, ticket.expert_TK, weight_TK)
            ticket.handle, ticket.came = came.handle, (came.expert_NK, came.counts)
            return (came.x_ND, came.weight_NK), came.wait

        def home(grad_ND: Tensor, grad_NK: Tensor) -> tuple[Sequence[Tensor], Wait]:
            x_TD, weight_TK, wait = self.buffers.combine(grad_ND.contiguous(), grad_NK.contiguous(), ticket.handle)
            assert weight_TK is not None
            return (x_TD, weight_TK), wait

        ticket.there = Flight(there, home)
        x_ND, weight_NK = begin(ticket.there, x_TD.contiguous(), narrow(weight_TK))
        return x_ND, weight_NK

    def unpack(self, x: Tensor, weight: Tensor, ticket: FlexTicket) -> tuple[Tensor, Tensor, Tensor]:
        expert_NK, counts = ticket.came
        rows, _ = sort_kept(expert_NK.long(), len(counts))
        ticket.came = rows = rows.first(sum(counts))
        count_e = torch.tensor(counts, dtype=torch.long).to(x.device, non_blocking=True)
        return rows.of_tokens(x), rows.of_copies(weight), count_e

    def pack(self, y_PD: Tensor, ticket: FlexTicket) -> Tensor:
        summed: Tensor = ticket.came.sum_by_token(y_PD)
        return summed

    def way_back(self, ticket: FlexTicket) -> Flight:
        def there(y_ND: Tensor) -> tuple[Sequence[Tensor], Wait]:
            y_TD, _, wait = self.buffers.combine(y_ND.contiguous(), None, ticket.handle)
            return (y_TD,), wait

        def home(grad_TD: Tensor) -> tuple[Sequence[Tensor], Wait]:
            grad_ND, wait = self.buffers.repeat(grad_TD.contiguous(), ticket.handle)
            return (grad_ND,), wait

        return Flight(there, home)
