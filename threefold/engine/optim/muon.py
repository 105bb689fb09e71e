"""Muon for matrices: momentum, orthogonalised by a few Newton-Schulz steps. Everything else goes to AdamW."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from threefold.engine.optim.adamw import AdamW, refresh
from threefold.engine.optim.optimizer_params import Item, as_items, kept_dtype, make_master, needs_master

# Coefficients of the quintic iteration that pushes singular values towards 1 (Jordan et al., 2024).
_A, _B, _C = 3.4445, -4.7750, 2.0315
_AT_ONCE = 2**26  # elements


# A row of these stands for one token or one channel: their columns mean nothing together.
_LEFT_TO_ADAMW = ("embed", "head", "conv")


def orthogonalise(update: Tensor, steps: int = 5) -> Tensor:
    """The nearest semi-orthogonal matrix, roughly. Of a stack some matrices at a time: what is made on the way is
    several times as large as they are."""
    x = update if update.dtype == torch.float64 else update.float()
    if x.dim() == 2:
        return _orthogonal(x, steps)
    made, at_once = torch.empty_like(x), max(1, _AT_ONCE // (x.size(-2) * x.size(-1)))
    for some, out in zip(x.split(at_once), made.split(at_once), strict=True):
        out.copy_(_orthogonal(some, steps))
    return made


def _orthogonal(x: Tensor, steps: int) -> Tensor:
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x.mT if tall else x


def by_muon(name: str, matrix: bool) -> bool:
    return matrix and not any(word in name for word in _LEFT_TO_ADAMW)


class Wholes(Protocol):
    """Brings the parts of a matrix together where ranks share it."""

    def each(self, items: list[Item], update_of: Callable[[Item], Tensor]) -> Iterator[tuple[Item, Tensor]]: ...

    def part(self, item: Item, whole: Tensor) -> Tensor: ...


class OneRank:
    def each(self, items: list[Item], update_of: Callable[[Item], Tensor]) -> Iterator[tuple[Item, Tensor]]:
        return ((item, update_of(item)) for item in items if item.grad is not None)

    def part(self, item: Item, whole: Tensor) -> Tensor:
        return whole


class Muon:
    """Matrices inside the layers by Muon, the rest by AdamW; one learning rate for both.

    The update is scaled to AdamW's usual size (0.2 x sqrt of the longer side), so that rates carry over.
    """

    in_one_pass = False

    def __init__(
        self,
        named: Iterable[tuple[str, Tensor] | Item],
        weight_decay: float,
        state_dtype: str = "fp32",
        momentum: float = 0.95,
        wholes: Wholes | None = None,
        master: bool = True,
    ) -> None:
        every = as_items(named)
        self.items = [item for item in every if by_muon(item.name, item.matrix)]
        kept = {item.name for item in self.items}
        self.rest = AdamW([item for item in every if item.name not in kept], weight_decay, state_dtype, master=master)
        self.weight_decay, self.momentum = weight_decay, momentum
        self.wholes = wholes or OneRank()
        self.buffer = {
            item.name: torch.zeros_like(item.value, dtype=kept_dtype(item, torch.float32)) for item in self.items
        }
        self.master = {item.name: make_master(item) for item in self.items if master and needs_master(item)}

    @property
    def matrices(self) -> list[tuple[str, Tensor]]:
        return [(item.name, item.value) for item in self.items]

    @property
    def steps(self) -> int:
        return self.rest.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self.rest.steps = steps

    @torch.no_grad()
    def step(self, lr: float, factor: Tensor | None = None) -> None:
        for item, whole in self.wholes.each(self.items, self._update):
            size = max(whole.size(-2), whole.size(-1))
            master = self.master.get(item.name, item.value)
            master.mul_(1 - lr * self.weight_decay)
            master.add_(self.wholes.part(item, orthogonalise(whole)), alpha=-lr * 0.2 * size**0.5)
            if master is not item.value:
                item.value.copy_(master)
        self.rest.step(lr)

    def _update(self, item: Item) -> Tensor:
        """Nesterov momentum. What got no gradient on this rank counts as zero: others may wait for it."""
        buffer = self.buffer[item.name]
        grad = torch.zeros_like(buffer) if item.grad is None else item.grad.to(buffer.dtype)
        buffer.mul_(self.momentum).add_(grad)
        return grad.add(buffer, alpha=self.momentum)

    def refresh(self) -> None:
        refresh(self.items, self.master)
        self.rest.refresh()

    def state_dict(self) -> dict[str, Any]:
        mine = {f"buffer.{name}": value for name, value in self.buffer.items()}
        mine |= {f"muon_master.{name}": value for name, value in self.master.items()}
        return mine | self.rest.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in self.buffer.items():
            value.copy_(state[f"buffer.{name}"])
        for name, value in self.master.items():
            value.copy_(state[f"muon_master.{name}"])
        self.rest.load_state_dict(state)
