"""Findings: what is wrong, where, and what to do. Parsing, rules, rehearsal and engine all speak them."""

import difflib
import json
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from threefold.notebook import ShownAsTable

Severity = Literal["error", "warning", "note"]  # refused; doubtful; what the estimate sees and what it would gain


Changes = dict[str, Any]  # fields of a plan to set, by path; None puts one back to its default

# What a fix is. `fix` keeps what the plan means; `suggestion` changes speed, memory or numbers in a way that it states;
# `did you mean` is a guess at a name, which nothing applies.
Kind = Literal["fix", "suggestion", "did you mean"]

_SEVERITIES = get_args(Severity)


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem with its cure.

    `fix` is data: the fields of the plan to set, None to put one back to its default.
    `advice` is the cure in words where no field can cure it, or what to add to the data.
    `fixes` are further ways, best first, for whoever looks for one that holds (`rules/fixes.py`). They may be a
    generator, so that ways that are costly to find are looked for only where somebody asks. `resort` is a way that
    cures least, such as to give up what was asked for: it comes after all others, also after those that move other
    fields along. `otherwise` says what would help where none holds. `kind` says what the fix is; where a rule leaves it
    open, what the fix changes decides (`rules/fixes.py`). `alternatives` are further advice that holds, in order, each
    with what it changes.
    """

    at: str
    problem: str
    fix: Mapping[str, Any] | None = None
    advice: str = ""
    severity: Severity = "error"
    rule: str = ""
    kind: Kind | None = None
    alternatives: tuple[tuple[Changes, str], ...] = ()
    fixes: Iterable[Mapping[str, Any]] = field(default=(), compare=False, repr=False)
    resort: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    otherwise: Callable[[], str] | None = field(default=None, compare=False, repr=False)

    @property
    def fix_data(self) -> dict[str, Any] | None:
        return dict(self.fix) if self.fix else None

    @property
    def fix_kind(self) -> Kind:
        return self.kind or "fix"

    @property
    def fix_text(self) -> str:
        """The fix as overrides of a command line, and the advice."""
        return "; ".join(filter(None, (as_overrides(self.fix or {}), self.advice)))

    def to_json(self) -> dict[str, Any]:
        return {
            "rule": self.rule,
            "severity": self.severity,
            "at": self.at,
            "problem": self.problem,
            "fix": as_overrides(self.fix) if self.fix else self.advice,
            "advice": self.advice,
            "fix_data": self.fix_data,
            "fix_kind": self.fix_kind if self.fix else None,
            "alternatives": [{"set": dict(changes), "effect": effect} for changes, effect in self.alternatives],
        }

    def __str__(self) -> str:
        lines = [f"{self.severity}[{self.rule}] {self.at}: {self.problem}"]
        if self.fix:
            lines.append(f"  {self.fix_kind}: {as_overrides(self.fix)}")
        if self.advice:
            lines.append(f"  advice: {self.advice}")
        lines += [f"  or: {as_overrides(changes)}: {effect}" for changes, effect in self.alternatives]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a slug means, for `threefold check --explain`."""

    what: str  # what should hold
    why: str
    confirm: str  # how to see whether it holds
    fix: str
    severity: Severity = "error"  # of the findings; a rule has its own


def as_override(path: str, value: Any) -> str:
    """A field as an argument of a command line, ready for a shell: `layout.ep=16`, `knobs.recompute=layernorm,mlp`.

    `null` puts a field back to its default. Reading it gives the same value (`plan/file.py`).
    """
    if isinstance(value, list | tuple) and value and all(_is_plain(word) for word in value):
        text = ",".join(value)
    elif isinstance(value, str) and value and not _reads_as_other(value):
        text = value
    else:
        text = json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
    return shlex.quote(f"{path}={text}")


def as_overrides(changes: Mapping[str, Any]) -> str:
    return " ".join(as_override(path, value) for path, value in changes.items())


def _is_plain(word: Any) -> bool:
    return isinstance(word, str) and word.replace("_", "a").replace("+", "a").replace("-", "a").isalnum()


def _reads_as_other(text: str) -> bool:
    """Whether text would be read as a number, a truth value, nothing or a list: that is quoted."""
    try:
        json.loads(text)
    except ValueError:
        return (
            text != text.strip()
            or text[0] in "[{\"'"
            or text.lower() in ("true", "false", "null", "none", "nan", "inf")
        )
    return True


class Findings(list[Finding], ShownAsTable):
    """Findings in order, as `threefold.check` returns them."""

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self if finding.severity == "error"]

    def summary(self) -> str:
        counts = {kind: sum(finding.severity == kind for finding in self) for kind in _SEVERITIES}
        return ", ".join(f"{count} {kind}{'' if count == 1 else 's'}" for kind, count in counts.items())

    def table(self) -> tuple[list[str], list[list[str]]]:
        rows = [[one.severity, one.rule, one.at, one.problem, one.fix_text] for one in self]
        return ["", "rule", "at", "problem", "fix"], rows

    __repr__ = ShownAsTable.__repr__


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
    """Errors first, notes last, then by place and rule, so that two runs print the same."""
    return sorted(findings, key=lambda f: (_SEVERITIES.index(f.severity), f.at, f.rule, f.problem))


def known_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that this one is, in any case and with either dash; None where it is another."""
    spelled = {each.lower().replace("_", "-"): each for each in known}
    return spelled.get(name.strip().lower().replace("_", "-"))


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Known names close to a misspelt one, closest first.

    Two names that share digits alone are no misspellings of each other: `mi300x` and `b300` are of different makers.
    """
    close = difflib.get_close_matches(name.lower(), list(known), n=3, cutoff=0.55)
    letters = {letter for letter in name.lower() if letter.isalpha()}
    return [word for word in close if not letters or not letters.isdisjoint(word.lower())]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Advice for a misspelt name: the nearest known ones, or all when there are few, or nothing."""
    names = sorted(known)
    close = nearest(name, names)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"known: {', '.join(names)}" if len(names) <= 12 else ""
