"""Muon for matrices: momentum, orthogonalised by a few Newton-Schulz steps. Everything else goes to AdamW."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from threefold.engine.optim.adamw import AdamW, is_matrix

# Coefficients of the quintic iteration that pushes singular values towards 1 (Jordan et al., 2024).
_A, _B, _C = 3.4445, -4.7750, 2.0315


# A row of these stands for one token or one channel: their columns mean nothing together.
_LEFT_TO_ADAMW = ("embed", "head", "conv")


def orthogonalise(update: Tensor, steps: int = 5) -> Tensor:
    """The nearest semi-orthogonal matrix, roughly; works on a batch of matrices."""
    x = update.float()
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x.mT if tall else x


class Muon:
    """Matrices inside the layers by Muon, the rest by AdamW; one learning rate for both.

    The update is scaled to AdamW's usual size (0.2 x sqrt of the longer side), so that rates carry over.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, Tensor]],
        weight_decay: float,
        state_dtype: str = "fp32",
        momentum: float = 0.95,
    ) -> None:
        every = [(name, p) for name, p in named if p.requires_grad]
        self.matrices = [
            (name, p) for name, p in every if is_matrix(name, p) and not any(word in name for word in _LEFT_TO_ADAMW)
        ]
        kept = {name for name, _ in self.matrices}
        self.rest = AdamW([(n, p) for n, p in every if n not in kept], weight_decay, state_dtype)
        self.weight_decay, self.momentum = weight_decay, momentum
        self.buffer = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in self.matrices}
        self.master = {n: p.detach().float().clone() for n, p in self.matrices if p.dtype != torch.float32}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for name, p in self.matrices:
            if p.grad is None:
                continue
            grad, buffer = p.grad.float(), self.buffer[name]
            buffer.mul_(self.momentum).add_(grad)
            update = orthogonalise(grad.add(buffer, alpha=self.momentum))
            master = self.master.get(name, p)
            master.mul_(1 - lr * self.weight_decay)
            master.add_(update, alpha=-lr * 0.2 * max(p.size(-2), p.size(-1)) ** 0.5)
            if name in self.master:
                p.copy_(master)
        self.rest.step(lr)

    def refresh(self) -> None:
        for name, p in self.matrices:
            if name in self.master:
                self.master[name].copy_(p)
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
