"""Attention without a mask inside each of several sequences of any length that lie one behind the other.

The image encoder attends with it: a sequence is a picture. On CUDA one kernel takes all pictures (flash, variable
lengths); elsewhere pictures of one size that are neighbors attend together.

Shapes: B is 1, H heads, P patches of all pictures, D head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from threefold.engine.attention.torch_kernels import FLASH_CPU, FLASH_CUDA, FLASH_CUDA_BACKWARD, flash_supports
from threefold.engine.context import count_event
from threefold.engine.device import device_type


@dataclass(frozen=True)
class PictureBounds:
    """Where pictures start among the patches."""

    lengths: tuple[int, ...]
    cu_seqlens: Tensor  # int32, one element more than pictures

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], device: torch.device) -> "PictureBounds":
        edges = torch.tensor([0, *lengths], dtype=torch.int32, device="cpu").cumsum(dim=0, dtype=torch.int32)
        return cls(tuple(lengths), edges.to(device, non_blocking=True))


def attend_within_pictures(q_BHPD: Tensor, k_BHPD: Tensor, v_BHPD: Tensor, bounds: PictureBounds) -> Tensor:
    """Each patch attends to all patches of its picture."""
    if device_type(q_BHPD.device) == "cuda" and flash_supports(q_BHPD):
        count_event("attention", "torch's flash attention, within pictures")
        rows = (x[0].transpose(0, 1) for x in (q_BHPD, k_BHPD, v_BHPD))
        out_PHD = _FlashWithinPictures.apply(*rows, bounds, q_BHPD.shape[-1] ** -0.5)
        return out_PHD.transpose(0, 1)[None]
    groups = [(length, len(list(run))) for length, run in groupby(bounds.lengths)]
    sizes = [length * count for length, count in groups]
    parts = zip(groups, *(x.split(sizes, dim=2) for x in (q_BHPD, k_BHPD, v_BHPD)), strict=True)
    return torch.cat([_attend_equal(count, q, k, v) for (_, count), q, k, v in parts], dim=2)


def _attend_equal(count: int, *qkv: Tensor) -> Tensor:
    """Attention within each of `count` pictures of one size."""
    q, k, v = (x[0].unflatten(1, (count, -1)).transpose(0, 1) for x in qkv)
    if device_type(q.device) == "cpu" and torch.backends.cuda.flash_sdp_enabled():
        # What SDPA takes here too, but for fake tensors: a rehearsal would save the probabilities of all patches.
        out = FLASH_CPU(q, k, v)[0]
    else:
        out = F.scaled_dot_product_attention(q, k, v)
    return out.transpose(0, 1).flatten(1, 2)[None]


class _FlashWithinPictures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_PHD: Tensor, k_PHD: Tensor, v_PHD: Tensor, bounds: PictureBounds, scale: float) -> Tensor:
        ctx.lengths, ctx.scale = (max(bounds.lengths), max(bounds.lengths)), scale
        edges = (bounds.cu_seqlens, bounds.cu_seqlens)
        out, lse, rng, unused, _ = FLASH_CUDA(q_PHD, k_PHD, v_PHD, *edges, *ctx.lengths, 0.0, False, False, scale=scale)
        ctx.save_for_backward(q_PHD, k_PHD, v_PHD, out, lse, bounds.cu_seqlens, rng, unused)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, cu_seqlens, rng, unused = ctx.saved_tensors
        edges = (cu_seqlens, cu_seqlens, *ctx.lengths)
        grads = FLASH_CUDA_BACKWARD(
            grad.contiguous(), q, k, v, out, lse, *edges, 0.0, False, rng, unused, scale=ctx.scale
        )
        return *grads, None, None
