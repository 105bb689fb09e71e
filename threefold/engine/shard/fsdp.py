"""Fully sharded data parallelism, by torch's `fully_shard`: weights too are kept in parts and gathered for use.

Dense parameters are sharded over one group, experts over another; with HSDP each group is copies x shards. Weights are
kept in fp32 where the model computes in sixteen bits, so that they are their own master weights. Gradients are reduced
every microbatch: whole gradients are never kept. What `fully_shard` cannot hold, or what has nobody to share with, is
left to ZeRO-1.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from threefold.engine.mesh import Group
from threefold.engine.shard.collectives import all_gather, all_reduce
from threefold.engine.shard.data import Zero1, collect_slots
from threefold.engine.shard.owned import Owned, Settings, own, sum_of_squares, zero_of
from threefold.engine.shard.placement import Placement, even_part
from threefold.engine.shard.wrap import Shards, Wrapper, Wrapping


@dataclass(eq=False)
class Shard:
    """What of a parameter is kept here, whether or not this rank owns it."""

    owned: Owned
    parameter: DTensor
    groups: Shards


class Fsdp:
    def __init__(
        self,
        chunks: Sequence[nn.Module],
        placements: Mapping[str, Placement],
        shards_of: Callable[[Placement], Shards],
        copies_group: Callable[[Placement], Group],
        device_mesh: Callable[..., DeviceMesh],
        settings: Settings,
        wrapping: Wrapping,
    ) -> None:
        slots = collect_slots(chunks, placements)
        self.zero = zero_of((slot.parameter for slot in slots), settings.device)
        fits = [slot for slot in slots if len(slot.chunks) == 1 and not shards_of(slot.placement).shards.alone]
        wrapper = Wrapper({slot.parameter: shards_of(slot.placement) for slot in fits}, device_mesh, settings, wrapping)
        dtypes = {slot.name: slot.parameter.dtype for slot in fits}
        self.modules = [module for chunk in chunks for module in wrapper.wrap(chunk)]
        now = {name: p for chunk in chunks for name, p in chunk.named_parameters() if name in dtypes}
        self.shards = [_shard(s.name, now[s.name], s.placement, dtypes[s.name], shards_of(s.placement)) for s in fits]
        self.others = Zero1(chunks, placements, copies_group, settings, left_out=now.values())
        full = [shard for shard in self.shards if shard.owned.value.numel()]
        mine = [shard for shard in full if shard.groups.copies.rank == 0 and shard.groups.rest.rank == 0]
        self.owned = [*(shard.owned for shard in mine), *self.others.owned]
        self.updated = [*(shard.owned for shard in full), *self.others.updated]

    def begin(self, passes: int | Mapping[int, int]) -> None:
        for shard in self.shards:
            shard.owned.grad = shard.parameter.grad = None
        self.others.begin(passes)

    @torch.no_grad()
    def finish(self) -> None:
        self.others.finish()
        parts: dict[tuple[int, ...], list[Tensor]] = {}
        groups = {}
        for shard in self.shards:
            grad, rest = shard.parameter.grad, shard.groups.rest
            if grad is not None:
                assert isinstance(grad, DTensor)
                shard.owned.grad = grad.to_local().reshape(-1)
            elif not rest.alone:
                shard.owned.grad = torch.zeros_like(shard.owned.value)
            if shard.owned.grad is not None and not rest.alone:
                parts.setdefault(rest.ranks, []).append(shard.owned.grad)
                groups[rest.ranks] = rest
        for ranks, grads in parts.items():
            flat = torch.cat(grads)
            all_reduce(flat, groups[ranks]).wait()
            torch._foreach_copy_(grads, list(flat.split([len(grad) for grad in grads])))

    @torch.no_grad()
    def squares(self) -> Tensor:
        """Of the gradients this rank owns. Over all ranks they add up to the square of the norm."""
        mine = self.owned[: len(self.owned) - len(self.others.owned)]
        squares = sum_of_squares([owned.grad for owned in mine if owned.grad is not None], self.zero)
        return squares + self.others.squares()

    @torch.no_grad()
    def scale(self, factor: Tensor) -> None:
        if grads := [shard.owned.grad for shard in self.shards if shard.owned.grad is not None]:
            torch._foreach_mul_(grads, factor.to(self.zero))
        self.others.scale(factor)

    def gather(self) -> None:
        """The forward gathers. What an evaluation left gathered is out of date."""
        for module in self.modules:
            module.reshard()
        self.others.gather()

    def wait_gathered(self) -> None:
        self.others.wait_gathered()

    def held(self) -> Iterator[tuple[str, Placement, Tensor, int | None]]:
        """All this rank must fill to load weights: name, placement, memory, and where flat memory begins."""
        for shard in self.shards:
            yield shard.owned.name, shard.owned.placement, shard.owned.value, shard.owned.first
        yield from self.others.held()

    def piece(self, name: str, parameter: Tensor) -> Tensor:
        """All ranks that share it must ask."""
        return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter

    def pieces(self, names: Sequence[str], part_of: Callable[[Owned], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Pieces of `names` from what ranks say of the shards they keep; all ranks of the group must ask alike."""
        wanted = set(names)
        for shard in self.shards:
            if shard.owned.name in wanted:
                yield shard.owned.name, _gather_piece(shard, part_of)
        yield from self.others.pieces(names, part_of)


def _shard(name: str, parameter: Tensor, placement: Placement, dtype: torch.dtype, groups: Shards) -> Shard:
    assert isinstance(parameter, DTensor)
    rows, *rest = placement.local_shape
    first, _ = even_part(rows, groups.shards.rank, groups.shards.size)
    local = parameter.to_local().detach()
    row = torch.Size(rest).numel()
    return Shard(own(name, local, placement, first * row, local.view(-1), None, dtype), parameter, groups)


def _gather_piece(shard: Shard, part_of: Callable[[Owned], Tensor]) -> Tensor:
    owned, group = shard.owned, shard.groups.shards
    rows, *rest = owned.placement.local_shape
    row = torch.Size(rest).numel()
    mine = owned.value.new_zeros(-(-rows // group.size) * row)
    if owned.value.numel():
        mine[: owned.value.numel()] = part_of(owned)
    flat = mine.new_empty(group.size * len(mine))
    all_gather(flat, mine, group).wait()
    return flat[: rows * row].view(owned.placement.local_shape)
