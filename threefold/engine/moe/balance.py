"""What keeps experts busy alike: balancing losses, the aux-loss-free bias, and the metrics that show it.

The tokens of a microbatch may be spread over a group of ranks, each with as many of every sequence. Then the losses,
loads and means here are this rank's parts of a sum over the group.

Shapes: B sequences, S tokens of each, T = B * S, E experts, K experts of a token, L layers with experts.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from threefold.engine.dispatch.rows import count
from threefold.engine.mesh import ALONE, Group
from threefold.engine.moe.router import Router, Routing
from threefold.engine.shard.collectives import all_reduce


@dataclass(frozen=True)
class Balance:
    """Of one layer: the losses, unweighted and with gradients, and counts without."""

    losses: dict[str, Tensor]
    load_E: Tensor  # copies of tokens each expert was asked to take
    dropped: Tensor  # copies of tokens that no expert took
    entropy: Tensor  # mean over tokens of the scores' entropy, in nats


def measure(
    routing: Routing, num_sequences: int, wanted: Iterable[str], dropped: Tensor, tokens: Group = ALONE
) -> Balance:
    """`wanted` names the losses to compute, so that an unused one costs nothing."""
    losses = {name: LOSSES[name](routing, num_sequences, tokens) for name in wanted}
    num_experts = routing.logits_TE.shape[1]
    with torch.no_grad():
        load_E, entropy = routing.load_E, routing.entropy
        if load_E is None:
            load_E = count(routing.expert_TK.flatten(), num_experts)
        if entropy is None:
            entropy = torch.special.entr(_shares(routing)).sum(dim=-1).mean()
    return Balance(losses, load_E, dropped, _part(entropy, tokens))


def aux_loss(routing: Routing, num_sequences: int = 1, tokens: Group = ALONE) -> Tensor:
    """Switch Transformer's: E * sum_e (share of token copies at e) * (mean score of e); 1 when balanced."""
    return _by_sequence(routing, 1, tokens)


def seq_aux_loss(routing: Routing, num_sequences: int, tokens: Group = ALONE) -> Tensor:
    """DeepSeek-V3's: the same within each sequence, then the mean over sequences."""
    return _by_sequence(routing, num_sequences, tokens)


def z_loss(routing: Routing, num_sequences: int = 1, tokens: Group = ALONE) -> Tensor:
    """ST-MoE's: keeps the logits small, by the mean square of their log-sum-exp."""
    return _part(routing.logits_TE.logsumexp(dim=-1).square().mean(), tokens)


LOSSES = {"aux": aux_loss, "seq_aux": seq_aux_loss, "z": z_loss}


def _shares(routing: Routing) -> Tensor:
    """Scores that sum to one: a softmax does already, sigmoids are divided by their sum."""
    return routing.scores_TE / routing.scores_TE.sum(dim=-1, keepdim=True)


def _part(mean: Tensor, tokens: Group) -> Tensor:
    """Of the group's mean, from that of this rank's tokens."""
    return mean if tokens.alone else mean / tokens.size


def _by_sequence(routing: Routing, num_sequences: int, tokens: Group) -> Tensor:
    num_experts = routing.logits_TE.shape[1]
    chosen_BX = routing.expert_TK.reshape(num_sequences, -1)
    ones = torch.ones_like(chosen_BX, dtype=routing.scores_TE.dtype)
    copies_BE = ones.new_zeros(num_sequences, num_experts).scatter_add_(1, chosen_BX, ones)
    all_reduce(copies_BE, tokens).wait()
    load_BE = copies_BE / (chosen_BX.shape[1] * tokens.size)
    mean_BE = _part(_shares(routing).unflatten(0, (num_sequences, -1)).mean(dim=1), tokens)
    return num_experts * (load_BE * mean_BE).sum(dim=-1).mean()


@torch.no_grad()
def update_bias(routers: Iterable[Router], load_LE: Tensor, rate: float | Tensor) -> None:
    """Once an optimizer step, with the loads of all its tokens: busy experts become less attractive, by a fixed step.

    Outside autograd, and outside the forward, so that recompute cannot count a token twice.
    """
    for router, load_E in zip(routers, load_LE, strict=True):
        if router.balance_bias is not None:
            load_E = load_E.to(torch.float32)
            router.balance_bias += rate * (load_E.mean() - load_E).sign()


def health(load_LE: Tensor, dropped_L: Tensor, entropy_L: Tensor, routers: Iterable[Router]) -> dict[str, Tensor]:
    """A few numbers that show a router going wrong, for the metrics file."""
    load_LE = load_LE.to(torch.float32)
    fair_L = load_LE.mean(dim=1).clamp(min=1e-9)
    biases = [router.balance_bias for router in routers if router.balance_bias is not None]
    metrics = {
        "router/load_max": (load_LE.max(dim=1).values / fair_L).max(),
        "router/load_min": (load_LE.min(dim=1).values / fair_L).min(),
        "router/idle_experts": (load_LE == 0).sum(),
        "router/entropy": entropy_L.mean(),
        "router/dropped": dropped_L.sum() / load_LE.sum().clamp(min=1),
    }
    if biases:
        metrics["router/bias_max"] = torch.stack([bias.abs().max() for bias in biases]).max()
    return metrics


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return grad, torch.ones_like(loss)


def attach(x: Tensor, loss: Tensor) -> Tensor:
    """`x`, whose backward also runs that of `loss`: for a pipeline stage that never sees the main loss."""
    return _Attach.apply(x, loss)
