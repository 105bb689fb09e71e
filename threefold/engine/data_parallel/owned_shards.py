"""`OwnedShard`: the elements of a parameter that one rank owns, with their values and gradients.

The rank keeps the optimizer state of these elements, saves them in checkpoints and counts them in the gradient norm.
ZeRO-1 and FSDP list what a rank owns; optimizers, checkpoints, the gradient norm and the oracle read the list.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from threefold.engine.dist.shard_placement import Placement
from threefold.engine.kernels.availability import has_triton_kernels
from threefold.engine.optim.optimizer_targets import is_matrix
from threefold.plan.plan import Knobs

_CPU = torch.device("cpu")
_GRAD_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(eq=False)
class OwnedShard:
    """Elements `start` to `stop` of the flattened tensor-parallel shard of a parameter."""

    name: str
    parameter: Tensor  # the parameter, or the local shard of it that FSDP keeps
    placement: Placement
    start: int
    stop: int
    value: Tensor  # flat; in fp32 where it is its own master weight
    grad: Tensor | None  # flat; complete after `finish_grad_sync`, None where the parameter got no gradient
    matrix: bool  # whether the full parameter is a matrix or a stack of matrices
    dtype: torch.dtype  # in which the model computes


@dataclass(frozen=True)
class DataParallelSettings:
    """How gradients and weights travel."""

    grad_dtype: torch.dtype = torch.float32
    overlap_grad_reduce: bool = True  # reduce gradients during the backward
    overlap_param_gather: bool = True  # gather weights during the forward
    grad_accumulation_fusion: bool = False  # weight-gradient GEMMs add into the bucket (`autograd/main_grad.py`)
    device: torch.device = _CPU
    bucket_elements: int = 40_000_000  # as Megatron-LM's buckets: long enough to fill a link, short enough to overlap


def data_parallel_settings(knobs: Knobs, device: torch.device) -> DataParallelSettings:
    """The settings that a plan's knobs ask for."""
    return DataParallelSettings(
        _GRAD_DTYPES[knobs.grad_dtype], knobs.grad_reduce_overlap, knobs.param_gather_overlap, device=device
    )


def make_owned_shard(
    name: str,
    parameter: Tensor,
    placement: Placement,
    start: int,
    value: Tensor,
    grad: Tensor | None,
    dtype: torch.dtype,
) -> OwnedShard:
    """An `OwnedShard` whose end follows from its value, and its kind from the shape of the full parameter."""
    matrix = is_matrix(name, placement.shape)
    return OwnedShard(name, parameter, placement, start, start + value.numel(), value, grad, matrix, dtype)


def sum_of_squares(grads: list[Tensor], like: Tensor) -> Tensor:
    """The sum of squares of all elements, in the dtype of `like`; zero without gradients."""
    if not grads:
        return torch.zeros_like(like)
    if like.dtype == torch.float32 and has_triton_kernels(like.device):
        from threefold.engine.kernels.loss_and_optimizer.sum_of_squares_triton import sum_of_squares as in_one_pass

        return in_one_pass(grads)
    return torch.stack(torch._foreach_norm(grads, 2, dtype=like.dtype)).square().sum()


def norm_zero(parameters: Iterable[Tensor], device: torch.device) -> Tensor:
    """A zero in the dtype in which gradient norms are taken: fp64 for a model with fp64 parameters, else fp32."""
    dtype = torch.float64 if any(p.dtype == torch.float64 for p in parameters) else torch.float32
    return torch.zeros((), dtype=dtype, device=device)
