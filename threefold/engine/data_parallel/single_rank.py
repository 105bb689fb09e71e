"""Data parallelism on one rank: nothing is reduced or buffered.

`build.py` chooses it where one rank holds everything. ZeRO-1 and FSDP are compared with it.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from threefold.engine.autograd.grad_squares import grad_squares_of, request_grad_squares
from threefold.engine.data_parallel.protocol import LocalTensor, OwnedShard, make_owned_shard, norm_zero, sum_of_squares
from threefold.engine.dist.shard_placement import replicated
from threefold.engine.optim.pending_updates import PendingUpdates, without_waiting


class SingleRank:
    """All weights and gradients are those of one module; `engine/data_parallel/protocol.py` explains the methods."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._updates: PendingUpdates | None = None
        # Kernels of stacked expert weights and of embeddings sum the squares of gradients as they store them.
        embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
        self._with_squares = [p for p in model.parameters() if p.dim() == 3 or p in embeddings]

    @property
    def owned(self) -> list[OwnedShard]:
        return [
            make_owned_shard(
                name,
                p,
                replicated(p.shape, ()),
                0,
                p.detach().view(-1),
                None if p.grad is None else p.grad.view(-1),
                p.dtype,
            )
            for name, p in self.model.named_parameters()
        ]

    @property
    def frozen(self) -> frozenset[str]:
        return frozenset(name for name, p in self.model.named_parameters() if not p.requires_grad)

    @property
    def updated(self) -> list[OwnedShard]:
        frozen = self.frozen
        return [owned for owned in self.owned if owned.name not in frozen]

    def begin_step(self, passes: int) -> None:
        with without_waiting():
            self.model.zero_grad(set_to_none=True)  # pending updates hold the gradients that they still need
        for p in self._with_squares:
            request_grad_squares(p, passes == 1)  # gradients of several passes are added up after the kernels

    def finish_grad_sync(self) -> None:
        self.finish_param_sync()

    def start_param_sync(self) -> None:
        pass

    def finish_param_sync(self) -> None:
        if self._updates is not None:
            self._updates.wait()

    def defer_updates(self, updates: PendingUpdates) -> None:
        self._updates = updates
        updates.defer({name: [p] for name, p in self.model.named_parameters()})

    def local_tensors(self) -> Iterator[LocalTensor]:
        for name, p in self.model.named_parameters():
            yield name, replicated(p.shape, ()), p, None

    @torch.no_grad()
    def grad_sum_of_squares(self) -> Tensor:
        first = next(self.model.parameters())
        known = {p: sums_P for p in self._with_squares if (sums_P := grad_squares_of(p)) is not None}
        others = [p.grad for p in self.model.parameters() if p.grad is not None and p not in known]
        squares = sum_of_squares(others, norm_zero([first], first.device))
        return squares + torch.cat(list(known.values())).sum() if known else squares

    @torch.no_grad()
    def scale_grads(self, factor: Tensor) -> None:
        if grads := self._grads():
            torch._foreach_mul_(grads, factor)

    def _grads(self) -> list[Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]
