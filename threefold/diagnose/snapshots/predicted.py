"""Writes a predicted timeline as a memory snapshot, so that PyTorch's memory viewer and `threefold diagnose` show it.

A rehearsal has every allocation of a step with its origin; an estimate has bytes by term, which are laid out in the
order of a step: states first, saved activations one after the other, what the peak adds, and all freed again. Addresses
are given out first come, first served in one segment that is as large as needed.
"""

import heapq
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from threefold.diagnose.snapshots.snapshot_file import PREDICTED

MOST_EVENTS = 200_000
_FIRST_ADDRESS = 0x7F00_0000_0000
_GRANULE = 512
_STATES = ("weights", "gradients", "optimizer", "quantized_weights", "graphs", "workspace")
_PIECES = 8  # of each activation term of an estimate, so that the rise is drawn


@dataclass(frozen=True, slots=True)
class Change:
    """An allocation is made, resized or released. `key` tells allocations apart."""

    key: int
    num_bytes: int  # of the change; negative where memory is released
    term: str
    places: tuple[str, ...] = ()  # where it was made, the innermost first


def changes_of_terms(terms: Mapping[str, float]) -> list[Change]:
    """The bytes of an estimate as a step: states stay, activations rise and are freed in reverse."""
    made: list[Change] = []
    states = [(name, round(terms[name])) for name in _STATES if round(terms.get(name, 0))]
    rest = [(name, round(size)) for name, size in terms.items() if name not in _STATES and round(size)]
    for name, size in states:
        made.append(Change(len(made), size, name))
    num_states = len(made)
    for piece in range(_PIECES):
        for name, size in rest:
            part = size * (piece + 1) // _PIECES - size * piece // _PIECES
            if part:
                made.append(Change(len(made), part, name, (f"part {piece + 1} of {_PIECES} of a step's activations",)))
    freed = [Change(one.key, -one.num_bytes, one.term, one.places) for one in reversed(made[num_states:])]
    return [*made, *freed]


def snapshot_of(changes: Sequence[Change], num_initial: int = 0) -> bytes:
    """The file's content. The first `num_initial` changes are there before the step begins."""
    kept = _largest(changes)
    num_initial, changes = sum(one.key in kept for one in changes[:num_initial]), [c for c in changes if c.key in kept]
    space, events, live = _Space(), list[dict[str, Any]](), dict[int, tuple[int, int, Change]]()
    stacks: dict[tuple[str, tuple[str, ...]], list[dict[str, Any]]] = {}
    for number, change in enumerate(changes):
        stack = stacks.setdefault((change.term, change.places), _frames(change))
        same = {"stream": 0, "time_us": 1_000_000 + number * 10, "frames": stack}
        address, before, _ = live.pop(change.key, (0, 0, change))
        if before:  # a resized block is a new one
            space.give_back(address, before)
            for action in ("free_requested", "free_completed"):
                events.append({"action": action, "addr": address, "size": before, **same})
        if (size := before + change.num_bytes) > 0:
            address = space.take(size)
            live[change.key] = (address, size, change)
            if number >= num_initial:
                events.append({"action": "alloc", "addr": address, "size": size, **same})
    held = [(address, size, stacks[one.term, one.places]) for address, size, one in live.values()]
    content = {
        "segments": [_segment(space.size, held)],
        "device_traces": [events],
        "allocator_settings": {},
        "external_annotations": [],
    }
    return pickle.dumps(content, protocol=4)


def _largest(changes: Sequence[Change]) -> set[int]:
    """The keys of the largest allocations, where there are more changes than a viewer takes."""
    if len(changes) <= MOST_EVENTS:
        return {one.key for one in changes}
    return {one.key for one in heapq.nlargest(MOST_EVENTS // 2, changes, key=lambda one: one.num_bytes)}


class _Space:
    """Addresses of one growing segment: the first free place that is large enough."""

    def __init__(self) -> None:
        self.size = 0
        self.free: dict[int, list[int]] = {}  # by size

    def take(self, size: int) -> int:
        rounded = -(-size // _GRANULE) * _GRANULE
        if self.free.get(rounded):
            return self.free[rounded].pop()
        self.size += rounded
        return _FIRST_ADDRESS + self.size - rounded

    def give_back(self, address: int, size: int) -> None:
        self.free.setdefault(-(-size // _GRANULE) * _GRANULE, []).append(address)


def _frames(change: Change) -> list[dict[str, Any]]:
    """A stack: the term, then where the allocation was made."""
    named = [{"name": change.term, "filename": PREDICTED, "line": 0}]
    return [*({"name": place, "filename": f"{change.term}", "line": 0} for place in change.places), *named]


def _segment(size: int, held: Iterable[tuple[int, int, list[dict[str, Any]]]]) -> dict[str, Any]:
    blocks, at, used = list[dict[str, Any]](), _FIRST_ADDRESS, 0
    for address, num_bytes, stack in sorted(held, key=lambda one: one[0]):
        rounded = -(-num_bytes // _GRANULE) * _GRANULE
        if address > at:
            blocks.append(_block(at, address - at, address - at, "inactive", []))
        blocks.append(_block(address, rounded, num_bytes, "active_allocated", stack))
        at, used = address + rounded, used + rounded
    end = _FIRST_ADDRESS + size
    if at < end:
        blocks.append(_block(at, end - at, end - at, "inactive", []))
    sizes = {"total_size": size, "allocated_size": used, "active_size": used, "requested_size": used}
    same = {"device": 0, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": True}
    return {"address": _FIRST_ADDRESS, **same, **sizes, "frames": [], "blocks": blocks}


def _block(address: int, size: int, requested: int, state: str, stack: list[dict[str, Any]]) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": stack}
