"""FSDP units: which modules `fully_shard` gathers together, over which ranks and in which precision.

`Fsdp` in `fsdp.py` wraps the model's chunks with these.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from threefold.engine.data_parallel.owned_shards import DataParallelSettings
from threefold.engine.device import device_type
from threefold.engine.dist.mesh import Group


@dataclass(frozen=True)
class ShardGroups:
    """Three groups that together are all ranks with the same tensor-parallel shard of a parameter."""

    shards: Group  # each rank keeps another FSDP shard
    replicas: Group  # the same FSDP shard, reduced by torch (HSDP)
    rest: Group  # the same FSDP shard, reduced by `Fsdp`: tp for norms, other pipeline ranks for tied embeddings


@dataclass(frozen=True)
class WrapPolicy:
    """The units that are gathered together: each block, experts inside a block on their own, then the rest of a chunk.

    The methods are those that are called in place of a module's forward and need gathered weights too.
    """

    is_block: Callable[[nn.Module], bool]
    is_experts: Callable[[nn.Module], bool]
    methods: tuple[str, ...] = ()  # of a chunk
    block_methods: tuple[str, ...] = ()
    experts_methods: tuple[str, ...] = ()


class FsdpWrapper:
    """Applies `fully_shard` to the units of a model."""

    def __init__(
        self,
        groups_of: Mapping[nn.Parameter, ShardGroups],
        device_mesh: Callable[..., DeviceMesh],
        settings: DataParallelSettings,
        policy: WrapPolicy,
    ) -> None:
        self.groups_of, self.settings, self.policy = groups_of, settings, policy
        self._device_mesh = device_mesh
        self._meshes: dict[tuple[tuple[int, ...], ...], DeviceMesh] = {}

    def wrap(self, chunk: nn.Module) -> Iterator[FSDPModule]:
        """Wrap the units of a chunk, the chunk itself last, and yield them."""
        remaining = {p for p in chunk.parameters() if p in self.groups_of}
        if not remaining:
            return
        for block in [module for module in chunk.modules() if self.policy.is_block(module)]:
            for module in [*filter(self.policy.is_experts, block.modules()), block]:
                params = [p for p in module.parameters() if p in remaining]
                if params:
                    yield self._unit(module, params, reshard=True)
                    remaining.difference_update(params)
            for experts in filter(self.policy.is_experts, block.modules()):
                _gather_in_methods(experts, self.policy.experts_methods)
            _gather_in_methods(block, self.policy.block_methods)
        # FSDP needs a root, even one without parameters. The root's weights are used first and last in a forward and
        # first in the backward, so they stay gathered between them.
        yield self._unit(chunk, [p for p in chunk.parameters() if p in remaining], reshard=False)
        _gather_in_methods(chunk, self.policy.methods)

    def _unit(self, module: nn.Module, params: Sequence[nn.Parameter], reshard: bool) -> FSDPModule:
        groups = self.groups_of[params[0]] if params else next(iter(self.groups_of.values()))
        dtype = params[0].dtype if params else torch.float32
        assert all(self.groups_of[p].shards.ranks == groups.shards.ranks and p.dtype == dtype for p in params)
        for p in params:
            if p.requires_grad:  # a frozen weight needs no master weight
                p.data = p.data.to(torch.promote_types(dtype, torch.float32))
        unit = fully_shard(
            module,
            mesh=self._mesh(groups),
            reshard_after_forward=reshard,
            mp_policy=self._precision(dtype, device_type(params[0].device) if params else "cpu"),
            ignored_params=set(module.parameters()).difference(params),
        )
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        if hasattr(unit, "set_reduce_scatter_unused_params"):  # torch 2.11 does not have it
            unit.set_reduce_scatter_unused_params(True, recurse=False)
        return unit

    def _mesh(self, groups: ShardGroups) -> DeviceMesh:
        key = groups.replicas.ranks, groups.shards.ranks
        if key not in self._meshes:
            dims = (groups.shards,) if groups.replicas.is_trivial else (groups.replicas, groups.shards)
            self._meshes[key] = self._device_mesh(*dims)
        return self._meshes[key]

    def _precision(self, dtype: torch.dtype, device: str) -> MixedPrecisionPolicy:
        """Inputs are not cast: routing weights and positions are fp32 on purpose."""
        # gloo would add bf16 numbers in bf16.
        reduce = torch.float32 if device == "cpu" else self.settings.grad_dtype
        return MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.promote_types(dtype, reduce), cast_forward_inputs=False
        )


def _gather_in_methods(unit: nn.Module, methods: Sequence[str]) -> None:
    """Gather the parameters of the unit in these of its methods too, as in its forward."""
    for method in methods:
        if hasattr(unit, method):
            register_fsdp_forward_method(unit, method)
