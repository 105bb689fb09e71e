"""ZeRO-1: ranks that hold the same weights split the optimizer state.

Each rank reduces the gradients of its own part, updates that part, and gathers the updated weights of the others.
Gradients are summed, never averaged. Collectives start in the same order on all ranks; a parameter that got no gradient
on a rank is sent as zeros. `build.py` makes the `Zero1` of a rank.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from weakref import ref

import torch
from torch import Tensor, nn

from threefold.engine.autograd.linear import use_main_grad_linears
from threefold.engine.autograd.main_grad import attach_main_grad
from threefold.engine.data_parallel.buckets import Bucket, ParameterEntry, fill_buckets
from threefold.engine.data_parallel.protocol import (
    DataParallelSettings,
    LocalTensor,
    OwnedShard,
    make_owned_shard,
    norm_zero,
    sum_of_squares,
)
from threefold.engine.dist.mesh import Group
from threefold.engine.dist.shard_placement import Placement, even_range
from threefold.engine.optim.pending_updates import PendingUpdates, mark_pending, mark_ready, without_waiting


class Zero1:
    """Parameters in buckets, whose gradients are reduce-scattered and whose weights are all-gathered.

    A parameter that no other rank holds, and whose gradient needs no wider dtype, is in no bucket (`unbucketed`). Nor
    is a frozen one: the ranks that hold it own an even part of it each, for checkpoints.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        placements: Mapping[str, Placement],
        replica_group: Callable[[Placement], Group],
        settings: DataParallelSettings,
        exclude: Iterable[nn.Parameter] = (),
    ) -> None:
        self.settings = settings
        self.grads_per_pass: dict[str, int] = {}  # gradients that a parameter gets in one pass, if more than one
        self._await_copies: set[str] = set()  # parameters with copies whose gradients come last
        entries = collect_entries(chunks, placements, exclude)
        self.frozen_entries = collect_entries(chunks, placements, exclude, frozen=True)
        self.frozen = frozenset(entry.name for entry in self.frozen_entries)
        self.zero = norm_zero((entry.parameter for entry in (*entries, *self.frozen_entries)), settings.device)
        unbucketed = [entry for entry in entries if self._needs_no_bucket(entry, replica_group)]
        self.unbucketed = {entry.name: _owned_in_full(entry) for entry in unbucketed}
        early, late = fill_buckets(
            [entry for entry in entries if entry.name not in self.unbucketed], replica_group, settings.bucket_elements
        )
        self.buckets = [
            Bucket(group, row, self._grad_dtype(row[0].parameter)) for group, row in (*early, *late)
        ]  # in the order of their collectives
        self._num_early, self._next = len(early), 0
        self._gathering: set[Bucket] = set()
        self._updates: PendingUpdates | None = None  # those that may be pending when a step begins
        self._last_update: dict[Bucket, int] = {}  # the position of the last update of a bucket's elements
        self._to_zero: set[Bucket] = set()  # buckets whose gradients a pending update reads, to be set to zero then
        self.updated: list[OwnedShard] = self._in_order_of_use(entries)
        self.owned = [*self.updated, *_own_parts(self.frozen_entries, replica_group)]
        self._nodes: list[object] = []  # autograd nodes, kept alive because their hooks go with them
        for bucket in self.buckets:
            for entry in bucket.entries:
                if settings.grad_accumulation_fusion and bucket.grads.dtype != bucket.dtype:
                    on_gradient = self._on_gradient(bucket, entry)
                    self._nodes.append(attach_main_grad(entry.parameter, bucket.grad_views[entry.name], on_gradient))
                elif settings.overlap_grad_reduce or bucket.grads.dtype != bucket.dtype:
                    entry.parameter.register_post_accumulate_grad_hook(self._on_gradient(bucket, entry))
        for chunk in chunks:
            use_main_grad_linears(chunk)

    def _in_order_of_use(self, entries: Sequence[ParameterEntry]) -> list[OwnedShard]:
        """The shards that this rank updates: first those that are gathered, because calls of the next step wait for the
        gathers, then the rest in the order of registration. The elements of a bucket stay together."""
        index_of = {entry.name: n for n, entry in enumerate(entries)}
        groups = [
            (bucket.params is None, min(index_of[entry.name] for entry in bucket.entries), bucket.owned)
            for bucket in self.buckets
        ]
        groups += [(True, index_of[name], [owned]) for name, owned in self.unbucketed.items()]
        return [owned for *_, group in sorted(groups, key=lambda each: each[:2]) for owned in group]

    def defer_updates(self, updates: PendingUpdates) -> None:
        """Updates stay pending where weights may be gathered during the forward, and gathers start after them."""
        if not self.settings.overlap_param_gather:
            return
        self._updates = updates
        for bucket in self.buckets:
            self._last_update[bucket] = max((updates.positions[owned.name] for owned in bucket.owned), default=-1)
        # The parameters in buckets wait for gathers too: `start_param_sync`.
        unbucketed = {name: [owned.parameter, owned.value] for name, owned in self.unbucketed.items()}
        updates.defer({owned.name: [owned.value] for owned in self.updated} | unbucketed)

    def _grad_dtype(self, parameter: Tensor) -> torch.dtype:
        """The dtype of gradient sums: the plan's, or the parameter's own where that has more bits."""
        return torch.promote_types(parameter.dtype, self.settings.grad_dtype)

    def _needs_no_bucket(self, entry: ParameterEntry, replica_group: Callable[[Placement], Group]) -> bool:
        return replica_group(entry.placement).is_trivial and self._grad_dtype(entry.parameter) == entry.parameter.dtype

    def begin_step(self, passes: int | Mapping[int, int]) -> None:
        """Set gradients to zero. `passes` is the number of backward passes that follow, or that number by chunk."""

        def passes_of(entry: ParameterEntry) -> int:
            times = sum(passes if isinstance(passes, int) else passes[chunk] for chunk in entry.chunks)
            return times * self.grads_per_pass.get(entry.name, 1) + (entry.name in self._await_copies)

        self._next = 0
        for bucket in self.buckets:
            with without_waiting():
                bucket.begin_step(passes_of)
            if self._has_pending_update(bucket):
                self._to_zero.add(bucket)
            else:
                bucket.grads.zero_()
        with without_waiting():
            for owned in self.unbucketed.values():
                owned.grad = owned.parameter.grad = None

    def _on_gradient(self, bucket: Bucket, entry: ParameterEntry) -> Callable[[Tensor], None]:
        # Weak references: the parameter holds its hook, and Python's garbage collector cannot see that cycle.
        owner, weak_bucket, weak_entry = ref(self), ref(bucket), ref(entry)

        def on_gradient(parameter: Tensor) -> None:
            zero1, bucket, entry = owner(), weak_bucket(), weak_entry()
            if zero1 is None or bucket is None or entry is None:
                return
            zero1._count_gradient(bucket, entry)

        return on_gradient

    def _count_gradient(self, bucket: Bucket, entry: ParameterEntry) -> None:
        bucket.check_not_reduced(entry)
        bucket.accumulate(entry)
        entry.passes_left -= 1
        if entry.passes_left == 0:
            bucket.num_incomplete -= 1
            if self.settings.overlap_grad_reduce and bucket.num_incomplete == 0:
                self._start_ready()

    def await_copies(self, names: Iterable[str]) -> None:
        """Reduce these gradients only after `add_copies` was called for each, in every step."""
        self._await_copies.update(names)

    @torch.no_grad()
    def add_copies(self, name: str, rows: Sequence[int], grads: Tensor) -> None:
        """Add the gradients of copies to rows of the gradient of a parameter, one by one in this order."""
        if name in self.unbucketed:
            parameter = self.unbucketed[name].parameter
            if rows and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            add_rows(parameter.grad, rows, grads)
            return
        bucket, entry = next((b, e) for b in self.buckets for e in b.entries if e.name == name)
        self._wait_for([bucket])
        bucket.accumulate(entry)
        add_rows(bucket.grad_views[name], rows, grads)
        self._count_gradient(bucket, entry)

    def _start_ready(self) -> None:
        """Start the reductions whose gradients are complete, in the order that all ranks keep."""
        while self._next < self._num_early and self.buckets[self._next].num_incomplete == 0:
            self.buckets[self._next].start_reduce()
            self._next += 1

    @torch.no_grad()
    def finish_grad_sync(self) -> None:
        """Start what has not started and wait for all: then the gradients of owned elements are complete."""
        self.finish_param_sync()
        for bucket in self.buckets:
            for entry in bucket.entries:
                bucket.accumulate(entry)
        for bucket in self.buckets[self._next :]:
            bucket.start_reduce()
        self._next = len(self.buckets)
        for bucket in self.buckets:
            assert bucket.reducing is not None
            bucket.reducing.wait()
        for owned in self.unbucketed.values():
            grad = owned.parameter.grad
            owned.grad = None if grad is None else grad.reshape(-1)

    def _grads(self) -> list[Tensor]:
        unbucketed = [owned.grad for owned in self.unbucketed.values() if owned.grad is not None]
        return [*(bucket.local_shard(bucket.grads) for bucket in self.buckets), *unbucketed]

    @torch.no_grad()
    def grad_sum_of_squares(self) -> Tensor:
        """The sum of squares of the gradients this rank owns. Added over all ranks it is the square of the norm."""
        return sum_of_squares(self._grads(), self.zero)

    @torch.no_grad()
    def scale_grads(self, factor: Tensor) -> None:
        if grads := self._grads():
            torch._foreach_mul_(grads, factor.to(self.zero))

    @torch.no_grad()
    def start_param_sync(self) -> None:
        """Bring updated parameters to all replicas, beginning with the parameters that the forward uses first."""
        for bucket in reversed(self.buckets):
            with self._after_update(bucket):
                bucket.start_gather()
        self._gathering = set(self.buckets)
        if not self.settings.overlap_param_gather:
            self.finish_param_sync()
            return
        for bucket in self.buckets:
            if bucket.gathering is not None or self._has_pending_update(bucket):
                mark_pending((entry.parameter for entry in bucket.entries), partial(self._wait_for, [bucket]))

    def _has_pending_update(self, bucket: Bucket) -> bool:
        return self._updates is not None and self._updates.is_pending(self._last_update[bucket])

    def _after_update(self, bucket: Bucket) -> AbstractContextManager[object]:
        if self._updates is None or bucket.params is None:
            return nullcontext()
        return self._updates.after(self._last_update[bucket])

    def finish_param_sync(self) -> None:
        self._wait_for(self.buckets)
        if self._updates is not None:
            self._updates.wait()

    def _wait_for(self, buckets: Sequence[Bucket]) -> None:
        if self._updates is not None and (self._gathering or self._to_zero):
            for bucket in buckets:
                self._updates.wait_through(self._last_update[bucket])
            for bucket in self._to_zero.intersection(buckets):
                bucket.grads.zero_()
            self._to_zero.difference_update(buckets)
        if self._gathering:
            for bucket in buckets:
                bucket.wait_for_gather()
                mark_ready(entry.parameter for entry in bucket.entries)
            self._gathering.difference_update(buckets)

    def local_tensors(self) -> Iterator[LocalTensor]:
        """All memory that this rank must fill to load weights."""
        for entry in (entry for bucket in self.buckets for entry in bucket.entries):
            yield entry.name, entry.placement, entry.parameter, None
        for owned in self.unbucketed.values():
            yield owned.name, owned.placement, owned.parameter, None
        for entry in self.frozen_entries:
            yield entry.name, entry.placement, entry.parameter, None

    def gather_shards(
        self, names: Sequence[str], values_of: Callable[[OwnedShard], Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Gather the values that each rank passes for the elements it owns of `names`.

        All ranks of a group must call this with the same names.
        """
        wanted = set(names)
        for bucket in self.buckets:
            if wanted.isdisjoint(entry.name for entry in bucket.entries):
                continue
            values = {owned.name: values_of(owned) for owned in bucket.owned if owned.name in wanted}
            for name, value in bucket.gather_parameters(values):
                if name in wanted:
                    yield name, value
        for name, owned in self.unbucketed.items():
            if name in wanted:
                yield name, values_of(owned).view(owned.parameter.shape)


def add_rows(total: Tensor | None, rows: Sequence[int], grads: Tensor) -> None:
    """Add gradients to rows of a sum. One by one: a device would add several to one row in no fixed order."""
    for row, grad in zip(rows, grads, strict=True):
        assert total is not None
        total[row] += grad


def collect_entries(
    chunks: Sequence[nn.Module],
    placements: Mapping[str, Placement],
    exclude: Iterable[nn.Parameter] = (),
    frozen: bool = False,
) -> list[ParameterEntry]:
    """Parameters that train, or those that are frozen, in the order of registration. A parameter that several chunks
    use is listed once."""
    entries: dict[nn.Parameter, ParameterEntry] = {}
    excluded = set(exclude)
    for number, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            if parameter in entries:
                entries[parameter].chunks += (number,)
            elif parameter.requires_grad != frozen and parameter not in excluded:
                entries[parameter] = ParameterEntry(name, parameter, placements[name], (number,))
    return list(entries.values())


def _own_parts(entries: Iterable[ParameterEntry], replica_group: Callable[[Placement], Group]) -> Iterator[OwnedShard]:
    """The part of each frozen parameter that this rank owns: an even part among the ranks that hold the same shard."""
    for entry in entries:
        group, p = replica_group(entry.placement), entry.parameter
        start, stop = even_range(p.numel(), group.rank, group.size)
        if start < stop:
            value = p.detach().view(-1)[start:stop]
            yield make_owned_shard(entry.name, p, entry.placement, start, value, None, p.dtype)


def _owned_in_full(entry: ParameterEntry) -> OwnedShard:
    p = entry.parameter
    return make_owned_shard(entry.name, p, entry.placement, 0, p.detach().view(-1), None, p.dtype)
