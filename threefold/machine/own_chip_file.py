"""The chip file that `threefold calibrate` writes for this machine, and plans priced with it.

The file is `threefold/chips/CHIP.toml` in the user's cache folder. Its rates are those of our own engine, so plans for
another stack are priced as shipped.
"""

import hashlib
import os
import sys
from pathlib import Path

from threefold.cost.chip_file import ChipFile, read_chip_file
from threefold.plan.plan import Plan
from threefold.spec.chip_description import is_file_name
from threefold.spec.chips import ChipSpec

NO_CHIP_FILE = "none"  # given as --chip-file: the shipped rates, whatever was measured here


def own_chip_path(chip: str) -> Path:
    """Where the measurements of a chip lie, by the name that plans have for it."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = chip
    if is_file_name(chip):  # two files may have one name
        name = f"{Path(chip).stem}-{hashlib.sha256(chip.encode()).hexdigest()[:8]}"
    return root / "threefold" / "chips" / f"{name}.toml"


def own_chip_file(chip: str) -> ChipFile | None:
    """The measurements of this machine for a chip, if there are any. A file that cannot be read is left out aloud."""
    path = own_chip_path(chip)
    try:
        if not path.exists():
            return None
    except OSError:  # a cache folder that this user may not look into
        return None
    found, findings = read_chip_file(str(path))
    if findings:
        print(f"{path} is left out: {findings[0].problem}; `threefold calibrate` writes it anew", file=sys.stderr)
    return found


def own_chip(chip: str, target: str) -> ChipSpec | None:
    """The chip as this machine measured it, for a plan of our own engine."""
    found = own_chip_file(chip) if target == "threefold" else None
    return found.spec if found else None


def priced_here(plan: Plan) -> Plan:
    """The plan with the rates that were measured here, if it runs on such a chip and in our engine."""
    if plan.cluster.measured is not None:
        return plan
    return plan.on_chip(own_chip(plan.cluster.chip, plan.target))
