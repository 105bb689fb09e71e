"""Live bytes over a step as a list of points that is short enough to draw, and as the list of all its changes.

`rehearse_rank` stores the points, `threefold dry-run --timeline` writes them to a file and `--plot` draws them. A point
is {"change": 1200, "bytes": 8040179200, "phase": "forward", "microbatch": 0}.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from threefold.dryrun.tracking.memory_tracker import Allocation, MemoryTracker

MAX_POINTS = 1000


class LiveChange(NamedTuple):
    """An allocation is made, resized or released. `--snapshot` writes them for PyTorch's memory viewer."""

    key: int  # of the allocation
    num_bytes: int  # of the change; negative where memory is released
    term: str
    places: tuple[str, ...]  # the operator, then the tensor's name or the phase and module that made it


def live_changes(tracker: MemoryTracker, term_of: Callable[[Allocation], str]) -> tuple[LiveChange, ...]:
    """All changes since the step started, with what was live then as the first ones."""
    labels: dict[int, tuple[int, str, tuple[str, ...]]] = {}
    found = []
    for allocation, change in list(tracker.changes):
        if id(allocation) not in labels:
            place = (str(allocation.operation), allocation.name or str(allocation.origin))
            labels[id(allocation)] = (len(labels), term_of(allocation), place)
        key, term, places = labels[id(allocation)]
        found.append(LiveChange(key, change, term, places))
    return tuple(found)


def live_bytes_timeline(tracker: MemoryTracker, max_points: int = MAX_POINTS) -> list[dict[str, Any]]:
    """One point for each interval of equally many changes: the highest live bytes in it.

    `change` is the number of allocations and releases since the step started.
    """
    changes = list(tracker.changes)  # a copy, because garbage collection during this loop adds releases to the list
    begin = tracker.num_initial_changes
    interval = -(-(len(changes) - begin) // max_points) or 1
    phase_starts = iter([*tracker.phase_starts, (len(changes) + 1, None)])
    _, origin = next(phase_starts)
    next_start, next_origin = next(phase_starts)
    points: list[dict[str, Any]] = []
    live = highest = sum(change for _, change in changes[:begin])
    for number, (_, change) in enumerate(changes[begin:], begin):
        live += change
        highest = max(highest, live)
        while number >= next_start:
            origin = next_origin or origin
            next_start, next_origin = next(phase_starts)
        if number % interval == interval - 1 or number == len(changes) - 1:
            assert origin is not None
            points.append(
                {"change": number - begin, "bytes": highest, "phase": origin.phase, "microbatch": origin.microbatch}
            )
            highest = live
    return points
