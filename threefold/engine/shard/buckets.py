"""Parameters and gradients in flat buffers, one collective a buffer.

A bucket belongs to one group of ranks that hold the same pieces, in one order; each owns an equal, contiguous part.
Gradients arrive from the last layer to the first, so buckets are filled in that order.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from threefold.engine.mesh import Group
from threefold.engine.shard.collectives import Pending, all_gather, reduce_scatter
from threefold.engine.shard.owned import Owned, own
from threefold.engine.shard.placement import Placement

ALIGN = 64  # elements: a view of any dtype starts at 64 bytes or a multiple, as kernels want


@dataclass(eq=False)
class Slot:
    """A parameter that trains."""

    name: str
    parameter: nn.Parameter
    placement: Placement
    chunks: tuple[int, ...]  # on this rank that use it
    passes_left: int = 0


class Bucket:
    """`grads` and, unless the group is alone, `values` hold all slots; the rest is padding, and zero."""

    def __init__(self, group: Group, slots: Sequence[Slot], grad_dtype: torch.dtype) -> None:
        self.group, self.slots = group, list(slots)
        first = slots[0].parameter
        self.dtype, self.device = first.dtype, first.device
        self.starts = _starts(self.slots)
        step = ALIGN * group.size
        total = -(-self.starts[-1] // step) * step
        self.part = total // group.size
        self.grads = torch.zeros(total, dtype=grad_dtype, device=self.device)
        self.values = None if group.alone else self._flatten(total)
        self.views = {slot.name: self._view(self.grads, n) for n, slot in enumerate(self.slots)}
        self.owned = list(self._own())
        self.passes_left = 0
        self.reducing: Pending | None = None
        self.gathering: Pending | None = None

    def _flatten(self, total: int) -> Tensor:
        values = torch.zeros(total, dtype=self.dtype, device=self.device)
        for n, slot in enumerate(self.slots):
            view = self._view(values, n)
            view.copy_(slot.parameter.detach())
            slot.parameter.data = view
        return values

    def _view(self, flat: Tensor, n: int) -> Tensor:
        parameter = self.slots[n].parameter
        return flat[self.starts[n] : self.starts[n] + parameter.numel()].view(parameter.shape)

    def own_part(self, flat: Tensor) -> Tensor:
        return flat[self.part * self.group.rank : self.part * (self.group.rank + 1)]

    def _own(self) -> Iterator[Owned]:
        low, high = self.part * self.group.rank, self.part * (self.group.rank + 1)
        for start, slot in zip(self.starts, self.slots, strict=False):
            piece = slot.parameter
            first, after = max(low - start, 0), min(high - start, piece.numel())
            if first < after:
                value = piece.detach().view(-1)[first:after]
                grad = self.grads[start + first : start + after]
                yield own(slot.name, piece, slot.placement, first, value, grad, self.dtype)

    def begin(self, passes: Callable[[Slot], int]) -> None:
        self.grads.zero_()
        self.reducing = None
        for slot in self.slots:
            slot.passes_left = passes(slot)
            slot.parameter.grad = self.views[slot.name] if self.grads.dtype == self.dtype else None
        self.passes_left = sum(slot.passes_left > 0 for slot in self.slots)

    def take(self, slot: Slot) -> None:
        """What autograd, or someone who goes round it, left in `.grad`."""
        grad, view = slot.parameter.grad, self.views[slot.name]
        if grad is None or grad is view:
            return
        self.expect_more(slot)
        view.add_(grad)
        slot.parameter.grad = view if grad.dtype == view.dtype else None

    def expect_more(self, slot: Slot) -> None:
        if self.reducing is not None:
            raise RuntimeError(f"{slot.name}: a gradient came after its reduction had begun; begin() was told less")

    def start_reduce(self) -> None:
        if self.group.alone:
            self.reducing = Pending(None, None, [])
        else:
            self.reducing = reduce_scatter(self.own_part(self.grads), self.grads, self.group)

    def start_gather(self) -> None:
        if self.values is not None:
            self.gathering = all_gather(self.values, self.own_part(self.values), self.group)

    def wait_gathered(self) -> None:
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def gathered(self, parts: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Pieces, of flat tensors (fp32 at least) on the elements each rank owns."""
        mine = torch.zeros(self.part, dtype=torch.promote_types(self.dtype, torch.float32), device=self.device)
        low = self.part * self.group.rank
        starts = dict(zip((slot.name for slot in self.slots), self.starts, strict=False))
        for owned in self.owned:
            if owned.name in parts:
                at = starts[owned.name] + owned.first - low
                mine[at : at + owned.after - owned.first] = parts[owned.name]
        flat = mine.new_empty(self.part * self.group.size)
        all_gather(flat, mine, self.group).wait()
        return ((slot.name, self._view(flat, n)) for n, slot in enumerate(self.slots))


def _starts(slots: Sequence[Slot]) -> list[int]:
    """Where each begins, and where the last ends."""
    starts = [0]
    for slot in slots:
        starts.append(-(-(starts[-1] + slot.parameter.numel()) // ALIGN) * ALIGN)
    return starts


def fill_buckets(
    slots: Sequence[Slot], copies_group: Callable[[Placement], Group], bucket_elements: int
) -> tuple[list[tuple[Group, list[Slot]]], list[tuple[Group, list[Slot]]]]:
    """Buckets in the order in which their gradients are complete, and those shared with other pipeline ranks.

    Ranks of a group see the same parameters in the same order, so they make the same buckets. Other pipeline ranks
    do not: what is shared with them is ordered by name, and reduced when all else is done.
    """
    filled: list[tuple[int, Group, list[Slot]]] = []
    late: list[tuple[Group, list[Slot]]] = []
    filling: dict[object, list[Slot]] = {}
    groups: dict[object, Group] = {}
    for place, slot in enumerate(reversed(slots)):
        group = copies_group(slot.placement)
        if slot.placement.also_on:
            late.append((group, [slot]))
            continue
        # Experts apart from the rest, also where both have the same copies: their traffic is looked at by axis.
        key = group.ranks, "edp" in slot.placement.copies, slot.parameter.dtype
        groups[key] = min(groups.get(key, group), group, key=lambda one: len(one.name))
        row = filling.setdefault(key, [])
        row.append(slot)
        if sum(one.parameter.numel() for one in row) >= bucket_elements:
            filled.append((place, groups[key], filling.pop(key)))
    at = {slot.name: place for place, slot in enumerate(reversed(slots))}
    filled += [(at[row[-1].name], groups[key], row) for key, row in filling.items()]
    in_order = sorted(filled, key=lambda row: row[0])
    return [row[1:] for row in in_order], sorted(late, key=lambda row: row[1][0].name)
