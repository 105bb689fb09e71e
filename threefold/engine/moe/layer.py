"""A Mixture-of-Experts layer: route, dispatch, compute, combine, and shared experts next to them.

Each phase is a method, so that `schedule/overlappable_pass.py` can run the phases of two microbatches alternately and
`graphs/scopes.py` can record some of them. `models/activation_memory.py` wraps `run_experts`, `run_fused_experts`,
`route_and_measure` and `compute_shared` where a plan recomputes or offloads them.

Shapes: B batch, S sequence, T = B * S tokens, D model dim, K experts of a token, P rows as they are exchanged,
R rows that the experts read, E experts, e experts held here, c slots here for copies of others.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from threefold.engine.autograd.delayed_wgrad import WgradQueue, finish_in_backward
from threefold.engine.autograd.saved_tensors import inside_recompute
from threefold.engine.autograd.token_chunks import chunk_size, run_in_chunks
from threefold.engine.context import context, count_event
from threefold.engine.dispatch.alltoall import AllToAllState
from threefold.engine.dispatch.local import LocalDispatcher
from threefold.engine.dispatch.protocol import AnyDispatcher, DispatchState
from threefold.engine.dispatch.rows import RowMap, permute_rows
from threefold.engine.dist.mesh import TRIVIAL_GROUP, Group
from threefold.engine.kernels.elementwise.topk_router import ChunkStarts
from threefold.engine.kernels.experts.sorted_rows import SortedRows
from threefold.engine.layers.mlp import Mlp
from threefold.engine.layers.norm import RMSNorm
from threefold.engine.model_options import Options
from threefold.engine.moe.balance import RouterStats, compute_router_stats
from threefold.engine.moe.copies import CopiedExperts
from threefold.engine.moe.experts import Experts
from threefold.engine.moe.router import Router, Routing
from threefold.spec.model import MoeSpec


class MoeLayer(nn.Module):
    dispatcher: AnyDispatcher  # shard/expert_parallel.py replaces the local one
    token_group: Group = TRIVIAL_GROUP  # the ranks over which the tokens of a microbatch are spread
    recompute_chunks = False  # whether each chunk of tokens is recomputed by itself (models/activation_memory.py)
    recomputed_by = ""  # the name in the plan that asked for it

    def __init__(
        self,
        spec: MoeSpec,
        dim: int,
        activation: str,
        options: Options,
        make_norm: Callable[[int], nn.Module] = RMSNorm,
    ) -> None:
        super().__init__()
        self.options = options
        self.router = Router(spec, dim, options.forced_balance)
        self.experts = Experts(
            *(spec.num_experts, dim, spec.expert_dim, spec.bias, activation),
            backend=options.expert_backend,
            glu_limit=spec.glu_limit,
        )
        self.experts.fusion, self.experts.kernels = options.expert_fusion, options.expert_kernels
        self.copies: CopiedExperts | None = None  # of other ranks' experts (shard/expert_parallel.py)
        self.shared = Mlp(dim, spec.shared_width, activation, spec.glu_limit) if spec.num_shared else None
        self.shared_gate = nn.Linear(dim, 1, bias=False) if spec.shared_gate else None
        # Gemma 4: what the normed tokens are multiplied by, and the norms of both outputs and of their sum.
        self.routed_scale = nn.Parameter(torch.ones(dim)) if spec.own_norms else None
        self.shared_scale = nn.Parameter(torch.ones(dim)) if spec.own_norms else None
        self.routed_norm = make_norm(dim) if spec.own_norms else None
        self.shared_norm = make_norm(dim) if spec.own_norms else None
        self.out_norm = make_norm(dim) if spec.own_norms else None
        self.dispatcher = LocalDispatcher(spec.num_experts, options.capacity_factor)

    def forward(self, x_BSD: Tensor, *tokens_BS: Tensor) -> tuple[Tensor, RouterStats]:
        x_TD, tokens_T = x_BSD.flatten(0, 1), [tokens.flatten() for tokens in tokens_BS]
        if self.runs_in_chunks(x_BSD) or self.runs_fused(x_BSD):
            # The router sees all tokens at once: its losses and statistics are those of whole sequences.
            routing, stats = self.route_and_measure(len(x_BSD), x_TD, *tokens_T)
            x_TD = x_TD if routing.x_TD is None else routing.x_TD
            y_TD = self.compute_tokens(x_TD, routing.weight_TK, routing.expert_TK, routing.starts)
            return y_TD.view_as(x_BSD), stats
        routing, state = self.route(x_TD, len(x_BSD), *tokens_T)
        y_TD = self.dispatch_and_combine(x_TD, routing.weight_TK, state)
        return y_TD.view_as(x_BSD), self.compute_stats(routing, state, len(x_BSD))

    def compute_routed(
        self, x_BSD: Tensor, weight_TK: Tensor, expert_TK: Tensor, order: tuple[RowMap, Tensor] | None
    ) -> tuple[Tensor, Tensor | None]:
        """Everything after a router that ran elsewhere, and the number of token copies that were dropped.

        `order` holds the sorted rows and their counts where they were computed with the router.
        """
        x_TD = x_BSD.flatten(0, 1)
        if self.runs_in_chunks(x_BSD) or self.runs_fused(x_BSD):
            return self.compute_tokens(x_TD, weight_TK, expert_TK).view_as(x_BSD), None
        dispatcher = self.dispatcher
        state = dispatcher.make_state(*order) if order else dispatcher.dispatch_preprocess(expert_TK, weight_TK)
        return self.dispatch_and_combine(x_TD, weight_TK, state).view_as(x_BSD), count_dropped(state)

    def choose_experts(self, x_TD: Tensor, num_sequences: int, *tokens_T: Tensor) -> Routing:
        """Run the router. It computes the losses of the plan too, where all tokens of a microbatch are on this rank."""
        losses = self.options.router_losses if self.token_group.is_trivial else ()
        routing: Routing = self.router(x_TD, losses, num_sequences, context.padding, *tokens_T)
        return routing

    def route(self, x_TD: Tensor, num_sequences: int, *tokens_T: Tensor) -> tuple[Routing, DispatchState]:
        routing = self.choose_experts(x_TD, num_sequences, *tokens_T)
        return routing, self.dispatcher.dispatch_preprocess(routing.expert_TK, routing.weight_TK)

    def dispatch_and_combine(self, x_TD: Tensor, weight_TK: Tensor, state: DispatchState) -> Tensor:
        """Rows to the experts' ranks and back, plus the shared experts."""
        x_PD, weight_P = self.dispatcher.token_dispatch(self.routed_input(x_TD), weight_TK, state)
        shared_TD = None
        if self.shared is not None and self.options.shared_overlap:
            shared_TD = self.compute_shared(x_TD)
        y_TD = self.combine(self.compute(x_PD, weight_P, state), state)
        if self.shared is None:
            return self.add_shared(y_TD)
        return self.add_shared(y_TD, self.compute_shared(x_TD) if shared_TD is None else shared_TD)

    def routed_input(self, x_TD: Tensor) -> Tensor:
        """The tokens as the routed experts read them."""
        return x_TD if self.routed_scale is None else x_TD * self.routed_scale

    def add_shared(self, y_TD: Tensor, *shared_TD: Tensor) -> Tensor:
        """The output of the layer, from that of the routed experts and of the shared ones where there are any."""
        if self.routed_norm is not None:
            y_TD = self.routed_norm(y_TD)
        for each_TD in shared_TD:
            y_TD = y_TD + each_TD
        return y_TD if self.out_norm is None else self.out_norm(y_TD)

    def compute(self, x_PD: Tensor, weight_P: Tensor, state: DispatchState) -> Tensor:
        """From rows as they arrived to rows ready to be sent back."""
        # Where nothing before trains, no gradient of rows travels back, and none would finish the queue.
        if not (self.options.wgrad_overlap and x_PD.requires_grad):
            return self._compute(x_PD, weight_P, state)
        queue = WgradQueue()
        with queue:  # finished once the gradients of the rows are on their way back
            return self._compute(finish_in_backward(queue, x_PD), weight_P, state)

    def _compute(self, x_PD: Tensor, weight_P: Tensor, state: DispatchState) -> Tensor:
        x_RD, weight_R, count_e, order = self.dispatcher.dispatch_postprocess(x_PD, weight_P, state)
        copies = self.copies
        if copies is not None and copies.replicas is None:  # no rows in the slots of copies
            count_e, order = count_e[: copies.num_own], order and order.of_first(copies.num_own)
        if copies is not None and copies.replicas is not None:
            assert isinstance(state, AllToAllState)
            y_RD = self._run_with_copies(copies, x_RD, weight_R, count_e, order, state.num_own_rows)
        elif order is None or self.experts.fuses(x_RD):
            y_RD = self.run_experts(x_RD, weight_R, count_e, order)
        else:  # these experts want their rows sorted
            token_R, back_R = order.token_R, order.row_TK[:, 0]
            x_RD, weight_R = permute_rows(x_RD, token_R, back_R), permute_rows(weight_R, token_R, back_R)
            y_RD = permute_rows(self.run_experts(x_RD, weight_R, count_e), back_R, token_R)
        return self.dispatcher.combine_preprocess(y_RD, state)

    def _run_with_copies(
        self,
        copies: CopiedExperts,
        x_RD: Tensor,
        weight_R: Tensor,
        count_e: Tensor,
        order: SortedRows | None,
        num_own_rows: int,
    ) -> Tensor:
        """The experts that this rank owns and copies of others, whose rows come after them."""
        assert order is not None  # blocks of several ranks, and several slots
        copies.wait_until_filled()
        token_R, back_R = order.token_R, order.row_TK[:, 0]
        x_RD, weight_R = permute_rows(x_RD, token_R, back_R), permute_rows(weight_R, token_R, back_R)
        count_e, count_c = count_e.tensor_split([copies.num_own])
        if num_own_rows == len(x_RD):
            return permute_rows(self.run_experts(x_RD, weight_R, count_e), back_R, token_R)
        sizes = [num_own_rows, len(x_RD) - num_own_rows]
        (x_RD, copied_RD), (weight_R, copied_R) = x_RD.split(sizes), weight_R.split(sizes)
        y_RD = self.run_experts(x_RD, weight_R, count_e)
        y_RD = torch.cat([y_RD, self.run_copies(copies, copied_RD, copied_R, count_c)])
        return permute_rows(y_RD, back_R, token_R)

    def run_copies(self, copies: CopiedExperts, x_RD: Tensor, weight_R: Tensor, count_c: Tensor) -> Tensor:
        count_event("expert copies", "computed")
        y_RD: Tensor = copies(x_RD, weight_R, count_c)
        return y_RD

    def run_experts(self, x_RD: Tensor, weight_R: Tensor, count_e: Tensor, order: SortedRows | None = None) -> Tensor:
        y_RD: Tensor = self.experts(x_RD, weight_R, count_e, order)
        return y_RD

    def combine(self, y_PD: Tensor, state: DispatchState) -> Tensor:
        return self.dispatcher.combine_postprocess(self.dispatcher.token_combine(y_PD, state), state)

    def compute_shared(self, x_TD: Tensor) -> Tensor:
        """The shared experts: apart from the routed ones, so that they can run during an exchange."""
        assert self.shared is not None
        y_TD = self.shared(x_TD if self.shared_scale is None else x_TD * self.shared_scale)
        if self.shared_norm is not None:
            y_TD = self.shared_norm(y_TD)
        return y_TD if self.shared_gate is None else self.shared_gate(x_TD).sigmoid() * y_TD

    def compute_stats(self, routing: Routing, state: DispatchState, num_sequences: int) -> RouterStats:
        return self._measure(routing, num_sequences, count_dropped(state))

    def _measure(self, routing: Routing, num_sequences: int, num_dropped: Tensor | None = None) -> RouterStats:
        if num_dropped is None:
            num_dropped = torch.zeros((), dtype=torch.long, device=routing.expert_TK.device)
        return compute_router_stats(routing, num_sequences, self.options.router_losses, num_dropped, self.token_group)

    # Where this rank holds all experts and drops no token, tokens go in and come out: in chunks if they are many, and
    # by the fused kernels, which gather rows as they read them.

    @property
    def holds_all_experts(self) -> bool:
        return isinstance(self.dispatcher, LocalDispatcher) and self.dispatcher.capacity_factor is None

    def runs_fused(self, x: Tensor) -> bool:
        """Return whether the fused expert kernels are asked for and run here."""
        return self.holds_all_experts and self.options.expert_fusion and self.experts.fuses(x)

    def runs_in_chunks(self, x: Tensor) -> bool:
        """Return whether so many tokens go through the experts chunk by chunk."""
        return self.holds_all_experts and self._chunk_size(x) < x.shape[:-1].numel()

    def _chunk_size(self, x: Tensor) -> int:
        row_bytes = x.shape[-1] * x.element_size()
        return chunk_size(x.shape[:-1].numel(), self.router.spec.top_k * row_bytes, self.options.ffn_chunk)

    def route_and_measure(self, num_sequences: int, x_TD: Tensor, *tokens_T: Tensor) -> tuple[Routing, RouterStats]:
        routing = self.choose_experts(x_TD, num_sequences, *tokens_T)
        return routing, self._measure(routing, num_sequences)

    def compute_tokens(
        self, x_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, starts: ChunkStarts | None = None
    ) -> Tensor:
        """Tokens through their experts. `starts` spare the fused experts the first half of their sort."""
        if not self.runs_in_chunks(x_TD):
            return self._compute_chunk(x_TD, weight_TK, expert_TK, starts)
        # Inside a larger recompute a chunk is computed a third time: else the tensors of all chunks would be there at
        # once in the backward.
        recompute = self.recompute_chunks or inside_recompute()
        size = self._chunk_size(x_TD)
        inputs_T = x_TD, weight_TK, expert_TK
        return run_in_chunks(self._compute_chunk, size, *inputs_T, recompute=recompute, name=self.recomputed_by)

    def _compute_chunk(
        self, x_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, starts: ChunkStarts | None = None
    ) -> Tensor:
        if self.runs_fused(x_TD):
            y_TD = self.run_fused_experts(self.routed_input(x_TD), weight_TK, expert_TK, starts)
        else:
            state = self.dispatcher.dispatch_preprocess(expert_TK, weight_TK)
            x_PD, weight_P = self.dispatcher.token_dispatch(self.routed_input(x_TD), weight_TK, state)
            y_TD = self.combine(self.compute(x_PD, weight_P, state), state)
        return self.add_shared(y_TD) if self.shared is None else self.add_shared(y_TD, self.compute_shared(x_TD))

    def run_fused_experts(
        self, x_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, starts: ChunkStarts | None = None
    ) -> Tensor:
        return self.experts.forward_tokens(x_TD, weight_TK, expert_TK, starts)


def count_dropped(state: DispatchState) -> Tensor | None:
    """The copies of useful tokens that no expert takes; None where none is dropped."""
    dropped_TK, padding = state.dropped_TK, context.padding
    if dropped_TK is not None and padding is not None:
        dropped_TK = dropped_TK & ~padding.is_padding_BS.view(-1, 1)
    return None if dropped_TK is None else dropped_TK.sum()
