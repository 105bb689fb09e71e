"""The router: which experts a token visits and with what weight. Always fp32 (fp64 in an fp64 model).

Shapes: T tokens, D model dim, E experts, K experts of a token, G groups.

Ties: of equal scores the lower expert number wins, on every device.
"""

from functools import cached_property

import torch
from torch import Tensor, nn

from threefold.engine.kernels.around import fused
from threefold.engine.kernels.routing import Choosing, choose, logits_of
from threefold.engine.norm import wide
from threefold.engine.products import linear
from threefold.spec.model import MoeSpec


class Routing:
    """The choice, and the scores of all experts that the balancing losses look at."""

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
    ) -> None:
        self.weight_TK, self.expert_TK, self.logits_TE = weight_TK, expert_TK, logits_TE
        self._scores_TE, self._score = scores_TE, score
        # Where the choice was made by a kernel that counted: as in `Balance`.
        self.load_E, self.entropy = load_E, entropy

    @cached_property
    def scores_TE(self) -> Tensor:  # noqa: N802 - a tensor and its shape
        return scores_of(self.logits_TE, self._score) if self._scores_TE is None else self._scores_TE


def scores_of(logits_TE: Tensor, score: str) -> Tensor:
    return logits_TE.softmax(dim=-1) if score == "softmax" else logits_TE.sigmoid()


class Router(nn.Module):
    balance_bias: Tensor | None
    turn = 0  # this rank's place among those whose tokens meet at the experts

    def __init__(self, spec: MoeSpec, dim: int, forced_balance: bool = False) -> None:
        super().__init__()
        self.spec, self.forced_balance = spec, forced_balance
        self.weight = nn.Parameter(torch.empty(spec.num_experts, dim))
        self.bias = nn.Parameter(torch.zeros(spec.num_experts)) if spec.bias else None
        # Moves by the aux-loss-free rule, not by a gradient. Kept in fp32: its steps vanish in bf16.
        bias_E = torch.zeros(spec.num_experts, dtype=torch.float32) if spec.balance_bias else None
        self.register_buffer("balance_bias", bias_E)

    def forward(self, x_TD: Tensor) -> Routing:
        logits_TE, how = self.logits(x_TD), self._choosing(len(x_TD))
        if fused(logits_TE) and how.fits(self.spec.num_experts):
            made = choose(logits_TE, self.balance_bias, how)
            counted = {"load_E": made.load_E, "entropy": made.entropy}
            return Routing(made.weight_TK, made.expert_TK, logits_TE, score=self.spec.score, **counted)
        scores_TE = scores_of(logits_TE, self.spec.score)
        expert_TK = self._balanced(x_TD) if self.forced_balance else self.choose(logits_TE, scores_TE)
        return Routing(self.weigh(logits_TE, scores_TE, expert_TK), expert_TK, logits_TE, scores_TE)

    def logits(self, x_TD: Tensor) -> Tensor:
        dtype = wide(x_TD.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        if fused(x_TD) and x_TD.dtype == self.weight.dtype == torch.bfloat16:
            logits_TE = logits_of(x_TD, self.weight)
            return logits_TE if bias is None else logits_TE + bias
        return linear(x_TD.to(dtype), self.weight.to(dtype), bias)

    def _choosing(self, num_tokens: int) -> Choosing:
        spec = self.spec
        return Choosing(
            spec.top_k,
            spec.score == "softmax",
            spec.norm_topk,
            spec.scale,
            spec.num_groups,
            spec.top_groups,
            self.turn * num_tokens * spec.top_k if self.forced_balance else None,
        )

    @torch.no_grad()
    def choose(self, logits_TE: Tensor, scores_TE: Tensor) -> Tensor:
        """Softmax keeps the order of logits but rounds neighbours to ties: compare logits where nothing is added."""
        choice_TE = scores_TE
        if self.balance_bias is not None:
            choice_TE = scores_TE + self.balance_bias.to(scores_TE.dtype)
        elif self.spec.score == "softmax":
            choice_TE = logits_TE
        if self.spec.num_groups > 1:
            choice_TE = choice_TE.masked_fill(~self._in_best_groups(choice_TE), float("-inf"))
        return largest(choice_TE, self.spec.top_k)

    def _in_best_groups(self, choice_TE: Tensor) -> Tensor:
        """DeepSeek-V3: a group counts as the sum of its two best experts."""
        choice_TGe = choice_TE.unflatten(1, (self.spec.num_groups, -1))
        group_TG = choice_TGe.topk(min(2, choice_TGe.shape[-1]), dim=-1).values.sum(dim=-1)
        best_TG = torch.zeros_like(group_TG, dtype=torch.bool)
        best_TG.scatter_(1, largest(group_TG, self.spec.top_groups), True)
        return best_TG[..., None].expand_as(choice_TGe).flatten(1)

    def weigh(self, logits_TE: Tensor, scores_TE: Tensor, expert_TK: Tensor) -> Tensor:
        """The weights carry the gradient. A softmax over the chosen logits is the normalised softmax over all."""
        if self.spec.norm_topk and self.spec.score == "softmax":
            weight_TK = logits_TE.gather(1, expert_TK).softmax(dim=-1)
        else:
            weight_TK = scores_TE.gather(1, expert_TK)
            if self.spec.norm_topk:
                weight_TK = weight_TK / (weight_TK.sum(dim=-1, keepdim=True) + 1e-20)  # 1e-20: DeepSeek-V3's code
        return weight_TK * self.spec.scale

    def _balanced(self, x_TD: Tensor) -> Tensor:
        """Experts in turn, whatever the scores: for benchmarks. Each rank goes on where the one before it ended."""
        num_slots = x_TD.shape[0] * self.spec.top_k
        slots = torch.arange(num_slots, device=x_TD.device) + self.turn * num_slots
        return (slots % self.spec.num_experts).view(-1, self.spec.top_k)


def largest(score_TX: Tensor, count: int) -> Tensor:
    """Indices of the largest, best first; the lower index of equals. `topk` promises no order among equals."""
    return score_TX.argsort(dim=-1, descending=True, stable=True)[:, :count]
