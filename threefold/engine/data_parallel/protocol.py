"""The interface of data parallelism, which a training step calls. `SingleRank`, `Zero1` and `Fsdp` implement it.

One optimizer step (`engine/step.py`) makes these calls, on every rank in the same order:

    data.begin_step(num_microbatches)       # gradients to zero
    ...forward and backward passes...       # gradients arrive; ZeRO-1 and FSDP reduce them meanwhile
    data.finish_grad_sync()                 # from here on the gradients of `owned` are complete
    data.grad_sum_of_squares()              # summed over all ranks it is the square of the gradient norm
    data.scale_grads(factor)                # clip
    optimizer.step(lr)                      # updates `updated`
    data.start_param_sync()                 # bring the new weights to the ranks that hold copies
    data.finish_param_sync()                # before anything but a forward reads the weights

Gradients are summed over microbatches and ranks, never averaged: the loss is divided by the number of labels instead.

An `OwnedShard` is the elements of a parameter that one rank owns, with their values and gradients. The rank keeps their
optimizer state, saves them in checkpoints and counts them in the gradient norm.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from threefold.engine.dist.shard_placement import Placement
from threefold.engine.kernels.availability import has_triton_kernels
from threefold.engine.optim.optimizer_targets import is_matrix
from threefold.engine.optim.pending_updates import PendingUpdates
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
    """Settings of how gradients and weights travel."""

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


# A tensor that a rank must fill to load weights: the parameter's name, its placement, the memory, and where that memory
# begins in the flattened shard. None as the last means that the memory is the whole shard.
LocalTensor = tuple[str, Placement, Tensor, int | None]


class DataParallel(Protocol):
    """Decides which rank holds which weights and gradients, and brings them together."""

    @property
    def owned(self) -> list[OwnedShard]:
        """The elements that this rank alone answers for: over all ranks every element of the model is owned once."""

    @property
    def updated(self) -> list[OwnedShard]:
        """The elements that this rank's optimizer updates, about in the order in which a forward uses them: no frozen
        ones. With HSDP there are also some that other ranks own."""

    @property
    def frozen(self) -> frozenset[str]:
        """Names of the parameters on this rank that do not train: they have no gradient and no optimizer state."""

    def begin_step(self, passes: int) -> None:
        """Set gradients to zero. `passes` backward passes follow before `finish_grad_sync`."""

    def finish_grad_sync(self) -> None:
        """Start the reductions that have not started yet, and wait for all of them."""

    def grad_sum_of_squares(self) -> Tensor:
        """The sum of squares of the gradients that this rank owns."""

    def scale_grads(self, factor: Tensor) -> None:
        """Multiply the gradients that this rank updates with."""

    def start_param_sync(self) -> None:
        """Bring updated weights to the ranks that hold copies; with overlap the next forward waits for them."""

    def finish_param_sync(self) -> None:
        """Wait until the weights of this rank are up to date."""

    def defer_updates(self, updates: PendingUpdates) -> None:
        """Let the optimizer's updates run during the next forward, where this kind of data parallelism can."""

    def local_tensors(self) -> Iterator[LocalTensor]:
        """All memory that this rank must fill to load weights."""


class ShardGatherer(Protocol):
    """The part of ZeRO-1 and FSDP that `FullMatrices` uses."""

    updated: list[OwnedShard]
    frozen: frozenset[str]

    def local_tensors(self) -> Iterator[LocalTensor]:
        """All memory that this rank must fill to load weights."""

    def gather_shards(
        self, names: Sequence[str], values_of: Callable[[OwnedShard], Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """All-gather, over data parallelism, the values that each rank passes for the elements it updates."""
