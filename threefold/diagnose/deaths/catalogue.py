"""The catalogue of deaths (`catalogue.toml`), and which of them a text of a log is."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from threefold.diagnose.deaths.expression_words import words_of

Role = Literal["cause", "symptom", "aftermath", "notice"]
_MOST_CHARS = 4096
ROLES: tuple[Role, ...] = ("cause", "symptom", "aftermath", "notice")
_FOLLOWS = {"cause": False, "symptom": False, "aftermath": True, "notice": True}
# A line that reports an error. Entries that say so match in such lines only: their words stand in other lines too.
_ERROR = re.compile(
    r"Error|error\b|\[Errno|Exception|Assert|assert|FATAL|Fatal|fatal|(?:Fail|fail)(?:s|ed|ure)|Cannot|cannot|Can't|can't"
    r"|denied|exceeded|exiting|Mismatch|mismatch|not match"
)


@dataclass(frozen=True, slots=True)
class Death:
    """One way in which jobs die, or with role `notice` go on with less than what was asked for."""

    slug: str
    match: tuple[re.Pattern[str], ...]
    hints: tuple[re.Pattern[str], ...]  # words that other errors have, too
    frames: tuple[re.Pattern[str], ...]  # where an exception was raised that says nothing else
    role: Role
    cause: str
    confirm: str
    fix: str
    source: str  # of the text, so that it can be looked up again
    fields: Mapping[str, Any] = field(default_factory=dict)  # of a plan, which the fix sets
    is_vague: bool = False  # it says little: one that stands next to it counts before it
    is_hinted: bool = False  # found by a hint alone
    in_errors: bool = False  # whether it counts in lines only that report an error
    since: str = ""
    rows: tuple[str, ...] = ()


def entries() -> list[dict[str, Any]]:
    """The entries as they are written, whose expressions nobody has compiled."""
    content = files("threefold.diagnose.deaths").joinpath("catalogue.toml").read_text(encoding="utf-8")
    found: list[dict[str, Any]] = tomllib.loads(content)["death"]
    return found


@cache
def catalogue() -> tuple[Death, ...]:
    return tuple(_death(entry) for entry in entries())


def _death(entry: dict[str, Any]) -> Death:
    patterns = {key: tuple(map(re.compile, entry.get(key, ()))) for key in ("match", "hints", "frames")}
    return Death(**entry | patterns | {"rows": tuple(entry.get("rows", ()))})


@cache
def expressions_by_word() -> Mapping[str, list[tuple[int, re.Pattern[str]]]]:
    """Expressions with the places of their entries, by the words of which one is in every text that they match.

    Searching for words in lower case is cheap, and rules out nearly all expressions.
    """
    found: dict[str, list[tuple[int, re.Pattern[str]]]] = {}
    for place, death in enumerate(catalogue()):
        for pattern in (*death.match, *death.hints):
            for word in words_of(pattern.pattern):
                found.setdefault(word, []).append((place, pattern))
    return found


def telling_words() -> frozenset[str]:
    """Words of which one is, in lower case, in every line that an entry matches."""
    anywhere = [pattern for death in catalogue() if not death.in_errors for pattern in (*death.match, *death.hints)]
    return words_of(_ERROR.pattern).union(*(words_of(pattern.pattern) for pattern in anywhere))


def deaths_in(text: str) -> list[Death]:
    """The entries that a text is, the one that says most first: clear ones before vague ones, causes before symptoms,
    then as in the catalogue.

    Of a long text the beginning and the end are searched, so that its length cannot make this slow.
    """
    if len(text) > _MOST_CHARS:
        text = f"{text[: _MOST_CHARS - _MOST_CHARS // 4]}\n{text[-_MOST_CHARS // 4 :]}"
    is_error = _ERROR.search(text) is not None
    lowered = text.lower()
    by_place: dict[int, set[re.Pattern[str]]] = {}
    for word, expressions in expressions_by_word().items():
        if word in lowered:
            for place, pattern in expressions:
                if pattern.search(text):
                    by_place.setdefault(place, set()).add(pattern)
    found = []
    for place in sorted(by_place):
        death = catalogue()[place]
        if is_error or not death.in_errors:
            is_hinted = by_place[place].isdisjoint(death.match)
            found.append(as_hint(death) if is_hinted else death)
    return sorted(
        found, key=lambda death: (_FOLLOWS[death.role], death.is_hinted, death.is_vague, ROLES.index(death.role))
    )


def deaths_at(frames: Sequence[str]) -> list[Death]:
    """The entries that the last frames of an exception hint at, the innermost frame first."""
    for frame in reversed(frames):
        if found := [death for death in catalogue() if any(pattern.search(frame) for pattern in death.frames)]:
            return [as_hint(death) for death in found]
    return []


def as_hint(death: Death) -> Death:
    return replace(death, is_vague=True, is_hinted=True)


def death_named(slug: str) -> Death | None:
    return next((death for death in catalogue() if death.slug == slug), None)
