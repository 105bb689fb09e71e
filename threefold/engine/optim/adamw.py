"""AdamW with fp32 master weights for narrow parameters, and moments in the dtype the plan asks for."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from threefold.engine.kernels.availability import has_triton_kernels
from threefold.engine.optim.cpu_offload import PIECE, Host, chosen
from threefold.engine.optim.optimizer_params import Item, as_items, kept_dtype, make_master, needs_master
from threefold.engine.device import is_simulated

STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class AdamW:
    """Decoupled weight decay on matrices, none on vectors.

    A GPU with triton updates each parameter in one pass over its memory, in fp32. Elsewhere, and in fp64, torch's fused
    kernel takes all at once whose weights, gradients and moments have one dtype; any other parameter is widened to
    fp32, updated and rounded on its own, so that only one of them is held twice.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, Tensor] | Item],
        weight_decay: float,
        state_dtype: str = "fp32",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        master: bool = True,
        offload: float = 0.0,
    ) -> None:
        """Without `master`, narrow parameters are updated in place: half the memory, and small updates round away.

        `offload` is the fraction of the states that stays in host memory.
        """
        self.items = as_items(named)
        places = chosen([item.value.numel() for item in self.items], offload)
        self.hosted = {item.name for n, item in enumerate(self.items) if n in places}
        self.host = Host(self.items[0].value.device if self.items else torch.device("cpu"))
        narrow = all(item.value.dtype != torch.float64 for item in self.items)
        self.in_one_pass = narrow and (is_simulated() or has_triton_kernels(self.host.device))
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self.dtype = STATE_DTYPES[state_dtype]
        self.steps = 0
        self._factor: Tensor | None = None
        self.master = {item.name: self._master(item) for item in self.items if master and needs_master(item)}
        self.first = {item.name: self._zeros(item) for item in self.items}
        self.second = {item.name: self._zeros(item) for item in self.items}

    def _zeros(self, item: Item) -> Tensor:
        dtype = kept_dtype(item, self.dtype)
        return (
            self.host.zeros(item.value, dtype)
            if item.name in self.hosted
            else torch.zeros_like(item.value, dtype=dtype)
        )

    def _master(self, item: Item) -> Tensor:
        made = make_master(item)
        return self.host.take(made) if made is not item.value and item.name in self.hosted else made

    @torch.no_grad()
    def step(self, lr: float, factor: Tensor | None = None) -> None:
        """One update; what has no gradient keeps its value and state.

        `factor` multiplies every gradient, in passing: only where `in_one_pass` holds.
        """
        self.steps += 1
        self._factor = factor
        # The largest first: what a launch costs the host is hidden behind them.
        items = sorted(self.items, key=lambda item: -item.value.numel()) if self.in_one_pass else self.items
        for matrix, decay in ((True, self.weight_decay), (False, 0.0)):
            alike: dict[torch.dtype, list[Item]] = defaultdict(list)
            apart: list[Item] = []
            hosted = []
            for item in items:
                if item.matrix != matrix or item.grad is None:
                    continue
                if item.name in self.hosted:
                    hosted += self._pieces(item)
                else:
                    dtypes = {item.grad.dtype, *(x.dtype for x in self._kept(item))}
                    together = len(dtypes) == 1 and not self.in_one_pass
                    (alike[dtypes.pop()] if together else apart).append(item)
            for group in alike.values():
                self._together(group, lr, decay)
            for item in apart:
                assert item.grad is not None
                self._one(item.value, item.grad, self._kept(item), lr, decay)
            for (value, grad, home), here in zip(hosted, self.host.visit(home for _, _, home in hosted), strict=True):
                self._one(value, grad, here if len(home) == 3 else [value, *here], lr, decay)

    def _pieces(self, item: Item) -> list[tuple[Tensor, Tensor, list[Tensor]]]:
        """Flat parts of value and gradient, with their states on the host."""
        assert item.grad is not None
        weight, first, second = self._kept(item)
        home = [first, second] if weight is item.value else [weight, first, second]
        parts = zip(*(x.detach().reshape(-1).split(PIECE) for x in (item.value, item.grad, *home)), strict=True)
        return [(value, grad, list(rest)) for value, grad, *rest in parts]

    def _kept(self, item: Item) -> tuple[Tensor, Tensor, Tensor]:
        name = item.name
        return self.master.get(name, item.value), self.first[name], self.second[name]

    def _together(self, items: list[Item], lr: float, decay: float) -> None:
        weights, first, second = (list(each) for each in zip(*map(self._kept, items), strict=True))
        grads = [item.grad for item in items if item.grad is not None]
        self._fused(weights, grads, first, second, lr, decay)
        for item, weight in zip(items, weights, strict=True):
            if weight is not item.value:
                item.value.copy_(weight)

    def _one(self, value: Tensor, grad: Tensor, kept: Sequence[Tensor], lr: float, decay: float) -> None:
        """`kept` are the weight that is updated, which may be the value, and the moments."""
        if self.in_one_pass:
            self._pass(value, grad, *kept, lr=lr, decay=decay)
            return
        alike = len({x.dtype for x in (grad, *kept)}) == 1
        dtype = torch.promote_types(value.dtype, torch.float32)
        weight, first, second = wide = [x if alike else x.to(dtype) for x in kept]
        self._fused([weight], [grad if alike else grad.to(dtype)], [first], [second], lr, decay)
        for old, new in zip(kept, wide, strict=True):
            if old is not new:
                old.copy_(new)
        if kept[0] is not value:
            value.copy_(weight)

    def _pass(
        self, value: Tensor, grad: Tensor, weight: Tensor, first: Tensor, second: Tensor, *, lr: float, decay: float
    ) -> None:
        if is_simulated():
            return
        from threefold.engine.kernels.elementwise.adamw_triton import adamw_step

        factor = value.new_ones((), dtype=torch.float32) if self._factor is None else self._factor
        settings = {"betas": self.betas, "eps": self.eps, "steps": self.steps}
        adamw_step(value, grad.contiguous(), weight, first, second, factor, lr=lr, decay=decay, **settings)  # type: ignore

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
        self.host.settle()
        refresh(self.items, self.master)

    def state_dict(self) -> dict[str, Any]:
        """Tensors by name, for a checkpoint; those on the host as they are there."""
        self.host.settle()
        state: dict[str, Any] = {"steps": torch.tensor(self.steps)}
        for kind, values in (("master", self.master), ("first", self.first), ("second", self.second)):
            state |= {f"{kind}.{name}": value for name, value in values.items()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = int(state["steps"])
        self.host.settle()
        for kind, values in (("master", self.master), ("first", self.first), ("second", self.second)):
            for name, value in values.items():
                value.copy_(state[f"{kind}.{name}"])


def refresh(items: Iterable[Item], masters: dict[str, Tensor]) -> None:
    for item in items:
        if item.name in masters and masters[item.name] is not item.value:
            masters[item.name].copy_(item.value)
