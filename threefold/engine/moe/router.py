"""The top-k router: which experts a token visits and with which weights, in fp32 (fp64 in an fp64 model).

`MoeLayer` calls the router once per microbatch. Its result, a `Routing`, goes to the dispatcher (experts and weights)
and to `balance.py` (losses and statistics). Ties go to the expert with the lower number, on every device.

Shapes: T tokens, D model dim, E experts, e experts of a group, K experts of a token, G groups.
"""

from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threefold.engine.autograd.linear import linear
from threefold.engine.batch import Padding
from threefold.engine.kernels.availability import runs_fused
from threefold.engine.kernels.elementwise.topk_router import (
    ChunkStarts,
    TopKOptions,
    TopKResult,
    computes_losses,
    route_logits,
    route_tokens,
    router_logits,
)
from threefold.engine.sum_dtype import fp32_or_wider
from threefold.spec.model import MoeSpec


class Routing:
    """The chosen experts and their weights, and the logits and scores of all experts for the balancing losses."""

    def __init__(
        self,
        weight_TK: Tensor,
        expert_TK: Tensor,
        logits_TE: Tensor,
        scores_TE: Tensor | None = None,
        *,
        score: str = "softmax",
        load_E: Tensor | None = None,
        entropy: Tensor | None = None,
        losses: dict[str, Tensor] | None = None,
        starts: ChunkStarts | None = None,
        x_TD: Tensor | None = None,
        padding: Padding | None = None,
    ) -> None:
        self.weight_TK, self.expert_TK, self.logits_TE = weight_TK, expert_TK, logits_TE
        self._scores_TE, self._score = scores_TE, score
        # The fused kernels count while they choose; None where `balance.py` must count (see `RouterStats`).
        self.load_E, self.entropy = load_E, entropy
        # Those that the fused kernels have computed; `balance.py` computes the others.
        self.losses = losses or {}
        # Where the rows of each expert start, for the fused experts; None where they must sort from the beginning.
        self.starts = starts
        # The tokens for the experts, whose gradient comes back through the router; None where it does not.
        self.x_TD = x_TD
        self.padding = padding

    @cached_property
    def scores_TE(self) -> Tensor:  # noqa: N802 - a tensor and its shape
        return expert_scores(self.logits_TE, self._score) if self._scores_TE is None else self._scores_TE


def expert_scores(logits_TE: Tensor, score: str) -> Tensor:
    """The score of every expert: a softmax over experts, or of each logit a sigmoid (DeepSeek-V3) or the root of a
    softplus (DeepSeek-V4)."""
    if score == "sqrtsoftplus":
        return F.softplus(logits_TE).sqrt()
    return logits_TE.sigmoid() if score == "sigmoid" else logits_TE.softmax(dim=-1)


class Router(nn.Module):
    """The gate of an MoE layer: logits, top-k choice with optional groups, and weights."""

    balance_bias: Tensor | None
    expert_of_token: Tensor | None  # the experts of each token id, (V, K), where they are looked up
    expert_group_rank = 0  # this rank in the ep x etp group; forced balancing starts at another expert on each rank

    def __init__(self, spec: MoeSpec, dim: int, forced_balance: bool = False) -> None:
        super().__init__()
        self.spec, self.forced_balance = spec, forced_balance
        self.weight = nn.Parameter(torch.empty(spec.num_experts, dim))
        self.bias = nn.Parameter(torch.zeros(spec.num_experts)) if spec.bias else None
        self.input_scale = nn.Parameter(torch.ones(dim)) if spec.own_norms else None
        self.expert_scale = nn.Parameter(torch.ones(spec.num_experts)) if spec.expert_scale else None
        # The aux-loss-free rule changes the bias, not a gradient. It is fp32 because its steps vanish in bf16.
        bias_E = torch.zeros(spec.num_experts, dtype=torch.float32) if spec.balance_bias else None
        self.register_buffer("balance_bias", bias_E)
        self.register_buffer("expert_of_token", None)

    def look_up_tokens(self, vocab: int) -> None:
        """Choose experts by token id from now on: by a table of the checkpoint that is not trained."""
        self.expert_of_token = torch.zeros(vocab, self.spec.top_k, dtype=torch.long)
        self.balance_bias = None

    def forward(
        self,
        x_TD: Tensor,
        losses: tuple[str, ...] = (),
        num_sequences: int = 1,
        padding: Padding | None = None,
        tokens_T: Tensor | None = None,
    ) -> Routing:
        """Route tokens. The fused kernels compute those of `losses` that they know, for sequences of equal lengths.

        Padding is routed like any token, with weights of 0: under a capacity it takes no place from a useful token.
        """
        if self.input_scale is not None:
            x_TD = x_TD * (self.input_scale * x_TD.shape[-1] ** -0.5)
        routing = self._choose_and_weigh(x_TD, losses, num_sequences, padding, tokens_T)
        routing.padding = padding
        if self.input_scale is not None:
            routing.x_TD = None  # the experts read what is not scaled
        if self.expert_scale is not None:
            scale_E1 = self.expert_scale.to(routing.weight_TK.dtype)[:, None]
            # The backward of an embedding adds up its rows in a fixed order, that of an index does not.
            routing.weight_TK = routing.weight_TK * F.embedding(routing.expert_TK, scale_E1)[..., 0]
        return routing

    def _choose_and_weigh(
        self,
        x_TD: Tensor,
        losses: tuple[str, ...],
        num_sequences: int,
        padding: Padding | None,
        tokens_T: Tensor | None,
    ) -> Routing:
        options = self._router_options(len(x_TD), losses, num_sequences)
        fits = options.fits(self.spec.num_experts) and self.spec.score in ("softmax", "sigmoid")
        fits = fits and self.expert_of_token is None
        if fits and self.bias is None and self._gemm_is_fused(x_TD):
            return self._fused_routing(route_tokens(x_TD, self.weight, self.balance_bias, options, padding))
        logits_TE = self.logits(x_TD)
        if fits and runs_fused(logits_TE):
            return self._fused_routing(route_logits(logits_TE, self.balance_bias, options, padding))
        scores_TE = expert_scores(logits_TE, self.spec.score)
        if self.spec.score == "sparsemixer" and not self.forced_balance:
            weight_TK, expert_TK = sparse_mixer(logits_TE, self.spec.jitter)
        else:
            if self.forced_balance:
                expert_TK = self._round_robin(x_TD)
            elif self.expert_of_token is not None:
                expert_TK = self.expert_of_token[tokens_T]
            else:
                expert_TK = self.choose_experts(logits_TE, scores_TE)
            weight_TK = self.expert_weights(logits_TE, scores_TE, expert_TK)
        if padding is not None:
            weight_TK = weight_TK.masked_fill(padding.is_padding_BS.view(-1, 1), 0)
        return Routing(weight_TK, expert_TK, logits_TE, scores_TE)

    def logits(self, x_TD: Tensor) -> Tensor:
        """The gate's output for every expert, in fp32."""
        dtype = fp32_or_wider(x_TD.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        if self._gemm_is_fused(x_TD):
            logits_TE = router_logits(x_TD, self.weight)
            return logits_TE if bias is None else logits_TE + bias
        return linear(x_TD.to(dtype), self.weight.to(dtype), bias)

    def _gemm_is_fused(self, x_TD: Tensor) -> bool:
        return x_TD.dtype == self.weight.dtype == torch.bfloat16 and runs_fused(x_TD)

    def _fused_routing(self, made: TopKResult) -> Routing:
        return Routing(
            made.weight_TK,
            made.expert_TK,
            made.logits_TE,
            score=self.spec.score,
            load_E=made.load_E,
            entropy=made.entropy,
            losses=made.losses,
            starts=made.starts,
            x_TD=made.x_TD,
        )

    def _router_options(self, num_tokens: int, losses: tuple[str, ...] = (), num_sequences: int = 1) -> TopKOptions:
        spec = self.spec
        if losses and not computes_losses(losses, num_tokens, num_sequences, spec.num_experts, spec.top_k):
            losses = ()
        return TopKOptions(
            spec.top_k,
            spec.score == "softmax",
            spec.norm_topk,
            spec.scale,
            spec.num_groups,
            spec.top_groups,
            self.expert_group_rank * num_tokens * spec.top_k if self.forced_balance else None,
            losses,
            num_sequences,
        )

    @torch.no_grad()
    def choose_experts(self, logits_TE: Tensor, scores_TE: Tensor) -> Tensor:
        """The K best experts of each token, best first.

        A softmax keeps the order of the logits but may round neighbors to equal scores, so logits are compared where
        no bias is added to the scores.
        """
        choice_TE = scores_TE
        if self.balance_bias is not None:
            choice_TE = scores_TE + self.balance_bias.to(scores_TE.dtype)
        elif self.spec.score == "softmax":
            choice_TE = logits_TE
        if self.spec.num_groups > 1:
            choice_TE = choice_TE.masked_fill(~self._in_best_groups(choice_TE), float("-inf"))
        return top_k_stable(choice_TE, self.spec.top_k)

    def _in_best_groups(self, choice_TE: Tensor) -> Tensor:
        """True for the experts of a token's best groups. A group scores the sum of its two best (DeepSeek-V3)."""
        choice_TGe = choice_TE.unflatten(1, (self.spec.num_groups, -1))
        group_TG = choice_TGe.topk(min(2, choice_TGe.shape[-1]), dim=-1).values.sum(dim=-1)
        best_TG = torch.zeros_like(group_TG, dtype=torch.bool)
        best_TG.scatter_(1, top_k_stable(group_TG, self.spec.top_groups), True)
        return best_TG[..., None].expand_as(choice_TGe).flatten(1)

    def expert_weights(self, logits_TE: Tensor, scores_TE: Tensor, expert_TK: Tensor) -> Tensor:
        """The weights of the chosen experts, which carry the gradient to the router.

        With normalized weights a softmax over the chosen logits equals the softmax over all, divided by its sum.
        """
        if self.spec.norm_topk and self.spec.score == "softmax":
            weight_TK = logits_TE.gather(1, expert_TK).softmax(dim=-1)
        else:
            weight_TK = scores_TE.gather(1, expert_TK)
            if self.spec.norm_topk:
                weight_TK = weight_TK / (weight_TK.sum(dim=-1, keepdim=True) + 1e-20)  # 1e-20: DeepSeek-V3's code
        return weight_TK * self.spec.scale

    def _round_robin(self, x_TD: Tensor) -> Tensor:
        """Experts in turn, whatever the scores: for benchmarks. Each rank continues where the rank before it ended."""
        num_slots = x_TD.shape[0] * self.spec.top_k
        slots = torch.arange(num_slots, device=x_TD.device) + self.expert_group_rank * num_slots
        return (slots % self.spec.num_experts).view(-1, self.spec.top_k)


def top_k_stable(score_TX: Tensor, count: int) -> Tensor:
    """Indices of the largest, best first; the lower index of equals. `torch.topk` promises no order among equals."""
    return score_TX.argsort(dim=-1, descending=True, stable=True)[:, :count]


def sparse_mixer(logits_TE: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """The weights of a token's two experts in Phi-MoE, chosen one after the other by a softmax among near rivals.

    It is SparseMixer as transformers runs it in evaluation: the best experts are taken, and equal logits go to the
    lower number. Its training form draws experts at random and estimates gradients with Heun's method.
    """
    left_TE, weights, experts = logits_TE, [], []
    for _ in range(2):
        with torch.no_grad():
            best_T1, expert_T1 = left_TE.sort(dim=-1, descending=True, stable=True)
            best_T1, expert_T1 = best_T1[:, :1], expert_T1[:, :1]
            is_far_TE = (best_T1 - logits_TE) / logits_TE.abs().clamp(min=best_T1) > 2 * jitter
        near_TE = left_TE.masked_fill(is_far_TE, float("-inf")).softmax(dim=-1)
        weights.append(near_TE.gather(1, expert_T1))
        experts.append(expert_T1)
        left_TE = left_TE.scatter(1, expert_T1, float("-inf"))
    return torch.cat(weights, dim=1), torch.cat(experts, dim=1)
