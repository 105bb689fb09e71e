"""Which color class of `style.css` a term has. Terms of one group have one hue; the eight hues are those of Okabe and
Ito, which people with any kind of color vision tell apart."""

from threefold.cost.estimate import WALLS
from threefold.plan.terms import MEMORY_TERMS, RESERVE_TERMS

# Groups of memory terms with their classes. Terms named nowhere are activations.
MEMORY_GROUPS = {
    "weights": ("hue-blue", ("weights", "quantized_weights")),
    "gradients": ("hue-sky", ("gradients",)),
    "optimizer": ("hue-green", ("optimizer",)),
    "activations": ("hue-orange", ()),
    "for a moment": ("hue-pink", ("recompute", "overlap", "graphs", "workspace")),
    "outside the allocator": ("hue-gray", RESERVE_TERMS),
}
_GROUP_OF = {term: group for group, (_, terms) in MEMORY_GROUPS.items() for term in terms}

WALL_CLASSES = {
    "compute": "hue-blue",
    "communication": "hue-red",
    "host": "hue-pink",
    "memory": "hue-green",
    "unknown": "hue-gray",
}
# Time terms: the hue says the wall, and the shade tells neighbors apart.
_WALL_OF = {term: wall for wall, terms in WALLS.items() for term in terms}

AXIS_CLASSES = {
    "pp": "hue-gray",
    "dp": "hue-blue",
    "cp": "hue-green",
    "tp": "hue-orange",
    "edp": "hue-sky",
    "ep": "hue-red",
    "etp": "hue-pink",
}


def memory_group(term: str) -> str:
    return _GROUP_OF.get(term, "activations")


def memory_class(term: str) -> str:
    """The hue of the term's group, in a shade of its own where the group has several."""
    group = memory_group(term)
    hue = MEMORY_GROUPS[group][0]
    alike = [name for name in (*MEMORY_TERMS, *RESERVE_TERMS) if memory_group(name) == group]
    return shaded(hue, alike.index(term) if term in alike else 0)


def time_class(term: str) -> str:
    wall = _WALL_OF.get(term, "host")
    return shaded(WALL_CLASSES[wall], WALLS[wall].index(term) if wall in WALLS and term in WALLS[wall] else 0)


def wall_of(term: str) -> str:
    return _WALL_OF.get(term, "")


def shaded(hue: str, number: int) -> str:
    """Every second of neighbors of one hue is lighter."""
    return f"{hue} light" if number % 2 else hue
