"""Muon for matrices: momentum, orthogonalised by a few Newton-Schulz steps. All other parameters go to AdamW.

`build.py` makes it (`job.optimizer = "muon"`). With data parallelism, `data_parallel/full_matrices.py` gathers the
matrices whose shards are spread over ranks.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from threefold.engine.optim.adamw import AdamW, refresh_master_weights
from threefold.engine.optim.optimizer_targets import (
    OptimizerParam,
    as_optimizer_params,
    make_master_weight,
    needs_master_weight,
    state_dtype_of,
)

# Coefficients of the quintic iteration that pushes singular values towards 1 (Jordan et al., 2024).
_A, _B, _C = 3.4445, -4.7750, 2.0315
_MAX_NUMEL_AT_ONCE = 2**26  # elements that are orthogonalised together


# A row of these is one token or one channel, so that they are no linear maps and stay with AdamW.
_LEFT_TO_ADAMW = ("embed", "head", "conv")


def orthogonalise(update: Tensor, steps: int = 5) -> Tensor:
    """Approximate the nearest semi-orthogonal matrix.

    A stack is processed some matrices at a time, because intermediate results are several times as large.
    """
    x = update if update.dtype == torch.float64 else update.float()
    if x.dim() == 2:
        return _newton_schulz(x, steps)
    made, at_once = torch.empty_like(x), max(1, _MAX_NUMEL_AT_ONCE // (x.size(-2) * x.size(-1)))
    for some, out in zip(x.split(at_once), made.split(at_once), strict=True):
        out.copy_(_newton_schulz(some, steps))
    return made


def _newton_schulz(x: Tensor, steps: int) -> Tensor:
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x.mT if tall else x


def uses_muon(name: str, matrix: bool) -> bool:
    """Whether Muon, not AdamW, updates the parameter of this name."""
    return matrix and not any(word in name for word in _LEFT_TO_ADAMW)


class MatrixGatherer(Protocol):
    """Gathers full matrices from the shards of several ranks, and extracts the local shard again."""

    def full_updates(
        self, params: list[OptimizerParam], update_of: Callable[[OptimizerParam], Tensor]
    ) -> Iterator[tuple[OptimizerParam, Tensor]]: ...

    def local_part(self, param: OptimizerParam, whole: Tensor) -> Tensor: ...


class LocalMatrices:
    """The gatherer of one rank, which holds every matrix in full."""

    def full_updates(
        self, params: list[OptimizerParam], update_of: Callable[[OptimizerParam], Tensor]
    ) -> Iterator[tuple[OptimizerParam, Tensor]]:
        return ((param, update_of(param)) for param in params if param.grad is not None)

    def local_part(self, param: OptimizerParam, whole: Tensor) -> Tensor:
        return whole


class Muon:
    """Muon for the matrices inside the layers, AdamW for the rest, with one learning rate for both.

    The update is scaled to AdamW's usual size (0.2 x sqrt of the longer side), so that learning rates carry over.
    """

    uses_fused_kernel = False

    def __init__(
        self,
        named: Iterable[tuple[str, Tensor] | OptimizerParam],
        weight_decay: float,
        state_dtype: str = "fp32",
        momentum: float = 0.95,
        gatherer: MatrixGatherer | None = None,
        master: bool = True,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        """`betas` and `eps` are those of AdamW, for the parameters that are left to it."""
        all_params = as_optimizer_params(named)
        self.params = [param for param in all_params if uses_muon(param.name, param.matrix)]
        names = {param.name for param in self.params}
        rest = [param for param in all_params if param.name not in names]
        self.adamw = AdamW(rest, weight_decay, state_dtype, betas, eps, master=master)
        self.weight_decay, self.momentum = weight_decay, momentum
        self._factor: Tensor | None = None
        self.gatherer = gatherer or LocalMatrices()
        self.buffer = {
            param.name: torch.zeros_like(param.value, dtype=state_dtype_of(param, torch.float32))
            for param in self.params
        }
        self.master = {
            param.name: make_master_weight(param) for param in self.params if master and needs_master_weight(param)
        }

    @property
    def matrices(self) -> list[tuple[str, Tensor]]:
        return [(param.name, param.value) for param in self.params]

    @property
    def steps(self) -> int:
        return self.adamw.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self.adamw.steps = steps

    @torch.no_grad()
    def step(self, lr: float, factor: Tensor | None = None) -> None:
        """Update all parameters. `factor` multiplies every gradient within the update."""
        self._factor = factor
        for param, whole in self.gatherer.full_updates(self.params, self._update):
            size = max(whole.size(-2), whole.size(-1))
            master = self.master.get(param.name, param.value)
            master.mul_(1 - lr * self.weight_decay)
            master.add_(self.gatherer.local_part(param, orthogonalise(whole)), alpha=-lr * 0.2 * size**0.5)
            if master is not param.value:
                param.value.copy_(master)
        self.adamw.step(lr, factor)

    def _update(self, param: OptimizerParam) -> Tensor:
        """Nesterov momentum. A missing gradient counts as zero, because other ranks may wait in the gather."""
        buffer = self.buffer[param.name]
        grad = torch.zeros_like(buffer) if param.grad is None else param.grad.to(buffer.dtype)
        if self._factor is not None:
            grad = grad * self._factor.to(buffer.dtype)
        buffer.mul_(self.momentum).add_(grad)
        return grad.add(buffer, alpha=self.momentum)

    def refresh(self) -> None:
        refresh_master_weights(self.params, self.master)
        self.adamw.refresh()

    def state_dict(self) -> dict[str, Any]:
        state = {f"buffer.{name}": value for name, value in self.buffer.items()}
        state |= {f"muon_master.{name}": value for name, value in self.master.items()}
        return state | self.adamw.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in self.buffer.items():
            value.copy_(state[f"buffer.{name}"])
        for name, value in self.master.items():
            value.copy_(state[f"muon_master.{name}"])
        self.adamw.load_state_dict(state)
