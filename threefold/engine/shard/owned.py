"""The elements of the model that one rank alone answers for: it keeps their optimizer state, saves and counts them."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from threefold.engine.kernels.choose import works
from threefold.engine.optim.items import is_matrix
from threefold.engine.shard.placement import Placement
from threefold.plan.plan import Knobs

_CPU = torch.device("cpu")
_GRAD_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(eq=False)
class Owned:
    """Elements first..after of a flattened piece. `grad` is complete after `finish()`; None where there was none."""

    name: str
    piece: Tensor  # the parameter, or what of it FSDP keeps here
    placement: Placement
    first: int
    after: int
    value: Tensor  # flat; wider than `dtype` where it is its own master weight
    grad: Tensor | None  # flat
    matrix: bool
    dtype: torch.dtype  # the model's


@dataclass(frozen=True)
class Settings:
    grad_dtype: torch.dtype = torch.float32
    reduce_overlap: bool = True  # gradients, with the backward
    gather_overlap: bool = True  # parameters, with the forward
    fusion: bool = False  # products of weight gradients add where they are summed (`sinks.py`)
    device: torch.device = _CPU
    bucket_elements: int = 40_000_000  # as Megatron-LM's buckets: long enough to fill a link, short enough to overlap


def settings_of(knobs: Knobs, device: torch.device) -> Settings:
    return Settings(
        _GRAD_DTYPES[knobs.grad_dtype], knobs.grad_reduce_overlap, knobs.param_gather_overlap, device=device
    )


def own(
    name: str, piece: Tensor, placement: Placement, first: int, value: Tensor, grad: Tensor | None, dtype: torch.dtype
) -> Owned:
    matrix = is_matrix(name, placement.shape)
    return Owned(name, piece, placement, first, first + value.numel(), value, grad, matrix, dtype)


def sum_of_squares(grads: list[Tensor], like: Tensor) -> Tensor:
    """In the dtype of `like`, which ranks that own nothing return too."""
    if not grads:
        return torch.zeros_like(like)
    if like.dtype == torch.float32 and works(like.device):
        from threefold.engine.kernels.squares import sum_of_squares as in_one_pass

        return in_one_pass(grads)
    return torch.stack(torch._foreach_norm(grads, 2, dtype=like.dtype)).square().sum()


def zero_of(parameters: Iterable[Tensor], device: torch.device) -> Tensor:
    """Of the dtype in which norms are taken: fp32, or fp64 where there is any."""
    wide = torch.float64 if any(p.dtype == torch.float64 for p in parameters) else torch.float32
    return torch.zeros((), dtype=wide, device=device)
