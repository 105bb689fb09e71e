"""AdamW with fp32 master weights for 16-bit parameters, moments in the plan's dtype, and CPU offload of states.

`build.py` makes one for each rank, over whole parameters or over the shards that the rank owns. `step.py` calls `step`.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from threefold.engine.device import is_simulated
from threefold.engine.kernels.availability import has_triton_kernels
from threefold.engine.optim.cpu_offload import HostStates, choose_offloaded
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
    join_master,
    split_masters,
    store_master,
    store_split_masters,
)
from threefold.engine.optim.pending_updates import PendingUpdates

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
        store_param_remainders: bool = False,
    ) -> None:
        """Without `master`, 16-bit parameters are updated in place: half the memory, but small updates round away.

        `offload` is the fraction of the states that stays in host memory. With `store_param_remainders` the master
        weights of bf16 parameters are kept as 16-bit remainders (`param_remainders.py`).
        """
        self.params = as_optimizer_params(named)
        self.dtype = STATE_DTYPES[state_dtype]
        on_host = choose_offloaded([param.value.numel() for param in self.params], offload)
        self.offloaded = {self.params[n].name for n in on_host}
        device = self.params[0].value.device if self.params else torch.device("cpu")
        state_bytes = partial(self._state_bytes, master=master, remainders=store_param_remainders)
        sizes = [(self.params[n].value.numel(), state_bytes(self.params[n])) for n in on_host]
        self.host = HostStates([param.name for param in self.params], sizes, device)
        no_fp64 = all(param.value.dtype != torch.float64 for param in self.params)
        self.uses_fused_kernel = no_fp64 and (is_simulated() or has_triton_kernels(self.host.device))
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self.steps = 0
        self._factor: Tensor | None = None
        self.remainders = {
            param.name: self._zeros(param, torch.int16)
            for param in self.params
            if master and store_param_remainders and can_store_remainder(param)
        }
        self.master = {
            param.name: self._master(param)
            for param in self.params
            if master and needs_master_weight(param) and param.name not in self.remainders
        }
        self.exp_avg = {param.name: self._zeros(param) for param in self.params}
        self.exp_avg_sq = {param.name: self._zeros(param) for param in self.params}
        self.host.allocate_slots([self._on_host(param) for param in self.params if param.name in self.offloaded])

    def _state_bytes(self, param: OptimizerParam, master: bool, remainders: bool) -> int:
        """Bytes of the states of one element of a parameter, without its value."""
        moments = 2 * state_dtype_of(param, self.dtype).itemsize
        if not master or not needs_master_weight(param) or param.value.dtype == torch.float32:
            return moments
        return moments + (2 if remainders and can_store_remainder(param) else 4)

    def _zeros(self, param: OptimizerParam, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or state_dtype_of(param, self.dtype)
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
        self.updates.wait()
        self.steps += 1
        self._factor = factor
        # The largest go first, so that the host launches the other kernels while the GPU is busy.
        params = sorted(self.params, key=lambda param: -param.value.numel()) if self.uses_fused_kernel else self.params
        for matrix, decay in ((True, self.weight_decay), (False, 0.0)):
            same_dtype: dict[torch.dtype, list[OptimizerParam]] = defaultdict(list)
            separate: list[tuple[Tensor, ...]] = []
            for param in params:
                if param.matrix != matrix or param.grad is None or param.name in self.offloaded:
                    continue
                tensors = (param.value, param.grad, *self._states(param))
                dtypes = {x.dtype for x in tensors[1:]}
                together = len(dtypes) == 1 and not self.uses_fused_kernel
                if together:
                    same_dtype[dtypes.pop()].append(param)
                else:
                    separate.append(tensors)
            for group in same_dtype.values():
                self._update_group(group, lr, decay)
            self._update_separate(separate, lr, decay)
        on_host = [n for n, param in enumerate(self.params) if param.name in self.offloaded and param.grad is not None]
        chunks = [self._chunks(self.params[n]) for n in on_host]  # with the gradients as they are now
        decays = [self.weight_decay if self.params[n].matrix else 0.0 for n in on_host]
        self.updates.start(on_host, self._update_offloaded(chunks, decays, lr))

    @property
    def updates(self) -> PendingUpdates:
        """The updates of offloaded parameters, which may run during the next forward."""
        return self.host.updates

    def _update_offloaded(
        self, params: list[list[tuple[Tensor, Tensor, list[Tensor]]]], decays: list[float], lr: float
    ) -> Iterator[Tensor]:
        """Update the parameters with these chunks in turn. Yields the gradient of each that is updated."""
        streamed = self.host.stream_to_device([on_host for chunks in params for _, _, on_host in chunks])
        for chunks, decay in zip(params, decays, strict=True):
            for value, grad, on_host in chunks:
                states = next(streamed)
                self._update_one(value, grad, states if len(on_host) == 3 else [value, *states], lr, decay)
            yield chunks[-1][1]
        next(streamed, None)  # the last chunk goes back to the host

    def _chunks(self, param: OptimizerParam) -> list[tuple[Tensor, Tensor, list[Tensor]]]:
        """Flat chunks of value and gradient, each with its states on the host."""
        assert param.grad is not None
        tensors = param.value, param.grad, *self._on_host(param)
        parts = zip(*(x.detach().reshape(-1).split(self.host.chunk_numel) for x in tensors), strict=True)
        return [(value, grad, list(states)) for value, grad, *states in parts]

    def _on_host(self, param: OptimizerParam) -> list[Tensor]:
        """The states of an offloaded parameter that are on the host: all but a weight that is its own master."""
        return [state for state in self._states(param) if state is not param.value]

    def _states(self, param: OptimizerParam) -> tuple[Tensor, Tensor, Tensor]:
        """The weight that is updated (the master or its remainder, if there is one) and both moments."""
        name = param.name
        weight = self.remainders[name] if name in self.remainders else self.master.get(name, param.value)
        return weight, self.exp_avg[name], self.exp_avg_sq[name]

    def _update_group(self, params: list[OptimizerParam], lr: float, decay: float) -> None:
        weights, exp_avg, exp_avg_sq = (list(tensors) for tensors in zip(*map(self._states, params), strict=True))
        grads = [param.grad for param in params if param.grad is not None]
        self._torch_fused_adamw(weights, grads, exp_avg, exp_avg_sq, lr, decay)
        for param, weight in zip(params, weights, strict=True):
            if weight is not param.value:
                param.value.copy_(weight)

    def _update_separate(self, params: list[tuple[Tensor, ...]], lr: float, decay: float) -> None:
        """Update parameters, each given as value, gradient and states: the large ones one by one, and where there are
        kernels all small ones with the same dtypes in one launch."""
        small: dict[tuple[object, ...], list[tuple[Tensor, ...]]] = defaultdict(list)
        has_kernels = self.uses_fused_kernel and not is_simulated()
        if has_kernels:
            from threefold.engine.kernels.loss_and_optimizer.adamw_triton import adamw_step_of_many
            from threefold.engine.kernels.loss_and_optimizer.many_tensors import can_go_together
        for tensors in params:
            if has_kernels and can_go_together(*tensors):
                small[(*(x.dtype for x in tensors), tensors[2] is tensors[0])].append(tensors)
            else:
                self._update_one(tensors[0], tensors[1], tensors[2:], lr, decay)
        for group in small.values():
            values, grads, weights, exp_avg, exp_avg_sq = zip(*group, strict=True)
            adamw_step_of_many(values, grads, weights, exp_avg, exp_avg_sq, **self._settings(values[0], lr, decay))

    def _update_one(self, value: Tensor, grad: Tensor, states: Sequence[Tensor], lr: float, decay: float) -> None:
        """Update one tensor. `states` are the weight that is updated and both moments. The weight may be `value` itself
        or an int16 remainder, which makes a master weight together with `value`."""
        if self.uses_fused_kernel:
            self._update_fused(value, grad, *states, lr=lr, decay=decay)
            return
        if states[0].dtype == torch.int16:
            master = join_master(value, states[0])
            self._update_one(value, grad, [master, *states[1:]], lr, decay)
            store_master(master, value, states[0])
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

        adamw_step(value, grad.contiguous(), weight, exp_avg, exp_avg_sq, **self._settings(value, lr, decay))

    def _settings(self, like: Tensor, lr: float, decay: float) -> dict[str, Any]:
        """Settings of the kernels."""
        factor = like.new_ones((), dtype=torch.float32) if self._factor is None else self._factor
        betas, eps, steps = self.betas, self.eps, self.steps
        return {"factor": factor, "lr": lr, "decay": decay, "betas": betas, "eps": eps, "steps": steps}

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
        refresh_master_weights(self.params, self.master, self.remainders)

    def states_in_memory(self) -> Iterator[tuple[str, Tensor]]:
        """All states by name, as they are kept, and the device memory through which those on the host pass."""
        kinds = {"master": self.master, "remainder": self.remainders, "first": self.exp_avg, "second": self.exp_avg_sq}
        yield from ((f"slot {n}", memory) for n, memory in enumerate(self.host.slot_memory))
        yield from ((f"{kind}.{name}", value) for kind, values in kinds.items() for name, value in values.items())

    def state_dict(self) -> dict[str, Any]:
        """Tensors by name, for a checkpoint. Offloaded states are the host tensors themselves.

        Master weights are whole, in fp32: those that are kept as remainders are made here, in host memory. Who fills
        them calls `load_split_masters` afterwards.
        """
        self.host.synchronize()
        state: dict[str, Any] = {"steps": torch.tensor(self.steps)}
        state |= split_masters("master", self.params, self.remainders)
        for kind, values in (("master", self.master), ("first", self.exp_avg), ("second", self.exp_avg_sq)):
            state |= {f"{kind}.{name}": value for name, value in values.items()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = int(state["steps"])
        self.host.synchronize()
        for kind, values in (("master", self.master), ("first", self.exp_avg), ("second", self.exp_avg_sq)):
            for name, value in values.items():
                value.copy_(state[f"{kind}.{name}"])
        self.load_split_masters(state)

    def load_split_masters(self, state: Mapping[str, Any]) -> None:
        """Split the master weights of a `state_dict` that are kept as remainders, and fill the parameters too."""
        store_split_masters("master", self.params, self.remainders, state)
