"""Which modules `fully_shard` takes as one unit, over which ranks and in which precision."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from threefold.engine.mesh import Group
from threefold.engine.shard.owned import Settings
from threefold.engine.ways import way


@dataclass(frozen=True)
class Shards:
    """The ranks that hold the same piece, three ways: they have one shard each, the same shard (HSDP), and the same
    shard outside of torch's reduction (`rest`: tp for norms, other pipeline ranks for tied embeddings)."""

    shards: Group
    copies: Group
    rest: Group


@dataclass(frozen=True)
class Wrapping:
    """What is gathered together: each of `blocks`, the experts inside on their own, then all else of a chunk.

    `methods` of a chunk, `block_methods` of a block and `experts_methods` of its experts, which are called instead of
    the forward, need the same care.
    """

    is_block: Callable[[nn.Module], bool]
    is_experts: Callable[[nn.Module], bool]
    methods: tuple[str, ...] = ()
    block_methods: tuple[str, ...] = ()
    experts_methods: tuple[str, ...] = ()


class Wrapper:
    def __init__(
        self,
        chosen: Mapping[nn.Parameter, Shards],
        device_mesh: Callable[..., DeviceMesh],
        settings: Settings,
        wrapping: Wrapping,
    ) -> None:
        self.chosen, self.settings, self.wrapping = chosen, settings, wrapping
        self._device_mesh = device_mesh
        self._meshes: dict[tuple[tuple[int, ...], ...], DeviceMesh] = {}

    def wrap(self, chunk: nn.Module) -> Iterator[FSDPModule]:
        left = {p for p in chunk.parameters() if p in self.chosen}
        if not left:
            return
        for block in [module for module in chunk.modules() if self.wrapping.is_block(module)]:
            for module in [*filter(self.wrapping.is_experts, block.modules()), block]:
                mine = [p for p in module.parameters() if p in left]
                if mine:
                    yield self._unit(module, mine, reshard=True)
                    left.difference_update(mine)
            for experts in filter(self.wrapping.is_experts, block.modules()):
                _gather_for(experts, self.wrapping.experts_methods)
            _gather_for(block, self.wrapping.block_methods)
        # The root, even where nothing is left for it, holds the others together. It is used first and last in a
        # forward and first in the backward, so it stays gathered between them.
        yield self._unit(chunk, [p for p in chunk.parameters() if p in left], reshard=False)
        _gather_for(chunk, self.wrapping.methods)

    def _unit(self, module: nn.Module, mine: Sequence[nn.Parameter], reshard: bool) -> FSDPModule:
        groups = self.chosen[mine[0]] if mine else next(iter(self.chosen.values()))
        dtype = mine[0].dtype if mine else torch.float32
        assert all(self.chosen[p].shards.ranks == groups.shards.ranks and p.dtype == dtype for p in mine)
        for p in mine:
            p.data = p.data.to(torch.promote_types(dtype, torch.float32))
        made = fully_shard(
            module,
            mesh=self._mesh(groups),
            reshard_after_forward=reshard,
            mp_policy=self._precision(dtype, way(mine[0].device) if mine else "cpu"),
            ignored_params=set(module.parameters()).difference(mine),
        )
        made.set_gradient_divide_factor(1.0)
        made.set_force_sum_reduction_for_comms(True)
        if hasattr(made, "set_reduce_scatter_unused_params"):  # torch 2.11 has none
            made.set_reduce_scatter_unused_params(True, recurse=False)
        return made

    def _mesh(self, groups: Shards) -> DeviceMesh:
        key = groups.copies.ranks, groups.shards.ranks
        if key not in self._meshes:
            both = (groups.shards,) if groups.copies.alone else (groups.copies, groups.shards)
            self._meshes[key] = self._device_mesh(*both)
        return self._meshes[key]

    def _precision(self, dtype: torch.dtype, device: str) -> MixedPrecisionPolicy:
        """Inputs are left alone: routing weights and positions are fp32 on purpose."""
        # gloo adds narrow numbers narrowly.
        reduce = torch.float32 if device == "cpu" else self.settings.grad_dtype
        return MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.promote_types(dtype, reduce), cast_forward_inputs=False
        )


def _gather_for(unit: nn.Module, methods: Sequence[str]) -> None:
    """Parameters of the unit are whole inside these methods, as they are inside its forward."""
    for method in methods:
        register_fsdp_forward_method(unit, method)
