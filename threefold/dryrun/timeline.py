"""Live bytes over a step, in few enough points to draw: of each stretch its highest."""

from typing import Any

from threefold.dryrun.tracker import Tracker

MAX_POINTS = 1000


def timeline(tracker: Tracker, points: int = MAX_POINTS) -> list[dict[str, Any]]:
    """`change`: how many allocations and releases had happened."""
    changes = list(tracker.changes)  # what a collection of garbage releases meanwhile adds to them
    stretch = -(-(len(changes) - tracker.begun) // points) or 1
    marks = iter([*tracker.marks, (len(changes) + 1, None)])
    _, spot = next(marks)
    until, coming = next(marks)
    found: list[dict[str, Any]] = []
    live = highest = sum(change for _, change in changes[: tracker.begun])
    for number, (_, change) in enumerate(changes[tracker.begun :], tracker.begun):
        live += change
        highest = max(highest, live)
        while number >= until:
            spot = coming or spot
            until, coming = next(marks)
        if number % stretch == stretch - 1 or number == len(changes) - 1:
            assert spot is not None
            found.append(
                {"change": number - tracker.begun, "bytes": highest, "phase": spot.phase, "microbatch": spot.microbatch}
            )
            highest = live
    return found
