"""A layer of experts: route, dispatch, compute, combine, each a phase of its own that can be scheduled apart.

Shapes: B batch, S sequence, T = B * S tokens, D model dim, K experts of a token, P rows that travel, E experts.
"""

import torch
from torch import Tensor, nn

from threefold.engine.dispatch.local import LocalDispatcher
from threefold.engine.dispatch.protocol import AnyDispatcher, Ticket
from threefold.engine.mesh import ALONE, Group
from threefold.engine.mlp import Mlp
from threefold.engine.moe.balance import Balance, measure
from threefold.engine.moe.experts import Experts
from threefold.engine.moe.router import Router, Routing
from threefold.engine.offload import away
from threefold.engine.options import Options
from threefold.engine.recompute import again
from threefold.spec.model import MoeSpec


class MoeLayer(nn.Module):
    dispatcher: AnyDispatcher
    tokens: Group = ALONE  # the ranks over which the tokens of a microbatch are spread

    def __init__(self, spec: MoeSpec, dim: int, activation: str, options: Options) -> None:
        super().__init__()
        self.options = options
        self.router = Router(spec, dim, options.forced_balance)
        self.experts = Experts(
            spec.num_experts, dim, spec.expert_dim, spec.bias, activation, backend=options.expert_backend
        )
        self.experts.again, self.experts.fusion = options.again, options.expert_fusion
        self.shared = Mlp(dim, spec.shared_width) if spec.num_shared else None
        self.shared_gate = nn.Linear(dim, 1, bias=False) if spec.shared_gate else None
        self.dispatcher = LocalDispatcher(spec.num_experts, options.capacity_factor)

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, Balance]:
        if self.in_one:
            return self.compute_in_one(x_BSD)
        x_TD = x_BSD.flatten(0, 1)
        routing, ticket = self.route(x_TD)
        x_PD, weight_P = self.dispatch(x_TD, routing, ticket)
        shared_TD = None
        if self.shared is not None and self.options.shared_overlap:
            shared_TD = self.compute_shared(x_TD)
        y_TD = self.combine(self.compute(x_PD, weight_P, ticket), ticket)
        if self.shared is not None:
            y_TD = y_TD + (self.compute_shared(x_TD) if shared_TD is None else shared_TD)
        return y_TD.view_as(x_BSD), self.balance(routing, ticket, len(x_BSD))

    @property
    def in_one(self) -> bool:
        """Nothing travels, nothing is dropped, and kernels that gather are wanted."""
        here = isinstance(self.dispatcher, LocalDispatcher) and self.dispatcher.capacity_factor is None
        return here and self.options.expert_fusion

    def compute_in_one(self, x_BSD: Tensor) -> tuple[Tensor, Balance]:
        x_TD = x_BSD.flatten(0, 1)
        routing = self.router(x_TD)
        y_TD = self.experts.of_tokens(x_TD, routing.weight_TK, routing.expert_TK)
        if self.shared is not None:
            y_TD = y_TD + self.compute_shared(x_TD)
        none = torch.zeros((), dtype=torch.long, device=x_TD.device)
        balance = measure(routing, len(x_BSD), self.options.wanted, none, self.tokens)
        return y_TD.view_as(x_BSD), balance

    def route(self, x_TD: Tensor) -> tuple[Routing, Ticket]:
        routing = self.router(x_TD)
        return routing, self.dispatcher.preprocess(routing.expert_TK, routing.weight_TK)

    def dispatch(self, x_TD: Tensor, routing: Routing, ticket: Ticket) -> tuple[Tensor, Tensor]:
        """Rows and their weights, on their way."""
        return self.dispatcher.send(x_TD, routing.weight_TK, ticket)

    def compute(self, x_PD: Tensor, weight_P: Tensor, ticket: Ticket) -> Tensor:
        x_RD, weight_R, count_e = self.dispatcher.postprocess(x_PD, weight_P, ticket)
        with away("fused_group_mlp"):
            y_RD = self.experts(x_RD, weight_R, count_e)
        return self.dispatcher.combine_preprocess(y_RD, ticket)

    def combine(self, y_PD: Tensor, ticket: Ticket) -> Tensor:
        return self.dispatcher.combine_postprocess(self.dispatcher.send_back(y_PD, ticket), ticket)

    def compute_shared(self, x_TD: Tensor) -> Tensor:
        """Apart from the routed path, so that it can run beside an exchange."""
        return again(self._shared, x_TD, on="shared_experts" in self.options.again)

    def _shared(self, x_TD: Tensor) -> Tensor:
        assert self.shared is not None
        y_TD = self.shared(x_TD)
        return y_TD if self.shared_gate is None else self.shared_gate(x_TD).sigmoid() * y_TD

    def balance(self, routing: Routing, ticket: Ticket, num_sequences: int) -> Balance:
        dropped = ticket.dropped
        if dropped is None:
            dropped = torch.zeros((), dtype=torch.long, device=routing.expert_TK.device)
        return measure(routing, num_sequences, self.options.wanted, dropped, self.tokens)
