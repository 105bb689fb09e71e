"""AdamW with fp32 master weights for 16-bit parameters, moments in the plan's dtype, and CPU offload of states.

`build.py` makes one for each rank, over whole parameters or over the shards that the rank owns. `step.py` calls `step`.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from threefold.engine.device import is_simulated
from threefold.engine.kernels.availability import has_triton_kernels
from threefold.engine.optim.cpu_offload import CHUNK_NUMEL, HostStates, choose_offloaded
from threefold.engine.optim.optimizer_targets import (
    OptimizerParam,
    as_optimizer_params,
    make_master_weight,
    needs_master_weight,
    state_dtype_of,
)

# Without scales of their own, second moments below sixteen bits or in fp16 would be 0 (`engine-has-knob` refuses them).
STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class AdamW:
    """AdamW with decoupled weight decay on matrices and none on vectors.

    A GPU with triton updates each parameter in one pass over its memory, in fp32. Elsewhere, and in fp64, torch's fused
    kernel updates all parameters at once whose weights, gradients and moments have one dtype. Any other parameter is
    converted to fp32, updated and rounded on its own, so that only one parameter exists twice at a time.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, Tensor] | OptimizerParam],
        weight_decay: float,
        state_dtype: str = "fp32",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        master: bool = True,
        offload: float = 0.0,
    ) -> None:
        """Without `master`, 16-bit parameters are updated in place: half the memory, but small updates round away.

        `offload` is the fraction of the states that stays in host memory.
        """
        self.params = as_optimizer_params(named)
        indices = choose_offloaded([param.value.numel() for param in self.params], offload)
        self.offloaded = {param.name for n, param in enumerate(self.params) if n in indices}
        self.host = HostStates(self.params[0].value.device if self.params else torch.device("cpu"))
        no_fp64 = all(param.value.dtype != torch.float64 for param in self.params)
        self.uses_fused_kernel = no_fp64 and (is_simulated() or has_triton_kernels(self.host.device))
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self.dtype = STATE_DTYPES[state_dtype]
        self.steps = 0
        self._factor: Tensor | None = None
        self.master = {
            param.name: self._master(param) for param in self.params if master and needs_master_weight(param)
        }
        self.exp_avg = {param.name: self._zeros(param) for param in self.params}
        self.exp_avg_sq = {param.name: self._zeros(param) for param in self.params}

    def _zeros(self, param: OptimizerParam) -> Tensor:
        dtype = state_dtype_of(param, self.dtype)
        return (
            self.host.zeros(param.value, dtype)
            if param.name in self.offloaded
            else torch.zeros_like(param.value, dtype=dtype)
        )

    def _master(self, param: OptimizerParam) -> Tensor:
        master = make_master_weight(param)
        offloads = master is not param.value and param.name in self.offloaded
        return self.host.copy_to_host(master) if offloads else master

    @torch.no_grad()
    def step(self, lr: float, factor: Tensor | None = None) -> None:
        """Update all parameters that have a gradient.

        `factor` multiplies every gradient within the update. Where it is NaN, the fused kernel (`uses_fused_kernel`)
        changes nothing; torch's kernel takes finite factors only, and rounds them to fp32.
        """
        self.steps += 1
        self._factor = factor
        # The largest go first, so that the host launches the other kernels while the GPU is busy.
        params = sorted(self.params, key=lambda param: -param.value.numel()) if self.uses_fused_kernel else self.params
        for matrix, decay in ((True, self.weight_decay), (False, 0.0)):
            same_dtype: dict[torch.dtype, list[OptimizerParam]] = defaultdict(list)
            separate: list[OptimizerParam] = []
            offloaded = []
            for param in params:
                if param.matrix != matrix or param.grad is None:
                    continue
                if param.name in self.offloaded:
                    offloaded += self._chunks(param)
                else:
                    dtypes = {param.grad.dtype, *(x.dtype for x in self._states(param))}
                    together = len(dtypes) == 1 and not self.uses_fused_kernel
                    (same_dtype[dtypes.pop()] if together else separate).append(param)
            for group in same_dtype.values():
                self._update_group(group, lr, decay)
            for param in separate:
                assert param.grad is not None
                self._update_one(param.value, param.grad, self._states(param), lr, decay)
            streamed = self.host.stream_to_device(on_host for _, _, on_host in offloaded)
            for (value, grad, on_host), states in zip(offloaded, streamed, strict=True):
                self._update_one(value, grad, states if len(on_host) == 3 else [value, *states], lr, decay)

    def _chunks(self, param: OptimizerParam) -> list[tuple[Tensor, Tensor, list[Tensor]]]:
        """Flat chunks of value and gradient, each with its states on the host."""
        assert param.grad is not None
        weight, exp_avg, exp_avg_sq = self._states(param)
        on_host = [exp_avg, exp_avg_sq] if weight is param.value else [weight, exp_avg, exp_avg_sq]
        parts = zip(
            *(x.detach().reshape(-1).split(CHUNK_NUMEL) for x in (param.value, param.grad, *on_host)), strict=True
        )
        return [(value, grad, list(states)) for value, grad, *states in parts]

    def _states(self, param: OptimizerParam) -> tuple[Tensor, Tensor, Tensor]:
        """The weight that is updated (the master if there is one) and both moments."""
        name = param.name
        return self.master.get(name, param.value), self.exp_avg[name], self.exp_avg_sq[name]

    def _update_group(self, params: list[OptimizerParam], lr: float, decay: float) -> None:
        weights, exp_avg, exp_avg_sq = (list(tensors) for tensors in zip(*map(self._states, params), strict=True))
        grads = [param.grad for param in params if param.grad is not None]
        self._torch_fused_adamw(weights, grads, exp_avg, exp_avg_sq, lr, decay)
        for param, weight in zip(params, weights, strict=True):
            if weight is not param.value:
                param.value.copy_(weight)

    def _update_one(self, value: Tensor, grad: Tensor, states: Sequence[Tensor], lr: float, decay: float) -> None:
        """Update one tensor. `states` are the weight that is updated, which may be `value` itself, and both moments."""
        if self.uses_fused_kernel:
            self._update_fused(value, grad, *states, lr=lr, decay=decay)
            return
        same_dtype = len({x.dtype for x in (grad, *states)}) == 1
        dtype = torch.promote_types(value.dtype, torch.float32)
        weight, exp_avg, exp_avg_sq = converted = [x if same_dtype else x.to(dtype) for x in states]
        self._torch_fused_adamw([weight], [grad if same_dtype else grad.to(dtype)], [exp_avg], [exp_avg_sq], lr, decay)
        for old, new in zip(states, converted, strict=True):
            if old is not new:
                old.copy_(new)
        if states[0] is not value:
            value.copy_(weight)

    def _update_fused(
        self,
        value: Tensor,
        grad: Tensor,
        weight: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        *,
        lr: float,
        decay: float,
    ) -> None:
        if is_simulated():
            return
        from threefold.engine.kernels.loss_and_optimizer.adamw_triton import adamw_step

        factor = value.new_ones((), dtype=torch.float32) if self._factor is None else self._factor
        settings = {"betas": self.betas, "eps": self.eps, "steps": self.steps}
        adamw_step(value, grad.contiguous(), weight, exp_avg, exp_avg_sq, factor, lr=lr, decay=decay, **settings)  # type: ignore

    def _torch_fused_adamw(
        self,
        weights: list[Tensor],
        grads: list[Tensor],
        exp_avg: list[Tensor],
        exp_avg_sq: list[Tensor],
        lr: float,
        decay: float,
    ) -> None:
        count = torch.full((), float(self.steps), device=weights[0].device)
        scale = None if self._factor is None else self._factor.reciprocal().float()  # torch divides by it
        torch._fused_adamw_(
            weights,
            grads,
            exp_avg,
            exp_avg_sq,
            [],
            [count] * len(weights),
            lr=lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=scale,
        )

    def refresh(self) -> None:
        """Copy the parameters into the master weights, after weights were loaded without the optimizer's states."""
        self.host.synchronize()
        refresh_master_weights(self.params, self.master)

    def state_dict(self) -> dict[str, Any]:
        """Tensors by name, for a checkpoint. Offloaded states are the host tensors themselves."""
        self.host.synchronize()
        state: dict[str, Any] = {"steps": torch.tensor(self.steps)}
        for kind, values in (("master", self.master), ("first", self.exp_avg), ("second", self.exp_avg_sq)):
            state |= {f"{kind}.{name}": value for name, value in values.items()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = int(state["steps"])
        self.host.synchronize()
        for kind, values in (("master", self.master), ("first", self.exp_avg), ("second", self.exp_avg_sq)):
            for name, value in values.items():
                value.copy_(state[f"{kind}.{name}"])


def refresh_master_weights(params: Iterable[OptimizerParam], masters: dict[str, Tensor]) -> None:
    """Copy each parameter into its master weight."""
    for param in params:
        if param.name in masters and masters[param.name] is not param.value:
            masters[param.name].copy_(param.value)
