"""Terms of the two estimates side by side, and the wall that each side runs into."""

from dataclasses import dataclass
from typing import Any

from threefold.compare.sides import Side
from threefold.cost.estimate import WALLS

_WALL = {term: wall for wall, terms in WALLS.items() for term in terms}


@dataclass(frozen=True, slots=True)
class TermRow:
    """Seconds of one term on both sides."""

    name: str
    wall: str
    a: float
    b: float

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "wall": self.wall, "a": self.a, "b": self.b, "change": self.b - self.a}


def estimated_terms(a: Side, b: Side, scale: float) -> list[TermRow]:
    """Terms of the two estimates; `scale` converts a step of B to the work of a step of A."""
    if a.guess is None or b.guess is None:
        return []
    old, new = a.guess.time.terms, b.guess.time.terms
    rows = [TermRow(name, _WALL.get(name, ""), old[name], new[name] * scale) for name in old]
    return sorted((row for row in rows if row.a or row.b), key=lambda row: -abs(row.b - row.a))


def wall_of(side: Side) -> str | None:
    """The wall that a trace shows, else the one of the estimate."""
    if side.profile is not None and isinstance(side.profile.get("dominant"), str):
        return str(side.profile["dominant"])
    return side.guess.wall if side.guess else None
