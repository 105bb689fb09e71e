"""Live bytes over a step as a list of points that is short enough to draw.

`rehearse_rank` stores the points, `threefold dry-run --timeline` writes them to a file and `--plot` draws them. A point
is {"change": 1200, "bytes": 8040179200, "phase": "forward", "microbatch": 0}.
"""

from typing import Any

from threefold.dryrun.tracking.memory_tracker import MemoryTracker

MAX_POINTS = 1000


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
