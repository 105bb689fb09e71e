"""One kind of collective in a step, whichever stack runs it."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from threefold.plan.plan import Plan
from threefold.spec.model import Layer


@dataclass(frozen=True, slots=True)
class Transfer:
    """`count` is of an average rank: stages differ, and so may ranks of one stage."""

    axis: str  # or the axes of a group: "dp x cp"
    operation: str
    bytes: float  # sent by a rank in one call
    count: float
    link: str

    @property
    def total_bytes(self) -> float:
        return self.bytes * self.count

    def to_json(self) -> dict[str, Any]:
        return {
            "axis": self.axis,
            "operation": self.operation,
            "bytes": round(self.bytes),
            "count": self.count,
            "link": self.link,
        }


def merged(entries: Iterable[Transfer]) -> list[Transfer]:
    """Equal kinds of transfers as one line, largest first; those that carry nothing are left out."""
    found: dict[tuple[str, str, float, str], float] = {}
    for entry in entries:
        if entry.bytes > 0 and entry.count > 0:
            key = (entry.axis, entry.operation, entry.bytes, entry.link)
            found[key] = found.get(key, 0.0) + entry.count
    lines = [Transfer(axis, op, size, count, link) for (axis, op, size, link), count in found.items()]
    return sorted(lines, key=lambda entry: -entry.total_bytes)


def layers_of(plan: Plan) -> Counter[tuple[Layer, str]]:
    """Layers of one kind and one way of context-parallel communication, counted; MTP depths do as the last layer."""
    layers = [*plan.model.layers, *plan.model.mtp_depth * plan.mtp]
    modes = plan.knobs.cp_comm
    each = [modes] * len(layers) if isinstance(modes, str) else [*modes, *[modes[-1]] * len(layers)]
    return Counter(zip(layers, each[: len(layers)], strict=True))
