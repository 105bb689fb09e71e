"""The router of Phi-MoE: two experts chosen one after the other, each with a softmax among near rivals.

It is SparseMixer as transformers runs it in evaluation. Its training form draws experts at random and estimates
gradients with Heun's method; here the best experts are taken, and their weights are differentiated. `router.py` calls
it.

Shapes: T tokens, E experts.
"""

import torch
from torch import Tensor

NUM_CHOSEN = 2


def sparse_mixer(logits_TE: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """The weights of a token's two experts, and their numbers. Equal logits go to the lower number."""
    left_TE, weights, experts = logits_TE, [], []
    for _ in range(NUM_CHOSEN):
        with torch.no_grad():
            best_T1, expert_T1 = left_TE.sort(dim=-1, descending=True, stable=True)
            best_T1, expert_T1 = best_T1[:, :1], expert_T1[:, :1]
            is_far_TE = (best_T1 - logits_TE) / logits_TE.abs().clamp(min=best_T1) > 2 * jitter
        near_TE = left_TE.masked_fill(is_far_TE, float("-inf")).softmax(dim=-1)
        weights.append(near_TE.gather(1, expert_T1))
        experts.append(expert_T1)
        left_TE = left_TE.scatter(1, expert_T1, float("-inf"))
    return torch.cat(weights, dim=1), torch.cat(experts, dim=1)
