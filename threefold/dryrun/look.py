"""What a real rank holds at its peak: its tensors by term, and what the allocator gave beside them.

The rehearsal's own tracker, on real tensors: what it sees can be laid beside what a rehearsal saw, and what only the
allocator knows of is told by the operator that asked for it.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from threefold.dryrun.rank import GRANULE
from threefold.dryrun.real import real_rank, real_step
from threefold.dryrun.terms import by_term, expert_paths, label_gradients, label_narrow, label_states
from threefold.dryrun.tracker import Tracker
from threefold.dryrun.where import Where
from threefold.engine.build import Parts
from threefold.plan.plan import Plan

_SHOWN = 12


@dataclass(frozen=True)
class Look:
    """`peak_bytes` is the allocator's, of a step that nobody watched. `watched_bytes`, of the next, is `terms` with
    `working_bytes` (beside its results, of the operator at the peak) and `other_bytes` (rounding, libraries)."""

    peak_bytes: int
    reserved_bytes: int
    watched_bytes: int
    at: str
    terms: dict[str, int]
    top: tuple[tuple[int, str], ...]
    working_bytes: int
    other_bytes: int
    beside: dict[str, int]  # by operator, the most that it took beside its results

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass
class Allocator:
    """Runs operators, and asks the device's allocator what each took."""

    device: torch.device
    before: int  # bytes that others hold
    beside: dict[str, int] = field(default_factory=dict)
    peak: int = 0
    after: int = 0
    highest: int = 0
    at_highest: tuple[int, int, int, str] = (0, 0, 0, "")  # changes, tensors, bytes behind the operator, where

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        torch.cuda.reset_peak_memory_stats(self.device)
        out = func(*args, **kwargs)
        told = torch.cuda.memory.memory_stats_as_nested_dict(self.device)["allocated_bytes"]["all"]
        self.peak, self.after = told["peak"] - self.before, told["current"] - self.before
        return out

    def watch(self, tracker: Tracker) -> Callable[[Any, tuple[Any, ...]], None]:
        def watcher(func: Any, args: tuple[Any, ...]) -> None:
            name = str(func)
            self.beside[name] = max(self.beside.get(name, 0), self.peak - self.after)
            if self.peak > self.highest:
                self.highest = self.peak
                self.at_highest = len(tracker.changes), tracker.now, self.after, f"{tracker.where()}, {name}"

        return watcher

    def begin(self) -> None:
        self.beside, self.highest = {}, 0


def look(plan: Plan, rank: int, device: torch.device) -> Look:
    torch.cuda.init()  # the allocator can be asked only then
    before = torch.cuda.memory_allocated(device)
    where, allocator = Where(), Allocator(device, before)
    tracker = Tracker(where, GRANULE, run=allocator, ignored="cpu")
    tracker.watchers.append(allocator.watch(tracker))
    with ExitStack() as stack:
        with tracker:
            parts, small = stack.enter_context(real_rank(plan, rank, device))
        real_step(parts, small, plan)  # to warm up: kernels are made, libraries take their memory
        torch.cuda.reset_peak_memory_stats(device)
        real_step(parts, small, plan)
        peak = torch.cuda.max_memory_allocated(device) - before
        reserved = torch.cuda.max_memory_reserved(device) - before
        with tracker, where.watching():
            where.name(parts.chunks)
            label_states(tracker, parts)
            tracker.begin()
            allocator.begin()
            real_step(parts, small, plan, where)
            label_gradients(tracker, parts)
            label_narrow(tracker, parts)
        return _told(parts, tracker, allocator, peak, reserved)


def _told(parts: Parts, tracker: Tracker, allocator: Allocator, peak: int, reserved: int) -> Look:
    tracker.peak_at, tensors, behind, at = allocator.at_highest
    blocks, experts = list(tracker.at_peak()), expert_paths(parts.chunks.values())
    loss = any(chunk.has_loss for chunk in parts.chunks.values())
    largest = sorted(blocks, key=lambda pair: -pair[1])[:_SHOWN]
    return Look(
        peak_bytes=peak,
        reserved_bytes=reserved,
        watched_bytes=allocator.highest,
        at=at,
        terms=by_term(blocks, experts, loss),
        top=tuple((size, f"{block.dtype} {list(block.shape)} {block.name or block.spot}") for block, size in largest),
        working_bytes=allocator.highest - behind,
        other_bytes=behind - tensors,
        beside=dict(sorted(allocator.beside.items(), key=lambda row: -row[1])[:_SHOWN]),
    )
