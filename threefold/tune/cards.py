"""Cards: a claim with its plan, contract, measurement, evidence and date, as a TOML file in `cards/`.

    claim = "A step is {speedup} times as fast as ..."    figures stand in braces
    date = 2026-11-16
    machine = "1 x H200, torch 2.11.0"
    command = "python benchmarks/step.py --json {out}"    measures it again; without {out} the JSON is its output
    needs = { chip = "h200", packages = ["transformers"] }
    evidence = "benchmarks/results/step-h200.json"        what was measured on that date
    [[figures]]                                           at least one: where the number stands in that JSON
    name = "speedup"
    value = 1.6
    at = "/rows/1/transformers/ms"
    over = "/rows/1/threefold/ms"                         the figure is the ratio of the two

`read_card` refuses a card whose figures are not those of its evidence, so that a claim cannot be written by hand.
For `threefold card
check` `check_card` measures again where this machine can: a command is run as it is written, without a shell, in the
folder of the project; only `python` and `threefold` are started.
"""

import importlib.util
import json
import math
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal, get_args

from threefold.compare.contract import BENCHMARK, TRAINING, label_of
from threefold.findings import Finding, FindingsError, did_you_mean, shown
from threefold.machine.inventory import Machine
from threefold.plan.parse import parse
from threefold.safe_files import read_bounded, read_json

Bound = Literal["at least", "at most", "about"]
REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "max": max,
    "mean": statistics.fmean,
    "median": statistics.median,
    "count": len,
}
MAX_CARD_BYTES = 2**18
ROUNDING = 0.006  # relative difference that rounding a figure to three digits makes
TOLERANCE = 0.05  # of a measurement made again, where a figure states none
_KEYS = ("claim", "date", "machine", "command", "needs", "evidence", "log", "minutes", "plan", "contract", "figures")
_FIGURE_KEYS = ("name", "value", "at", "over", "reduce", "scale", "holds", "tolerance", "unit")
_NEEDS = ("chip", "packages")


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a claim, and where it stands in the JSON of a measurement."""

    name: str
    value: float
    at: str  # a JSON pointer; `*` takes every element of a list
    over: str | None = None  # a second pointer: the figure is their ratio
    reduce: str = ""  # how several elements become one number
    scale: float = 1.0
    unit: str = ""
    holds: Bound = "at least"
    tolerance: float = TOLERANCE

    def measured(self, result: Any) -> float:
        """The figure of a measurement. Raises ValueError where it has none."""
        found = self._number(result, self.at)
        if self.over is not None:
            below = self._number(result, self.over)
            found = found / below if below else math.nan
        return found * self.scale

    def still_holds(self, found: float) -> bool:
        slack = abs(self.value) * self.tolerance
        if self.holds == "at least":
            return found >= self.value - slack
        return found <= self.value + slack if self.holds == "at most" else abs(found - self.value) <= slack

    @property
    def text(self) -> str:
        shown_value = f"{self.value:,.10g}"
        return f"{shown_value} {self.unit}" if self.unit else shown_value

    def _number(self, result: Any, pointer: str) -> float:
        values = [abs(value) if self.reduce in ("max", "mean", "median") else value for value in _at(result, pointer)]
        if self.reduce:
            return float(REDUCTIONS[self.reduce](values)) if values else math.nan
        if len(values) != 1:
            raise ValueError(f"{pointer} names {len(values)} numbers, not one")
        return float(values[0])


@dataclass(frozen=True, slots=True)
class Card:
    """A claim and what it rests on."""

    path: Path
    claim: str
    date: date
    machine: str
    command: str
    evidence: Path
    figures: tuple[Figure, ...]
    chip: str | None = None  # that the command needs; None: any
    packages: tuple[str, ...] = ()
    log: str | None = None  # the page that tells more
    minutes: float = 10.0  # that the command takes
    contract: Mapping[str, Any] | None = None
    label: str | None = None  # whether what was measured could be accepted for training; None where nothing says so

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def text(self) -> str:
        """The claim with its figures."""
        return self.claim.format(**{figure.name: figure.text for figure in self.figures})


def read_card(path: Path, root: Path) -> Card:
    """Read a card; `root` is the folder in which its command runs and its evidence lies. Raises FindingsError."""
    try:
        values = tomllib.loads(read_bounded(path, MAX_CARD_BYTES).decode())
    except (OSError, ValueError, RecursionError) as error:
        raise _refused(path, f"it cannot be read: {error}") from None
    problems = list(_problems(values))
    if problems:
        raise FindingsError([_finding(path, problem) for problem in problems])
    needs = values.get("needs", {})
    card = Card(
        path=path,
        claim=values["claim"],
        date=values["date"],
        machine=values["machine"],
        command=values["command"],
        evidence=root / values["evidence"],
        figures=tuple(Figure(**figure) for figure in values["figures"]),
        chip=needs.get("chip"),
        packages=tuple(needs.get("packages", ())),
        log=values.get("log"),
        minutes=float(values.get("minutes", 10.0)),
        contract=values.get("contract"),
        label=_label(values),
    )
    _check_evidence(card)
    return card


def _label(values: Mapping[str, Any]) -> str | None:
    """From what the contract says of the data, else from the plan."""
    contract = values.get("contract")
    if isinstance(contract, dict) and "benchmark_only" in contract:
        return BENCHMARK if contract["benchmark_only"] else TRAINING
    plan = parse(values["plan"]).plan if "plan" in values else None
    return label_of(plan) if plan else None


def _problems(values: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the fields of a card, each in words."""
    for key in values:
        if key not in _KEYS:
            yield f"{key} is no field of a card; {did_you_mean(key, _KEYS)}"
    for key in ("claim", "machine", "command", "evidence"):
        if not isinstance(values.get(key), str):
            yield f"{key} is missing, or no text"
    if not isinstance(values.get("date"), date):
        yield "date is missing, or no date such as 2026-11-16"
    minutes = values.get("minutes", 1.0)
    if not isinstance(minutes, int | float) or not 0 < minutes <= 10_000:
        yield f"minutes = {shown(minutes)} is no time"
    needs = values.get("needs", {})
    if not isinstance(needs, dict) or not set(needs) <= set(_NEEDS):
        yield f"needs takes {' and '.join(_NEEDS)}"
    yield from _figure_problems(values)
    if "plan" in values:
        parsed = parse(values["plan"]) if isinstance(values["plan"], dict) else None
        if parsed is None or parsed.plan is None:
            said = parsed.findings[0].problem if parsed and parsed.findings else "it is no table of fields"
            yield f"its plan is none: {said}"
        elif parsed.plan.is_image_free:
            yield "its plan trains a vision-language model without images, which is no evidence of its speed"


def _figure_problems(values: Mapping[str, Any]) -> Iterator[str]:
    figures = values.get("figures")
    if not isinstance(figures, list) or not figures or not all(isinstance(one, dict) for one in figures):
        yield "it has no [[figures]]"
        return
    for one in figures:
        name = one.get("name")
        if strange := sorted(set(one) - set(_FIGURE_KEYS)):
            yield f"{strange[0]} is no field of a figure; {did_you_mean(strange[0], _FIGURE_KEYS)}"
        elif not isinstance(name, str) or not isinstance(one.get("at"), str):
            yield "a figure has a name, a value and `at`, the place of its number"
        elif not isinstance(one.get("value"), int | float) or not math.isfinite(one["value"]):
            yield f"the value of figure {name} is no number"
        elif one.get("reduce", "max") not in REDUCTIONS or one.get("holds", "about") not in get_args(Bound):
            yield f"figure {name}: reduce is one of {', '.join(REDUCTIONS)}; holds one of {', '.join(get_args(Bound))}"
    names = {one.get("name") for one in figures}
    missing = sorted(set(re.findall(r"{(\w+)}", str(values.get("claim", "")))) - names)
    if missing:
        yield f"the claim names a figure {missing[0]} that the card does not have"


def _check_evidence(card: Card) -> None:
    """The figures are those of the evidence, but for rounding."""
    try:
        result = read_json(card.evidence)
    except (OSError, ValueError) as error:
        raise _refused(card.path, f"its evidence {card.evidence} cannot be read: {error}") from None
    for figure in card.figures:
        try:
            found = figure.measured(result)
        except ValueError as error:
            raise _refused(card.path, f"figure {figure.name}: {error}") from None
        if not abs(found - figure.value) <= max(ROUNDING * abs(found), 1e-12):
            problem = f"figure {figure.name} is {figure.value:g} in the card and {found:.4g} in {card.evidence.name}"
            raise _refused(card.path, problem)


def _at(result: Any, pointer: str) -> Sequence[Any]:
    """The numbers at a JSON pointer whose `*` takes every element. Raises ValueError where there is none."""
    values = [result]
    for part in pointer.split("/")[1:]:
        following = []
        for value in values:
            if part == "*" and isinstance(value, list):
                following += value
            elif isinstance(value, dict) and part in value:
                following.append(value[part])
            elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
                following.append(value[int(part)])
            else:
                raise ValueError(f"the measurement has no {pointer}")
        values = following
    if not all(isinstance(value, int | float) for value in values):
        raise ValueError(f"{pointer} is no number")
    return values


def _finding(path: Path, problem: str) -> Finding:
    advice = "docs/reference/cards.md has the fields; figures are those of the evidence file"
    return Finding(rule="card-holds-evidence", at=str(path), problem=problem, advice=advice)


def _refused(path: Path, problem: str) -> FindingsError:
    return FindingsError([_finding(path, problem)])


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
