"""Measures the claims of cards again where this machine can, and says which still hold.

`threefold card check` calls `check_card`. A command is run as it is written, without a shell, in the folder of the
project; only `python` and `threefold` are started.
"""

import importlib.util
import json
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from threefold.findings import Finding, FindingsError
from threefold.machine.inventory import Machine
from threefold.tune.cards import Card

Status = Literal["holds", "does not hold", "not measured"]
LIMIT_FACTOR = 4.0  # of the minutes that a card names, before its command counts as hung
OUT, FOLDER = "{out}", "{folder}"  # where the command writes its JSON; a folder that is deleted afterwards
_PROGRAMS = {"python": [sys.executable], "threefold": [sys.executable, "-m", "threefold"]}


@dataclass(frozen=True, slots=True)
class CardResult:
    """What became of a claim."""

    card: Card
    status: Status
    measured: dict[str, float]  # by figure; empty where nothing was measured
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "card": self.card.name,
            "claim": self.card.text,
            "date": str(self.card.date),
            "status": self.status,
            "claimed": {figure.name: figure.value for figure in self.card.figures},
            "measured": self.measured,
            "reason": self.reason,
        }


def why_not_here(card: Card, here: Machine) -> str:
    """Why the command of a card cannot be run on this machine; empty where it can."""
    if card.chip is not None and card.chip != (here.chip or "cpu"):
        return f"it needs a {card.chip}, this machine has {here.chip or 'no GPU'}"
    missing = [name for name in card.packages if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)} is not installed" if missing else ""


def check_card(card: Card, here: Machine, root: Path) -> CardResult:
    """Run the command of a card and compare its figures. Evidence was compared when the card was read."""
    if reason := why_not_here(card, here):
        return CardResult(card, "not measured", {}, reason)
    words = shlex.split(card.command)
    if not words or words[0] not in _PROGRAMS:
        problem = f"its command starts {words[0] if words else 'nothing'}"
        advice = "a card starts python or threefold"
        raise FindingsError([Finding(rule="card-holds-evidence", at=str(card.path), problem=problem, advice=advice)])
    with tempfile.TemporaryDirectory() as folder:
        places = {OUT: str(Path(folder) / "result.json"), FOLDER: str(Path(folder) / "work")}
        result, reason = _run([*_PROGRAMS[words[0]], *words[1:]], places, root, 60 * LIMIT_FACTOR * card.minutes)
    if reason:
        return CardResult(card, "does not hold", {}, reason)
    try:
        measured = {figure.name: figure.measured(result) for figure in card.figures}
    except ValueError as error:
        return CardResult(card, "does not hold", {}, str(error))
    fallen = [figure for figure in card.figures if not figure.still_holds(measured[figure.name])]
    said = "; ".join(
        f"{figure.name}: {measured[figure.name]:.4g}, claimed {figure.holds} {figure.value:g} within "
        f"{figure.tolerance:.0%}"
        for figure in fallen
    )
    return CardResult(card, "does not hold" if fallen else "holds", measured, said)


def _run(command: list[str], places: dict[str, str], root: Path, limit_seconds: float) -> tuple[Any, str]:
    """The JSON that a command writes or prints, or why there is none."""
    words = [word.replace(OUT, places[OUT]).replace(FOLDER, places[FOLDER]) for word in command]
    try:
        done = subprocess.run(words, cwd=root, capture_output=True, text=True, timeout=limit_seconds, check=False)
    except subprocess.TimeoutExpired:
        return None, f"its command did not end within {limit_seconds:.0f} s"
    if done.returncode:
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "")
        return None, f"its command ended with code {done.returncode}: {last.strip()}"
    try:
        return json.loads(Path(places[OUT]).read_text("utf-8") if OUT in " ".join(command) else done.stdout), ""
    except (OSError, ValueError) as error:
        return None, f"its command left no JSON: {error}"
