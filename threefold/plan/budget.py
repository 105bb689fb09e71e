"""A memory budget in place of names: `knobs.recompute = "auto:60GiB"`."""

import re

from threefold.units import GB, GIB, MIB, TIB

_MARK = "auto:"
_UNITS = {"MiB": MIB, "GiB": GIB, "TiB": TIB, "GB": GB}
PATTERN = rf"^{_MARK}[0-9]+(\.[0-9]+)?({'|'.join(_UNITS)})$"
EXAMPLE = f"{_MARK}60GiB"


def is_budget(word: str) -> bool:
    """Meant as one, whether or not it can be read."""
    return word.startswith(_MARK)


def budget_bytes(word: str) -> float | None:
    """None: no budget, or none that can be read or met."""
    found = re.fullmatch(PATTERN, word)
    if found is None:
        return None
    unit = found.group(2)
    return float(word.removeprefix(_MARK).removesuffix(unit)) * _UNITS[unit] or None
