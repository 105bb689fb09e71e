"""Findings: what is wrong, where, and what to do. Parsing, rules, rehearsal and engine all speak them."""

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem with its cure.

    `fix` is data: the fields of the plan to set, None to delete one, `one_of` to offer alternatives.
    `advice` is the cure in words where no field can cure it, or what to add to the data.
    """

    at: str
    problem: str
    fix: Mapping[str, Any] | None = None
    advice: str = ""
    severity: Severity = "error"
    rule: str = ""

    @property
    def fix_data(self) -> dict[str, Any] | None:
        """The fix to apply: of each list of alternatives the first."""
        if not self.fix:
            return None
        return {path: value.options[0] if isinstance(value, OneOf) else value for path, value in self.fix.items()}

    @property
    def fix_text(self) -> str:
        parts = [
            f"delete {path}" if value is None else f"set {path} to {_spell(value)}"
            for path, value in (self.fix or {}).items()
        ]
        if self.advice:
            parts.append(self.advice)
        return "; ".join(parts)

    def to_json(self) -> dict[str, Any]:
        return {
            "rule": self.rule,
            "severity": self.severity,
            "at": self.at,
            "problem": self.problem,
            "fix": self.fix_text,
            "fix_data": self.fix_data,
        }

    def __str__(self) -> str:
        head = f"{self.severity}[{self.rule}] {self.at}: {self.problem}"
        return f"{head}\n  fix: {self.fix_text}" if self.fix_text else head


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a slug means, for `threefold check --explain`."""

    what: str  # what should hold
    why: str
    confirm: str  # how to see whether it holds
    fix: str


@dataclass(frozen=True, slots=True)
class OneOf:
    """Alternatives in a fix, best first."""

    options: tuple[Any, ...]


def one_of(*options: Any) -> Any:
    """A value when there is one, alternatives when there are more."""
    distinct = tuple(dict.fromkeys(options))
    return distinct[0] if len(distinct) == 1 else OneOf(distinct)


def _spell(value: Any) -> str:
    if isinstance(value, OneOf):
        return " or ".join(_spell(option) for option in value.options)
    if isinstance(value, tuple):
        return json.dumps(list(value))
    return json.dumps(value) if isinstance(value, list | bool | str) else str(value)


class FindingsError(Exception):
    """Raised where a value cannot be made at all; carries every finding met on the way."""

    def __init__(self, findings: Iterable[Finding]) -> None:
        self.findings = list(findings)
        super().__init__("\n".join(str(finding) for finding in self.findings))


def shown(value: Any) -> str:
    """A value from a file in a message: on one line, and short."""
    try:
        text = repr(list(value) if isinstance(value, tuple) else value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, a list nested as deep
        return "this value"
    return text if len(text) <= 60 else text[:57] + "..."


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Errors first, then by place and rule, so that two runs print the same."""
    return sorted(findings, key=lambda f: (f.severity != "error", f.at, f.rule, f.problem))


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Known names close to a misspelt one, closest first."""
    return difflib.get_close_matches(name, list(known), n=3, cutoff=0.55)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Advice for a misspelt name: the nearest known ones, or all when there are few, or none."""
    names = sorted(known)
    close = nearest(name, names)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"known: {', '.join(names)}" if len(names) <= 12 else ""
