"""Muon for matrices: momentum, orthogonalized by a few Newton-Schulz steps. All other parameters go to AdamW.

`build.py` makes it (`job.optimizer = "muon"`). With data parallelism, `data_parallel/full_matrices.py` gathers the
matrices whose shards are spread over ranks.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from threefold.engine.device import device_type
from threefold.engine.optim.adamw import AdamW
from threefold.engine.optim.optimizer_targets import (
    OptimizerParam,
    as_optimizer_params,
    make_master_weight,
    needs_master_weight,
    refresh_master_weights,
    state_dtype_of,
)
from threefold.engine.optim.param_remainders import (
    can_store_remainder,
    masters_in_turn,
    split_masters,
    store_split_masters,
)

# Coefficients of the quintic iteration that pushes singular values towards 1 (Jordan et al., 2024).
_A, _B, _C = 3.4445, -4.7750, 2.0315
_MAX_NUMEL_AT_ONCE = 2**26  # elements that are orthogonalized together


# A row of these is one token or one channel, so that they are no linear maps and stay with AdamW.
_LEFT_TO_ADAMW = ("embed", "head", "conv")


_MATMUL_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def orthogonalize(update: Tensor, steps: int = 5, dtype: torch.dtype = torch.float32) -> Tensor:
    """Approximate the nearest semi-orthogonal matrix by GEMMs in `dtype`, in which the result is too; fp64 stays fp64.

    A stack is processed some matrices at a time, because intermediate results are several times as large.
    """
    dtype = torch.float64 if update.dtype == torch.float64 else dtype
    if update.dim() == 2:
        return _newton_schulz(update, steps, dtype)
    made = torch.empty_like(update, dtype=dtype)
    at_once = max(1, _MAX_NUMEL_AT_ONCE // (update.size(-2) * update.size(-1)))
    for some, out in zip(update.split(at_once), made.split(at_once), strict=True):
        out.copy_(_newton_schulz(some, steps, dtype))
    return made


def _newton_schulz(update: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    is_tall = update.size(-2) > update.size(-1)  # then the Gram matrix of columns is the smaller one
    add_matmul = torch.addmm if update.dim() == 2 else torch.baddbmm
    # The norm is taken before a cast: a sum of squares in sixteen bits would be off by more than the iteration is.
    scale = 1 / (update.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    x = (update * scale).to(dtype)
    for _ in range(steps):
        gram = x.mT @ x if is_tall else x @ x.mT
        gram = add_matmul(gram, gram, gram, beta=_B, alpha=_C)
        x = add_matmul(x, x, gram, beta=_A) if is_tall else add_matmul(x, gram, x, beta=_A)
    return x


def uses_muon(name: str, matrix: bool) -> bool:
    """Return whether Muon, not AdamW, updates the parameter of this name."""
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
        matmul_dtype: str | None = None,
        store_param_remainders: bool = False,
    ) -> None:
        """`betas` and `eps` are those of AdamW, for the parameters that are left to it.

        `matmul_dtype` is that of the Newton-Schulz GEMMs; None is bf16 for 16-bit parameters on a GPU, and else fp32.
        """
        all_params = as_optimizer_params(named)
        self.params = [param for param in all_params if uses_muon(param.name, param.matrix)]
        names = {param.name for param in self.params}
        rest = [param for param in all_params if param.name not in names]
        remainders = {"master": master, "store_param_remainders": store_param_remainders}
        self.adamw = AdamW(rest, weight_decay, state_dtype, betas, eps, **remainders)
        self.matmul_dtype = matmul_dtype
        self.weight_decay, self.momentum = weight_decay, momentum
        self._factor: Tensor | None = None
        self.gatherer = gatherer or LocalMatrices()
        self.buffer = {
            param.name: torch.zeros_like(param.value, dtype=state_dtype_of(param, torch.float32))
            for param in self.params
        }
        self.remainders = {
            param.name: torch.zeros_like(param.value, dtype=torch.int16)
            for param in self.params
            if master and store_param_remainders and can_store_remainder(param)
        }
        self.master = {
            param.name: make_master_weight(param)
            for param in self.params
            if master and needs_master_weight(param) and param.name not in self.remainders
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
            update = self.gatherer.local_part(param, orthogonalize(whole, dtype=self._matmul_dtype(param)))
            shrink, rate = 1 - lr * self.weight_decay, -lr * 0.2 * size**0.5
            if param.name in self.remainders:
                remainder = self.remainders[param.name]
                for master, part in masters_in_turn(param.value, remainder, update):
                    master.mul_(shrink).add_(part, alpha=rate)
                continue
            master = self.master.get(param.name, param.value)
            master.mul_(shrink).add_(update, alpha=rate)
            if master is not param.value:
                param.value.copy_(master)
        self.adamw.step(lr, factor)

    def _matmul_dtype(self, param: OptimizerParam) -> torch.dtype:
        if self.matmul_dtype is not None:
            return _MATMUL_DTYPES[self.matmul_dtype]
        on_gpu = device_type(param.value.device) == "cuda"
        return torch.bfloat16 if on_gpu and needs_master_weight(param) else torch.float32

    def _update(self, param: OptimizerParam) -> Tensor:
        """Nesterov momentum. A missing gradient counts as zero, because other ranks may wait in the gather."""
        buffer = self.buffer[param.name]
        grad = torch.zeros_like(buffer) if param.grad is None else param.grad.to(buffer.dtype)
        if self._factor is not None:
            grad = grad * self._factor.to(buffer.dtype)
        buffer.mul_(self.momentum).add_(grad)
        return grad.add(buffer, alpha=self.momentum)

    def refresh(self) -> None:
        refresh_master_weights(self.params, self.master, self.remainders)
        self.adamw.refresh()

    def states_in_memory(self) -> Iterator[tuple[str, Tensor]]:
        """All states by name, as they are kept."""
        kinds = {"buffer": self.buffer, "muon_master": self.master, "muon_remainder": self.remainders}
        yield from ((f"{kind}.{name}", value) for kind, values in kinds.items() for name, value in values.items())
        yield from self.adamw.states_in_memory()

    def state_dict(self) -> dict[str, Any]:
        state = {f"buffer.{name}": value for name, value in self.buffer.items()}
        state |= split_masters("muon_master", self.params, self.remainders)
        state |= {f"muon_master.{name}": value for name, value in self.master.items()}
        return state | self.adamw.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in self.buffer.items():
            value.copy_(state[f"buffer.{name}"])
        for name, value in self.master.items():
            value.copy_(state[f"muon_master.{name}"])
        self.adamw.load_state_dict(state)
        self.load_split_masters(state)

    def load_split_masters(self, state: Mapping[str, Any]) -> None:
        """Split the master weights of a `state_dict` that are kept as remainders, and fill the parameters too."""
        store_split_masters("muon_master", self.params, self.remainders, state)
        self.adamw.load_split_masters(state)
