"""Attention with every score in memory: the oracle of the kernels.

Shapes: B batch, H query heads, G key/value heads, S sequence, D head dim.
"""

import torch
from torch import Tensor


def reference(
    q_BHSD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    documents_BS: Tensor | None = None,
) -> Tensor:
    """The result of `attend`."""
    groups = q_BHSD.shape[1] // k_BGSD.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k_BGSD, v_BGSD))
    logits = q_BHSD @ k.transpose(-1, -2) * scale
    logits = logits.masked_fill(~visibility_mask(q_BHSD, window, documents_BS), float("-inf"))
    if sinks is not None:
        column = sinks.to(logits.dtype).view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, column], dim=-1)
    weight = logits.softmax(dim=-1)[..., : k.shape[2]]
    return weight @ v


def visibility_mask(x: Tensor, window: int | None, documents_BS: Tensor | None) -> Tensor:
    """Which keys (last dim) each query (last but one) may attend to: (S, S), or (B, 1, S, S) with documents."""
    position = torch.arange(x.shape[2], device=x.device)
    distance = position[:, None] - position[None, :]
    mask = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    if documents_BS is None:
        return mask
    return mask & (documents_BS[:, None, :, None] == documents_BS[:, None, None, :])
