"""Chooses the next token of each row from logits: the likeliest one, or a draw with temperature, top-k and top-p.

Shapes: B rows, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. `temperature` 0 takes the likeliest; `top_k` 0 and `top_p` 1 leave nothing out."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


class TokenChooser:
    """Draws for each row from a generator of its own, so that a row does not depend on what else is in the batch."""

    def __init__(self, sampling: Sampling, num_rows: int) -> None:
        self.sampling = sampling
        self.draws = [torch.Generator(device="cpu").manual_seed(sampling.seed + row) for row in range(num_rows)]

    def choose(self, logits_BV: Tensor) -> list[int]:
        logits_BV = logits_BV.float().cpu()
        if self.sampling.temperature < torch.finfo(torch.float32).tiny:
            return [int(token) for token in logits_BV.argmax(dim=-1)]
        probability_BV = probabilities(logits_BV, self.sampling)
        pairs = zip(probability_BV, self.draws, strict=True)
        return [int(torch.multinomial(row_V, 1, generator=draw)) for row_V, draw in pairs]


def probabilities(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """The distribution that is drawn from: top-k of the logits first, then top-p of what is left."""
    below_BV = logits_BV - logits_BV.max(dim=-1, keepdim=True).values  # keeps a low temperature from making infinities
    probability_BV = (below_BV / sampling.temperature).softmax(dim=-1)
    if 0 < sampling.top_k < logits_BV.shape[-1]:
        kept_BK = probability_BV.topk(sampling.top_k, dim=-1)
        probability_BV = torch.zeros_like(probability_BV).scatter(-1, kept_BK.indices, kept_BK.values)
        probability_BV = probability_BV / probability_BV.sum(dim=-1, keepdim=True)
    if sampling.top_p < 1:
        ordered = probability_BV.sort(dim=-1, descending=True)
        before_BV = ordered.values.cumsum(dim=-1) - ordered.values  # of the tokens that are likelier
        kept_BV = ordered.values.masked_fill(before_BV >= sampling.top_p, 0.0)
        kept_BV[:, 0] = ordered.values[:, 0]  # top-p 0 takes the likeliest
        probability_BV = torch.zeros_like(probability_BV).scatter(-1, ordered.indices, kept_BV)
        probability_BV = probability_BV / probability_BV.sum(dim=-1, keepdim=True)
    return probability_BV
