"""A layer of experts: route, dispatch, compute, combine, each a phase of its own that can be scheduled apart.

Shapes: B batch, S sequence, T = B * S tokens, D model dim, K experts of a token, P rows that travel, E experts.
"""

from functools import partial

import torch
from torch import Tensor, nn

from threefold.engine.chunks import chunk_tokens, in_chunks
from threefold.engine.dispatch.local import LocalDispatcher
from threefold.engine.dispatch.protocol import AnyDispatcher, Ticket
from threefold.engine.dispatch.rows import Rows
from threefold.engine.kept import inside_closed
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
        self.experts.kernels = options.expert_kernels
        self.shared = Mlp(dim, spec.shared_width) if spec.num_shared else None
        self.shared_gate = nn.Linear(dim, 1, bias=False) if spec.shared_gate else None
        self.dispatcher = LocalDispatcher(spec.num_experts, options.capacity_factor)

    def forward(self, x_BSD: Tensor, repeated: bool = False) -> tuple[Tensor, Balance]:
        """`repeated`: chunks are recomputed, whatever the options say."""
        if self.is_cut(x_BSD):
            return self.compute_in_chunks(x_BSD, repeated or "moe" in self.options.again)
        if self.in_one(x_BSD):
            return self.compute_in_one(x_BSD)
        x_TD = x_BSD.flatten(0, 1)
        routing, ticket = self.route(x_TD)
        y_TD = self._travel(x_TD, routing.weight_TK, ticket)
        return y_TD.view_as(x_BSD), self.balance(routing, ticket, len(x_BSD))

    def follow(
        self, x_BSD: Tensor, weight_TK: Tensor, expert_TK: Tensor, order: tuple[Rows, Tensor] | None
    ) -> tuple[Tensor, Tensor | None]:
        """Behind a router that has chosen, and where `order` is given has sorted. With how many copies were dropped."""
        x_TD = x_BSD.flatten(0, 1)
        if self.is_cut(x_BSD):
            chunk = self._chunk(x_BSD)
            y_TD = in_chunks(self._of_tokens, chunk, x_TD, weight_TK, expert_TK, repeated=inside_closed())
            return y_TD.view_as(x_BSD), None
        if self.in_one(x_BSD):
            return self._of_tokens(x_TD, weight_TK, expert_TK).view_as(x_BSD), None
        dispatcher = self.dispatcher
        ticket = dispatcher.ticket(*order) if order else dispatcher.preprocess(expert_TK, weight_TK)
        return self._travel(x_TD, weight_TK, ticket).view_as(x_BSD), ticket.dropped

    def _travel(self, x_TD: Tensor, weight_TK: Tensor, ticket: Ticket) -> Tensor:
        """To the experts and back, with the shared ones beside."""
        x_PD, weight_P = self.dispatcher.send(x_TD, weight_TK, ticket)
        shared_TD = None
        if self.shared is not None and self.options.shared_overlap:
            shared_TD = self.compute_shared(x_TD)
        y_TD = self.combine(self.compute(x_PD, weight_P, ticket), ticket)
        if self.shared is not None:
            y_TD = y_TD + (self.compute_shared(x_TD) if shared_TD is None else shared_TD)
        return y_TD

    def in_one(self, x: Tensor) -> bool:
        """Nothing travels, nothing is dropped, and kernels that gather are wanted and there."""
        return self._all_here and self.options.expert_fusion and self.experts.fuses(x)

    @property
    def _all_here(self) -> bool:
        return isinstance(self.dispatcher, LocalDispatcher) and self.dispatcher.capacity_factor is None

    def is_cut(self, x_BSD: Tensor) -> bool:
        """Whether so many tokens go through the experts chunk by chunk; each chunk is then recomputed by itself."""
        return self._all_here and self._chunk(x_BSD) < x_BSD.shape[:-1].numel()

    def _chunk(self, x_BSD: Tensor) -> int:
        row_bytes = x_BSD.shape[-1] * x_BSD.element_size()
        return chunk_tokens(x_BSD.shape[:-1].numel(), self.router.spec.top_k * row_bytes, self.options.ffn_chunk)

    def compute_in_chunks(self, x_BSD: Tensor, repeated: bool) -> tuple[Tensor, Balance]:
        """The router sees all tokens at once: losses and statistics are of the whole sequence."""
        x_TD = x_BSD.flatten(0, 1)
        routing, balance = again(partial(self._routed, len(x_BSD)), x_TD, on=repeated)
        chosen = routing.weight_TK, routing.expert_TK
        # Inside of what is recomputed whole, a chunk is made a third time: else all chunks would be there at once.
        repeated = repeated or inside_closed()
        y_TD = in_chunks(self._of_tokens, self._chunk(x_BSD), x_TD, *chosen, repeated=repeated)
        return y_TD.view_as(x_BSD), balance

    def _routed(self, num_sequences: int, x_TD: Tensor) -> tuple[Routing, Balance]:
        routing = self.router(x_TD)
        none = torch.zeros((), dtype=torch.long, device=x_TD.device)
        return routing, measure(routing, num_sequences, self.options.wanted, none, self.tokens)

    def _of_tokens(self, x_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor) -> Tensor:
        if self.in_one(x_TD):
            with away("fused_group_mlp"):
                y_TD = self.experts.of_tokens(x_TD, weight_TK, expert_TK)
        else:
            ticket = self.dispatcher.preprocess(expert_TK, weight_TK)
            x_PD, weight_P = self.dispatcher.send(x_TD, weight_TK, ticket)
            y_TD = self.combine(self.compute(x_PD, weight_P, ticket), ticket)
        return y_TD if self.shared is None else y_TD + self.compute_shared(x_TD)

    def compute_in_one(self, x_BSD: Tensor) -> tuple[Tensor, Balance]:
        x_TD = x_BSD.flatten(0, 1)
        routing, balance = self._routed(len(x_BSD), x_TD)
        return self._of_tokens(x_TD, routing.weight_TK, routing.expert_TK).view_as(x_BSD), balance

    def route(self, x_TD: Tensor) -> tuple[Routing, Ticket]:
        routing = self.router(x_TD)
        return routing, self.dispatcher.preprocess(routing.expert_TK, routing.weight_TK)

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
