"""What was seen of a plan in a profile, a run or a rehearsal, by which remedies are judged in place of its settings.

`profile/evidence.py` reads it from traces and the folder of a run, `api/rehearsals.py` from a rehearsal. What was not
seen leaves the decision to the estimate.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

UNKNOWN_AXIS = "unknown"


@dataclass(frozen=True, slots=True)
class Evidence:
    """Facts of a measurement; what is absent is not known."""

    wall: str = ""  # "memory", a wall of time, or "unknown"
    shares: Mapping[str, float] = field(default_factory=dict)  # of the time, by wall
    exposed: Mapping[str, float] = field(default_factory=dict)  # share of the time by axis of communication
    kernels: frozenset[str] = frozenset()  # kinds that ran: "fp8", "deepep", "hybridep", "fused experts", "graphs", ...
    is_cpu: bool | None = None
    device_bytes: float | None = None  # of the fullest rank
    seen: tuple[str, ...] = ()  # other bottlenecks of the catalogue: "slow ranks", "router", "data", "allocator"

    def most_gain(self, wall: str, axes: tuple[str, ...]) -> float:
        """What throughput can gain at most where all of the time goes that a remedy is about."""
        share = self.shares.get(wall, 1.0)
        if axes and self.exposed:  # time of unknown axes may be anybody's
            share = min(share, sum(self.exposed.get(axis, 0.0) for axis in (*axes, UNKNOWN_AXIS)))
        return share / (1 - share) if share < 1 else float("inf")

    def may_use(self, axis: str) -> bool:
        """Whether ranks of an axis may have communicated: where times were seen, those of the axis or of unknown
        ones."""
        parts = {part for name in self.exposed for part in name.split(" x ")}
        return not (axis and self.shares) or not parts.isdisjoint((axis, UNKNOWN_AXIS))


NOTHING_SEEN = Evidence()
