"""Buckets: parameters and gradients of several tensors in flat buffers, with one collective for each buffer.

ZeRO-1 makes them. A bucket belongs to one group of ranks that hold the same parameters, in one order; each rank owns an
equal, contiguous part of it. Gradients arrive from the last layer to the first, so buckets are filled in that order.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from threefold.engine.data_parallel.protocol import OwnedShard, make_owned_shard
from threefold.engine.dist.collectives import PendingCollective, all_gather, reduce_scatter
from threefold.engine.dist.mesh import Group
from threefold.engine.dist.shard_placement import Placement

ALIGN = 64  # elements: a view of any dtype starts at 64 bytes or a multiple, as kernels want


@dataclass(eq=False)
class ParameterEntry:
    """A parameter on this rank."""

    name: str
    parameter: nn.Parameter
    placement: Placement
    chunks: tuple[int, ...]  # indices of the pipeline chunks on this rank that use it
    passes_left: int = 0  # gradients that are still to come in this step


class Bucket:
    """Flat buffers of parameters and gradients, padded with zeros to whole shards."""

    def __init__(self, group: Group, entries: Sequence[ParameterEntry], grad_dtype: torch.dtype) -> None:
        self.group, self.entries = group, list(entries)
        first = entries[0].parameter
        self.dtype, self.device = first.dtype, first.device
        self.offsets = _offsets(self.entries)
        step = ALIGN * group.size
        total = -(-self.offsets[-1] // step) * step
        self.shard_numel = total // group.size
        self.grads = torch.zeros(total, dtype=grad_dtype, device=self.device)
        self.params = None if group.is_trivial else self._flatten_parameters(total)  # flat; parameters are views of it
        self.grad_views = {entry.name: self._view(self.grads, n) for n, entry in enumerate(self.entries)}
        self.owned = list(self._owned_shards())
        self.num_incomplete = 0  # entries with gradients still to come
        self.reducing: PendingCollective | None = None
        self.gathering: PendingCollective | None = None

    def _flatten_parameters(self, total: int) -> Tensor:
        """Copy the parameters into one flat buffer and make each of them a view of it."""
        flat = torch.zeros(total, dtype=self.dtype, device=self.device)
        for n, entry in enumerate(self.entries):
            view = self._view(flat, n)
            view.copy_(entry.parameter.detach())
            entry.parameter.data = view
        return flat

    def _view(self, flat: Tensor, n: int) -> Tensor:
        parameter = self.entries[n].parameter
        return flat[self.offsets[n] : self.offsets[n] + parameter.numel()].view(parameter.shape)

    def local_shard(self, flat: Tensor) -> Tensor:
        """The part of a flat buffer that this rank owns."""
        return flat[self.shard_numel * self.group.rank : self.shard_numel * (self.group.rank + 1)]

    def _owned_shards(self) -> Iterator[OwnedShard]:
        low, high = self.shard_numel * self.group.rank, self.shard_numel * (self.group.rank + 1)
        for offset, entry in zip(self.offsets, self.entries, strict=False):
            parameter = entry.parameter
            start, stop = max(low - offset, 0), min(high - offset, parameter.numel())
            if start < stop:
                value = parameter.detach().view(-1)[start:stop]
                grad = self.grads[offset + start : offset + stop]
                yield make_owned_shard(entry.name, parameter, entry.placement, start, value, grad, self.dtype)

    def begin_step(self, passes: Callable[[ParameterEntry], int]) -> None:
        """Note how many gradients each entry waits for. The caller sets them to zero, before or later."""
        self.reducing = None
        for entry in self.entries:
            entry.passes_left = passes(entry)
            entry.parameter.grad = self.grad_views[entry.name] if self.grads.dtype == self.dtype else None
        self.num_incomplete = sum(entry.passes_left > 0 for entry in self.entries)

    def accumulate(self, entry: ParameterEntry) -> None:
        """Add the gradient that autograd, or code that bypasses it, left in `.grad`."""
        grad, view = entry.parameter.grad, self.grad_views[entry.name]
        if grad is None or grad is view:
            return
        self.check_not_reduced(entry)
        view.add_(grad)
        entry.parameter.grad = view if grad.dtype == view.dtype else None

    def check_not_reduced(self, entry: ParameterEntry) -> None:
        """Raise where a gradient comes too late to be part of the sum."""
        if self.reducing is not None:
            raise RuntimeError(
                f"{entry.name}: a gradient came after its reduction had begun; begin_step() counted fewer"
            )

    def start_reduce(self) -> None:
        if self.group.is_trivial:
            self.reducing = PendingCollective.completed()
        else:
            self.reducing = reduce_scatter(self.local_shard(self.grads), self.grads, self.group)

    def start_gather(self) -> None:
        if self.params is not None:
            self.gathering = all_gather(self.params, self.local_shard(self.params), self.group)

    def wait_for_gather(self) -> None:
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def gather_parameters(self, shards: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """All-gather flat values (fp32 at least) of the elements each rank owns; yields them by name, unflattened."""
        mine = torch.zeros(self.shard_numel, dtype=torch.promote_types(self.dtype, torch.float32), device=self.device)
        low = self.shard_numel * self.group.rank
        offsets = dict(zip((entry.name for entry in self.entries), self.offsets, strict=False))
        for owned in self.owned:
            if owned.name in shards:
                at = offsets[owned.name] + owned.start - low
                mine[at : at + owned.stop - owned.start] = shards[owned.name]
        flat = mine.new_empty(self.shard_numel * self.group.size)
        all_gather(flat, mine, self.group).wait()
        return ((entry.name, self._view(flat, n)) for n, entry in enumerate(self.entries))


def _offsets(entries: Sequence[ParameterEntry]) -> list[int]:
    """The offset of each entry in the flat buffer, and the end of the last one."""
    offsets = [0]
    for entry in entries:
        offsets.append(-(-(offsets[-1] + entry.parameter.numel()) // ALIGN) * ALIGN)
    return offsets


def fill_buckets(
    entries: Sequence[ParameterEntry], replica_group: Callable[[Placement], Group], bucket_elements: int
) -> tuple[list[tuple[Group, list[ParameterEntry]]], list[tuple[Group, list[ParameterEntry]]]]:
    """Group entries into buckets; returns buckets in the order in which their gradients are complete, and late ones.

    Ranks of a group see the same parameters in the same order, so they make the same buckets. Other pipeline ranks do
    not: a parameter shared with them has a bucket of its own among the late ones, which are ordered by name and reduced
    after all others.
    """
    filled: list[tuple[int, Group, list[ParameterEntry]]] = []
    late: list[tuple[Group, list[ParameterEntry]]] = []
    filling: dict[object, list[ParameterEntry]] = {}
    groups: dict[object, Group] = {}
    for index, entry in enumerate(reversed(entries)):
        group = replica_group(entry.placement)
        if entry.placement.also_on_pp_ranks:
            late.append((group, [entry]))
            continue
        # Experts never share a bucket with dense parameters, even with the same replicas: traffic is counted by axis.
        key = group.ranks, "edp" in entry.placement.replica_axes, entry.parameter.dtype
        groups[key] = min(groups.get(key, group), group, key=lambda one: len(one.name))
        row = filling.setdefault(key, [])
        row.append(entry)
        if sum(entry.parameter.numel() for entry in row) >= bucket_elements:
            filled.append((index, groups[key], filling.pop(key)))
    index_of = {entry.name: index for index, entry in enumerate(reversed(entries))}
    filled += [(index_of[row[-1].name], groups[key], row) for key, row in filling.items()]
    in_order = sorted(filled, key=lambda row: row[0])
    return [row[1:] for row in in_order], sorted(late, key=lambda row: row[1][0].name)
