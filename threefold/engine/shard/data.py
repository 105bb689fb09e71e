"""ZeRO-1: copies share the work of reducing gradients and updating weights; each keeps the state of its own part.

Gradients are summed, never averaged. Collectives start in one order on all ranks, whatever gradients came: a rank where
a parameter got none sends zeros.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from weakref import ref

import torch
from torch import Tensor, nn

from threefold.engine.mesh import Group
from threefold.engine.products import own_linears
from threefold.engine.shard.buckets import Bucket, Slot, fill_buckets
from threefold.engine.shard.first_use import when_used
from threefold.engine.shard.owned import Owned, Settings, own, sum_of_squares, zero_of
from threefold.engine.shard.placement import Placement
from threefold.engine.sinks import give_sink


class Zero1:
    def __init__(
        self,
        chunks: Sequence[nn.Module],
        placements: Mapping[str, Placement],
        copies_group: Callable[[Placement], Group],
        settings: Settings,
        left_out: Iterable[nn.Parameter] = (),
    ) -> None:
        self.settings = settings
        self.uses: dict[str, int] = {}  # gradients of a parameter in one pass, where there are several
        slots = collect_slots(chunks, placements, left_out)
        self.zero = zero_of((slot.parameter for slot in slots), settings.device)
        alone = [slot for slot in slots if self._needs_nothing(slot, copies_group)]
        self.alone = {slot.name: own_whole(slot) for slot in alone}
        early, late = fill_buckets(
            [slot for slot in slots if slot.name not in self.alone], copies_group, settings.bucket_elements
        )
        self.buckets = [
            Bucket(group, row, self._grad_dtype(row[0].parameter)) for group, row in (*early, *late)
        ]  # in the order of their collectives
        self._num_early, self._next = len(early), 0
        self._on_the_way: set[Bucket] = set()
        self.owned: list[Owned] = [*(one for bucket in self.buckets for one in bucket.owned), *self.alone.values()]
        self.updated = self.owned
        self._nodes: list[object] = []  # of autograd, whose hooks live as long as they do
        for bucket in self.buckets:
            for slot in bucket.slots:
                if settings.fusion and bucket.grads.dtype != bucket.dtype:
                    arrived = self._on_gradient(bucket, slot)
                    self._nodes.append(give_sink(slot.parameter, bucket.views[slot.name], arrived))
                elif settings.reduce_overlap or bucket.grads.dtype != bucket.dtype:
                    slot.parameter.register_post_accumulate_grad_hook(self._on_gradient(bucket, slot))
        for chunk in chunks:
            own_linears(chunk)
        if settings.gather_overlap:
            homes = {slot.parameter: bucket for bucket in self.buckets for slot in bucket.slots}
            for chunk in chunks:
                when_used(chunk, homes, self._wait_for)

    def _grad_dtype(self, parameter: Tensor) -> torch.dtype:
        """Never narrower than the parameter."""
        return torch.promote_types(parameter.dtype, self.settings.grad_dtype)

    def _needs_nothing(self, slot: Slot, copies_group: Callable[[Placement], Group]) -> bool:
        return copies_group(slot.placement).alone and self._grad_dtype(slot.parameter) == slot.parameter.dtype

    def begin(self, passes: int | Mapping[int, int]) -> None:
        """Gradients to zero. `passes` backward passes will come, through each chunk by its place in the list."""

        def passes_of(slot: Slot) -> int:
            times = sum(passes if isinstance(passes, int) else passes[chunk] for chunk in slot.chunks)
            return times * self.uses.get(slot.name, 1)

        self._next = 0
        for bucket in self.buckets:
            bucket.begin(passes_of)
        for owned in self.alone.values():
            owned.grad = owned.piece.grad = None

    def _on_gradient(self, bucket: Bucket, slot: Slot) -> Callable[[Tensor], None]:
        # Weak: the parameter holds its hook, and Python's collector does not see that ring.
        owner, weak_bucket, weak_slot = ref(self), ref(bucket), ref(slot)

        def arrived(parameter: Tensor) -> None:
            zero1, bucket, slot = owner(), weak_bucket(), weak_slot()
            if zero1 is None or bucket is None or slot is None:
                return
            bucket.expect_more(slot)
            bucket.take(slot)
            slot.passes_left -= 1
            if slot.passes_left == 0:
                bucket.passes_left -= 1
                if zero1.settings.reduce_overlap and bucket.passes_left == 0:
                    zero1._start_ready()

        return arrived

    def _start_ready(self) -> None:
        while self._next < self._num_early and self.buckets[self._next].passes_left == 0:
            self.buckets[self._next].start_reduce()
            self._next += 1

    @torch.no_grad()
    def finish(self) -> None:
        """Every reduction started and waited for: gradients of owned elements are complete."""
        self.wait_gathered()
        for bucket in self.buckets:
            for slot in bucket.slots:
                bucket.take(slot)
        for bucket in self.buckets[self._next :]:
            bucket.start_reduce()
        self._next = len(self.buckets)
        for bucket in self.buckets:
            assert bucket.reducing is not None
            bucket.reducing.wait()
        for owned in self.alone.values():
            grad = owned.piece.grad
            owned.grad = None if grad is None else grad.reshape(-1)

    def _grads(self) -> list[Tensor]:
        alone = [owned.grad for owned in self.alone.values() if owned.grad is not None]
        return [*(bucket.own_part(bucket.grads) for bucket in self.buckets), *alone]

    @torch.no_grad()
    def squares(self) -> Tensor:
        """Of the gradients this rank owns. Over all ranks they add up to the square of the norm."""
        return sum_of_squares(self._grads(), self.zero)

    @torch.no_grad()
    def scale(self, factor: Tensor) -> None:
        if grads := self._grads():
            torch._foreach_mul_(grads, factor.to(self.zero))

    @torch.no_grad()
    def gather(self) -> None:
        """Bring updated parameters to all copies, those that are used first at the front."""
        for bucket in reversed(self.buckets):
            bucket.start_gather()
        self._on_the_way = set(self.buckets)
        if not self.settings.gather_overlap:
            self.wait_gathered()

    def wait_gathered(self) -> None:
        self._wait_for(self.buckets)

    def _wait_for(self, buckets: Sequence[Bucket]) -> None:
        if self._on_the_way:
            for bucket in buckets:
                bucket.wait_gathered()
            self._on_the_way.difference_update(buckets)

    def held(self) -> Iterator[tuple[str, Placement, Tensor, int | None]]:
        """All this rank must fill to load weights: name, placement, memory, and where flat memory begins."""
        for slot in (slot for bucket in self.buckets for slot in bucket.slots):
            yield slot.name, slot.placement, slot.parameter, None
        for owned in self.alone.values():
            yield owned.name, owned.placement, owned.piece, None

    def piece(self, name: str, parameter: Tensor) -> Tensor:
        return parameter

    def pieces(self, names: Sequence[str], part_of: Callable[[Owned], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Pieces of `names` from what ranks say of the elements they own; all ranks of the group must ask alike."""
        wanted = set(names)
        for bucket in self.buckets:
            if wanted.isdisjoint(slot.name for slot in bucket.slots):
                continue
            parts = {owned.name: part_of(owned) for owned in bucket.owned if owned.name in wanted}
            for name, piece in bucket.gathered(parts):
                if name in wanted:
                    yield name, piece
        for name, owned in self.alone.items():
            if name in wanted:
                yield name, part_of(owned).view(owned.piece.shape)


def collect_slots(
    chunks: Sequence[nn.Module], placements: Mapping[str, Placement], left_out: Iterable[nn.Parameter] = ()
) -> list[Slot]:
    """Parameters that train, in the order of registration; one that several chunks use is there once."""
    found: dict[nn.Parameter, Slot] = {}
    out = set(left_out)
    for number, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            if parameter in found:
                found[parameter].chunks += (number,)
            elif parameter.requires_grad and parameter not in out:
                found[parameter] = Slot(name, parameter, placements[name], (number,))
    return list(found.values())


def own_whole(slot: Slot) -> Owned:
    p = slot.parameter
    return own(slot.name, p, slot.placement, 0, p.detach().view(-1), None, p.dtype)
