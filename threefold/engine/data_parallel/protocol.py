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
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from threefold.engine.data_parallel.owned_shards import OwnedShard
from threefold.engine.dist.shard_placement import Placement
from threefold.engine.optim.pending_updates import PendingUpdates

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
        """Let the optimizer's updates run beside the next forward, where this kind of data parallelism can."""

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
        """All-gather, over data parallelism, the values that each rank gives for the elements it updates."""
