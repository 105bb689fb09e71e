"""Load balancing of the experts: balancing losses, the aux-loss-free bias, and metrics of the routers.

`MoeLayer` computes one `RouterStats` per microbatch; the decoder adds its losses to the loss. `step.py` updates the
bias and writes the metrics once per step. With CP or TP each rank of a group holds equally many tokens of every
sequence; losses, loads and means are then partial sums over the group. Tokens that pad a sequence (`Routing.padding`)
count nowhere.

Shapes: B sequences, S tokens of each, T = B * S, E experts, K experts of a token, L layers with experts.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from threefold.engine.dist.collectives import all_reduce
from threefold.engine.dist.mesh import TRIVIAL_GROUP, Group
from threefold.engine.moe.router import Router, Routing


@dataclass(frozen=True)
class RouterStats:
    """The balancing losses and statistics of one layer in one microbatch."""

    losses: dict[str, Tensor]  # by name, unweighted, with gradients; the other fields have none
    load_E: Tensor  # token copies routed to each expert
    num_dropped: Tensor  # token copies that no expert took
    entropy: Tensor  # the entropy of the scores, in nats, as a mean over tokens


def compute_router_stats(
    routing: Routing,
    num_sequences: int,
    loss_names: Iterable[str],
    num_dropped: Tensor,
    token_group: Group = TRIVIAL_GROUP,
) -> RouterStats:
    """The statistics of a router's choice. Only the losses in `loss_names` are computed, unless the router has."""
    losses = {
        name: routing.losses[name] if name in routing.losses else LOSSES[name](routing, num_sequences, token_group)
        for name in loss_names
    }
    with torch.no_grad():
        load_E, entropy = routing.load_E, routing.entropy
        if load_E is None:
            load_E = _count_copies(routing, 1, torch.long)[0]
        if entropy is None:
            entropy = _mean_over_tokens(torch.special.entr(_probabilities(routing)).sum(dim=-1), routing, token_group)
        elif routing.padding is None:
            entropy = _part_of_mean(entropy, token_group)
    return RouterStats(losses, load_E, num_dropped, entropy)


def aux_loss(routing: Routing, num_sequences: int = 1, token_group: Group = TRIVIAL_GROUP) -> Tensor:
    """Switch Transformer's loss: E * sum_e (fraction of token copies at e) * (mean score of e); 1 when balanced."""
    return _load_times_score(routing, 1, token_group)


def seq_aux_loss(routing: Routing, num_sequences: int, token_group: Group = TRIVIAL_GROUP) -> Tensor:
    """DeepSeek-V3's loss: `aux_loss` of each sequence, averaged over sequences."""
    return _load_times_score(routing, num_sequences, token_group)


def z_loss(routing: Routing, num_sequences: int = 1, token_group: Group = TRIVIAL_GROUP) -> Tensor:
    """ST-MoE's loss, the mean square of the logits' log-sum-exp: it keeps the logits small."""
    return _mean_over_tokens(routing.logits_TE.logsumexp(dim=-1).square(), routing, token_group)


LOSSES = {"aux": aux_loss, "seq_aux": seq_aux_loss, "z": z_loss}


def _probabilities(routing: Routing) -> Tensor:
    """Scores that sum to one. A softmax does already; sigmoids are divided by their sum."""
    return routing.scores_TE / routing.scores_TE.sum(dim=-1, keepdim=True)


def _part_of_mean(mean: Tensor, token_group: Group) -> Tensor:
    """This rank's part of the mean over the group, given the mean over its own tokens."""
    return mean if token_group.is_trivial else mean / token_group.size


def _mean_over_tokens(value_T: Tensor, routing: Routing, token_group: Group) -> Tensor:
    """This rank's part of the mean over all useful tokens of the microbatch."""
    if routing.padding is None:
        return _part_of_mean(value_T.mean(), token_group)
    return _useful(value_T, routing).sum() / routing.padding.num_useful_B.sum().clamp(min=1)


def _useful(value: Tensor, routing: Routing) -> Tensor:
    """Values of tokens, zero for those that pad."""
    if routing.padding is None:
        return value
    return value.masked_fill(routing.padding.is_padding_BS.view(-1, *[1] * (value.dim() - 1)), 0)


def _count_copies(routing: Routing, num_sequences: int, dtype: torch.dtype) -> Tensor:
    """The copies of useful tokens at each expert, by sequence."""
    chosen_BX = routing.expert_TK.reshape(num_sequences, -1)
    ones_BX = _useful(torch.ones_like(routing.expert_TK, dtype=dtype), routing).view_as(chosen_BX)
    return ones_BX.new_zeros(num_sequences, routing.logits_TE.shape[1]).scatter_add_(1, chosen_BX, ones_BX)


def _load_times_score(routing: Routing, num_sequences: int, token_group: Group) -> Tensor:
    probability_TE = _probabilities(routing)
    (num_tokens, num_experts), top_k = probability_TE.shape, routing.expert_TK.shape[1]
    copies_BE = _count_copies(routing, num_sequences, probability_TE.dtype)
    all_reduce(copies_BE, token_group).wait()
    count: int | Tensor = num_tokens // num_sequences * token_group.size
    if routing.padding is not None:
        count = routing.padding.num_useful_B.view(num_sequences, -1).sum(dim=1, keepdim=True).clamp(min=1)
    load_BE = copies_BE / (count * top_k)
    mean_BE = _useful(probability_TE, routing).unflatten(0, (num_sequences, -1)).sum(dim=1) / count
    return num_experts * (load_BE * mean_BE).sum(dim=-1).mean()


@torch.no_grad()
def update_bias(routers: Iterable[Router], loads: Iterable[Tensor], rate: float | Tensor) -> None:
    """The aux-loss-free rule (DeepSeek-V3): lower the bias of busy experts and raise that of idle ones by a fixed step.

    It runs once an optimizer step with the loads of all its tokens, outside the forward, so that recompute cannot count
    a token twice.
    """
    for router, load_E in zip(routers, loads, strict=True):
        if router.balance_bias is not None and router.weight.requires_grad:
            load_E = load_E.to(torch.float32)
            router.balance_bias += rate * (load_E.mean() - load_E).sign()


def router_metrics(
    load_LE: Tensor, dropped_L: Tensor, entropy_L: Tensor, routers: Iterable[Router], ep: int = 1
) -> dict[str, Tensor]:
    """Numbers for the metrics file that show when a router goes wrong, and what that costs `ep` expert ranks."""
    load_LE = load_LE.to(torch.float32)
    mean_load_L = load_LE.mean(dim=1).clamp(min=1e-9)
    biases = [router.balance_bias for router in routers if router.balance_bias is not None]
    metrics = {
        "router/load_max": (load_LE.max(dim=1).values / mean_load_L).max(),
        "router/load_min": (load_LE.min(dim=1).values / mean_load_L).min(),
        "router/idle_experts": (load_LE == 0).sum(),
        "router/entropy": entropy_L.mean(),
        "router/dropped": dropped_L.sum() / load_LE.sum().clamp(min=1),
    }
    if ep > 1:
        metrics["router/rank_load_max"] = rank_skew(load_LE, ep).max()
    if biases:
        metrics["router/bias_max"] = torch.stack([bias.abs().max() for bias in biases]).max()
    return metrics


def rank_skew(load_LE: Tensor, ep: int) -> Tensor:
    """The load of the largest of `ep` expert ranks over the mean, for each layer."""
    load_LX = load_LE.unflatten(1, (ep, -1)).sum(dim=2)
    return load_LX.max(dim=1).values / load_LX.mean(dim=1).clamp(min=1e-9)


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return grad, torch.ones_like(loss)


def attach_loss(x: Tensor, loss: Tensor) -> Tensor:
    """`x`, whose backward also runs the backward of `loss`: for a pipeline stage that never sees the main loss."""
    return _AttachLoss.apply(x, loss)
