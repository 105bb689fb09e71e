"""Fully sharded data parallelism by torch's `fully_shard`: weights are sharded too, and gathered for use.

`FsdpWrapper` says which modules `fully_shard` gathers together, over which ranks and in which precision; `Fsdp` wraps
the model's chunks with these. Dense parameters are sharded over one group, experts over another; with HSDP each group
is replicas x shards. Weights are kept in fp32 where the model computes in sixteen bits, so that they are their own
master weights; frozen ones stay in sixteen bits. Gradients are reduced every microbatch: full gradients are never kept.
Parameters that several chunks use, or that only one rank holds, are left to ZeRO-1 (`others`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from threefold.engine.data_parallel.protocol import (
    DataParallelSettings,
    LocalTensor,
    OwnedShard,
    make_owned_shard,
    norm_zero,
    sum_of_squares,
)
from threefold.engine.data_parallel.zero1 import Zero1, add_rows, collect_entries
from threefold.engine.device import device_type
from threefold.engine.dist.collectives import all_gather, all_reduce
from threefold.engine.dist.mesh import Group
from threefold.engine.dist.shard_placement import Placement, even_range
from threefold.engine.optim.pending_updates import PendingUpdates


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


@dataclass(eq=False)
class FsdpShard:
    """The FSDP shard of a parameter on this rank, whether or not this rank owns it."""

    owned: OwnedShard
    parameter: DTensor
    groups: ShardGroups


class Fsdp:
    """Sharded weights, gradients and optimizer states; `engine/data_parallel/protocol.py` explains the methods."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        placements: Mapping[str, Placement],
        shards_of: Callable[[Placement], ShardGroups],
        replica_group: Callable[[Placement], Group],
        device_mesh: Callable[..., DeviceMesh],
        settings: DataParallelSettings,
        policy: WrapPolicy,
    ) -> None:
        frozen = collect_entries(chunks, placements, frozen=True)
        entries = [*collect_entries(chunks, placements), *frozen]
        self.frozen = frozenset(entry.name for entry in frozen)
        self.zero = norm_zero((entry.parameter for entry in entries), settings.device)
        # Whether several chunks use a parameter is asked of all pipeline ranks, because all its ranks must shard alike.
        sharded = [
            entry
            for entry in entries
            if not entry.placement.in_several_chunks and not shards_of(entry.placement).shards.is_trivial
        ]
        wrapper = FsdpWrapper(
            {entry.parameter: shards_of(entry.placement) for entry in sharded}, device_mesh, settings, policy
        )
        dtypes = {entry.name: entry.parameter.dtype for entry in sharded}
        self.modules = [module for chunk in chunks for module in wrapper.wrap(chunk)]
        parameters = {name: p for chunk in chunks for name, p in chunk.named_parameters() if name in dtypes}
        self.shards = [
            _make_shard(s.name, parameters[s.name], s.placement, dtypes[s.name], shards_of(s.placement))
            for s in sharded
        ]
        self.others = Zero1(chunks, placements, replica_group, settings, exclude=parameters.values())
        non_empty = [shard for shard in self.shards if shard.owned.value.numel()]
        mine = [shard for shard in non_empty if shard.groups.replicas.rank == 0 and shard.groups.rest.rank == 0]
        self.owned = [*(shard.owned for shard in mine), *self.others.owned]
        trained = [shard.owned for shard in non_empty if shard.owned.name not in self.frozen]
        self.updated = [*trained, *self.others.updated]

    def begin_step(self, passes: int | Mapping[int, int]) -> None:
        for shard in self.shards:
            shard.owned.grad = shard.parameter.grad = None
        self.others.begin_step(passes)

    def await_copies(self, names: Iterable[str]) -> None:
        mine = {shard.owned.name for shard in self.shards}
        self.others.await_copies(name for name in names if name not in mine)

    @torch.no_grad()
    def add_copies(self, name: str, rows: Sequence[int], grads: Tensor) -> None:
        """Add the gradients of copies to the local part of rows of the gradient of a parameter."""
        shard = next((shard for shard in self.shards if shard.owned.name == name), None)
        if shard is None:
            return self.others.add_copies(name, rows, grads)
        if not rows:
            return None
        grads = grads.to(shard.owned.value.dtype)
        for group in (shard.groups.shards, shard.groups.replicas):
            all_reduce(grads, group).wait()
        if shard.parameter.grad is None:
            shard.parameter.grad = torch.zeros_like(shard.parameter)
        local = cast(DTensor, shard.parameter.grad).to_local()
        first = shard.owned.start // local[:1].numel() if len(local) else 0
        here = [n for n, row in enumerate(rows) if first <= row < first + len(local)]
        return add_rows(local, [rows[n] - first for n in here], grads[here])

    @torch.no_grad()
    def finish_grad_sync(self) -> None:
        self.others.finish_grad_sync()
        parts: dict[tuple[int, ...], list[Tensor]] = {}
        groups = {}
        # By name, and groups by their ranks: pipeline ranks hold other parameters, in another order, next to a shared
        # one, and must still come to its sum in the same order.
        for shard in sorted(self.shards, key=lambda shard: shard.owned.name):
            grad, rest = shard.parameter.grad, shard.groups.rest
            if grad is not None:
                assert isinstance(grad, DTensor)
                shard.owned.grad = grad.to_local().reshape(-1)
            elif not rest.is_trivial and shard.owned.name not in self.frozen:
                shard.owned.grad = torch.zeros_like(shard.owned.value)
            if shard.owned.grad is not None and not rest.is_trivial:
                parts.setdefault(rest.ranks, []).append(shard.owned.grad)
                groups[rest.ranks] = rest
        for ranks, grads in sorted(parts.items(), key=lambda part: part[0]):
            flat = torch.cat(grads)
            all_reduce(flat, groups[ranks]).wait()
            torch._foreach_copy_(grads, list(flat.split([len(grad) for grad in grads])))

    @torch.no_grad()
    def grad_sum_of_squares(self) -> Tensor:
        """The sum of squares of the gradients this rank owns. Added over all ranks it is the square of the norm."""
        mine = self.owned[: len(self.owned) - len(self.others.owned)]
        squares = sum_of_squares([owned.grad for owned in mine if owned.grad is not None], self.zero)
        return squares + self.others.grad_sum_of_squares()

    @torch.no_grad()
    def scale_grads(self, factor: Tensor) -> None:
        if grads := [shard.owned.grad for shard in self.shards if shard.owned.grad is not None]:
            torch._foreach_mul_(grads, factor.to(self.zero))
        self.others.scale_grads(factor)

    def start_param_sync(self) -> None:
        """Free gathered weights, which an evaluation may have left and which are out of date; the forward gathers."""
        for module in self.modules:
            module.reshard()
        self.others.start_param_sync()

    def finish_param_sync(self) -> None:
        self.others.finish_param_sync()

    def defer_updates(self, updates: PendingUpdates) -> None:
        """Nothing is deferred: `fully_shard` gathers weights on a stream that knows nothing of the updates."""

    def local_tensors(self) -> Iterator[LocalTensor]:
        """All memory that this rank must fill to load weights."""
        for shard in self.shards:
            yield shard.owned.name, shard.owned.placement, shard.owned.value, shard.owned.start
        yield from self.others.local_tensors()

    def gather_shards(
        self, names: Sequence[str], values_of: Callable[[OwnedShard], Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Gather the values that each rank passes for its shards of `names`.

        All ranks of a group must call this with the same names.
        """
        wanted = set(names)
        for shard in self.shards:
            if shard.owned.name in wanted:
                yield shard.owned.name, _gather_shard(shard, values_of)
        yield from self.others.gather_shards(names, values_of)


def _make_shard(
    name: str, parameter: Tensor, placement: Placement, dtype: torch.dtype, groups: ShardGroups
) -> FsdpShard:
    """The local shard of a parameter that `fully_shard` has sharded by rows."""
    assert isinstance(parameter, DTensor)
    rows, *rest = placement.local_shape
    first_row, _ = even_range(rows, groups.shards.rank, groups.shards.size)
    local = parameter.to_local().detach()
    start = first_row * torch.Size(rest).numel()
    return FsdpShard(make_owned_shard(name, local, placement, start, local.view(-1), None, dtype), parameter, groups)


def _gather_shard(shard: FsdpShard, values_of: Callable[[OwnedShard], Tensor]) -> Tensor:
    """All-gather the values of one parameter; shards are padded to the same number of rows."""
    owned, group = shard.owned, shard.groups.shards
    rows, *rest = owned.placement.local_shape
    row = torch.Size(rest).numel()
    mine = owned.value.new_zeros(-(-rows // group.size) * row)
    if owned.value.numel():
        mine[: owned.value.numel()] = values_of(owned)
    flat = mine.new_empty(group.size * len(mine))
    all_gather(flat, mine, group).wait()
    return flat[: rows * row].view(owned.placement.local_shape)
