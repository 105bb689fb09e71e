"""A layer of experts: route, dispatch, compute, combine, each a phase of its own that can be scheduled apart.

Shapes: B batch, S sequence, T = B * S tokens, D model dim, K experts of a token, R rows, E experts.
"""

import torch
from torch import Tensor, nn

from threefold.engine.dispatch.local import Dispatcher, LocalDispatcher, Ticket
from threefold.engine.mlp import Mlp
from threefold.engine.moe.balance import Balance, measure
from threefold.engine.moe.experts import Experts
from threefold.engine.moe.router import Router, Routing
from threefold.engine.options import Options
from threefold.spec.model import MoeSpec


class MoeLayer(nn.Module):
    dispatcher: Dispatcher

    def __init__(self, spec: MoeSpec, dim: int, activation: str, options: Options) -> None:
        super().__init__()
        self.options = options
        self.router = Router(spec, dim, options.forced_balance)
        self.experts = Experts(
            spec.num_experts, dim, spec.expert_dim, spec.bias, activation, backend=options.expert_backend
        )
        self.shared = Mlp(dim, spec.shared_width) if spec.num_shared else None
        self.shared_gate = nn.Linear(dim, 1, bias=False) if spec.shared_gate else None
        self.dispatcher = LocalDispatcher(spec.num_experts, options.capacity_factor)

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, Balance]:
        x_TD = x_BSD.flatten(0, 1)
        routing = self.router(x_TD)
        x_RD, weight_R, count_E, ticket = self.dispatcher.dispatch(x_TD, routing.expert_TK, routing.weight_TK)
        y_TD = self.dispatcher.combine(self.experts(x_RD, weight_R, count_E), ticket)
        if self.shared is not None:
            y_TD = y_TD + self.compute_shared(x_TD)
        return y_TD.view_as(x_BSD), self.balance(routing, ticket, len(x_BSD))

    def compute_shared(self, x_TD: Tensor) -> Tensor:
        """Apart from the routed path, so that it can run beside an exchange."""
        assert self.shared is not None
        y_TD = self.shared(x_TD)
        return y_TD if self.shared_gate is None else self.shared_gate(x_TD).sigmoid() * y_TD

    def balance(self, routing: Routing, ticket: object, num_sequences: int) -> Balance:
        dropped = torch.zeros((), dtype=torch.long, device=routing.expert_TK.device)
        if isinstance(ticket, Ticket) and ticket.padded:
            dropped = (ticket.row_TK < 0).sum()
        return measure(routing, num_sequences, self.options.wanted, dropped)
