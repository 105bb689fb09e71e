"""AdamW with fp32 master weights for narrow parameters, and moments in the dtype the plan asks for."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def is_matrix(name: str, p: Tensor) -> bool:
    """Matrices, and stacks of them. A bias is a vector, also where the experts' are stacked."""
    return p.dim() >= 2 and not name.endswith("bias")


class AdamW:
    """Decoupled weight decay on matrices, none on vectors.

    Where weights, gradients and moments have one dtype, torch's fused kernel takes them all at once. Otherwise each
    parameter is widened to fp32, updated and rounded on its own, so that only one of them is held twice.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, Tensor]],
        weight_decay: float,
        state_dtype: str = "fp32",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        master: bool = True,
    ) -> None:
        """Without `master`, narrow parameters are updated in place: half the memory, and small updates round away."""
        self.named = [(name, p) for name, p in named if p.requires_grad]
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self.dtype = STATE_DTYPES[state_dtype]
        self.steps = 0
        narrow = [(name, p) for name, p in self.named if master and p.dtype != torch.float32]
        self.master = {name: p.detach().float().clone() for name, p in narrow}
        self.first = {name: torch.zeros_like(p, dtype=self.dtype) for name, p in self.named}
        self.second = {name: torch.zeros_like(p, dtype=self.dtype) for name, p in self.named}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update from `.grad`; parameters without a gradient keep their value and state."""
        self.steps += 1
        live = [(name, p) for name, p in self.named if p.grad is not None]
        for chosen, decay in (
            ([(name, p) for name, p in live if is_matrix(name, p)], self.weight_decay),
            ([(name, p) for name, p in live if not is_matrix(name, p)], 0.0),
        ):
            alike = [(name, p) for name, p in chosen if p.dtype == self.dtype and name not in self.master]
            if alike:
                first, second = ([state[name] for name, _ in alike] for state in (self.first, self.second))
                grads = [p.grad for _, p in alike if p.grad is not None]
                self._fused([p for _, p in alike], grads, first, second, lr, decay)
            done = {name for name, _ in alike}
            for name, p in chosen:
                if name not in done:
                    self._widened(name, p, lr, decay)

    def _widened(self, name: str, p: Tensor, lr: float, decay: float) -> None:
        assert p.grad is not None
        kept = [self.master.get(name, p), self.first[name], self.second[name]]
        weight, first, second = wide = [x.float() for x in kept]
        self._fused([weight], [p.grad.float()], [first], [second], lr, decay)
        for old, new in zip(kept, wide, strict=True):
            if old is not new:
                old.copy_(new)
        if name in self.master:
            p.copy_(weight)

    def _fused(
        self,
        weights: list[Tensor],
        grads: list[Tensor],
        first: list[Tensor],
        second: list[Tensor],
        lr: float,
        decay: float,
    ) -> None:
        count = torch.full((), float(self.steps), device=weights[0].device)
        torch._fused_adamw_(
            weights,
            grads,
            first,
            second,
            [],
            [count] * len(weights),
            lr=lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )

    def refresh(self) -> None:
        """Take the parameters as they are now, after weights were loaded behind the optimizer's back."""
        for name, p in self.named:
            if name in self.master:
                self.master[name].copy_(p)

    def state_dict(self) -> dict[str, Any]:
        """Tensors by name, for a checkpoint."""
        state: dict[str, Any] = {"steps": torch.tensor(self.steps)}
        for kind, values in (("master", self.master), ("first", self.first), ("second", self.second)):
            state |= {f"{kind}.{name}": value for name, value in values.items()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = int(state["steps"])
        for kind, values in (("master", self.master), ("first", self.first), ("second", self.second)):
            for name, value in values.items():
                value.copy_(state[f"{kind}.{name}"])
