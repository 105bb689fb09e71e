"""Each package of threefold/ stays below a ceiling of lines, so that growth is a decision and not an accident.

A change that needs more raises the number of its package in the same commit and says why. The sum of all ceilings is
the size of the product; a ceiling that is far above its package is lowered.
"""

from pathlib import Path

import threefold

PACKAGE = Path(threefold.__file__).parent
SLACK = 150  # lines that a package may be below its ceiling

CEILINGS: dict[str, int] = {
    "api": 1_250,
    "cli": 4_800,
    "compare": 3_060,
    "cost": 11_970,
    "diagnose": 3_710,
    "dryrun": 3_850,
    "engine": 43_960,
    "explore": 900,
    "interop": 5_540,
    "launch": 1_600,
    "layout": 500,
    "lookup": 850,
    "machine": 1_300,
    "mcp": 300,
    "plan": 2_500,
    "profile": 5_120,
    "remedies": 1_090,
    "report": 4_400,
    "rules": 5_850,
    "search": 2_700,
    "spec": 5_610,
    "top": 1_000,
    "tune": 2_270,
}


def sizes() -> dict[str, int]:
    """Lines of Python by package; modules at the top count together."""
    found: dict[str, int] = {}
    for file in PACKAGE.rglob("*.py"):
        parts = file.relative_to(PACKAGE).parts
        name = parts[0] if len(parts) > 1 else "top"
        found[name] = found.get(name, 0) + len(file.read_text(encoding="utf-8").splitlines())
    return found


def test_packages_stay_below_their_ceilings() -> None:
    now = sizes()
    assert set(now) == set(CEILINGS)
    too_large = {name: (size, CEILINGS[name]) for name, size in now.items() if size > CEILINGS[name]}
    assert not too_large, f"lines and ceiling: {too_large}; delete, or raise the ceiling and say why in the commit"


def test_ceilings_are_no_wider_than_needed() -> None:
    now = sizes()
    loose = {name: (now[name], most) for name, most in CEILINGS.items() if most - now[name] > SLACK}
    assert not loose, f"lines and ceiling: {loose}; lower the ceiling"
