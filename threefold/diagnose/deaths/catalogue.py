"""The catalogue of deaths (`catalogue.toml`), and which of them a text of a log is."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from threefold.diagnose.deaths.expression_words import words_of

Role = Literal["cause", "symptom", "aftermath", "notice"]
_MOST_CHARS = 4096
ROLES: tuple[Role, ...] = ("cause", "symptom", "aftermath", "notice")
# A line that reports an error. Entries that say so match in such lines only: their words stand in other lines too.
_ERROR = re.compile(r"Error|error\b|Exception|[Aa]ssert|FATAL|[Ff]atal|[Ff]ailed|cannot|can't|denied|exceeded|exiting")


@dataclass(frozen=True, slots=True)
class Death:
    """One way in which jobs die, or with role `notice` go on with less than what was asked for."""

    slug: str
    match: tuple[re.Pattern[str], ...]
    role: Role
    cause: str
    confirm: str
    fix: str
    source: str  # of the text, so that it can be looked up again
    fields: Mapping[str, Any] = field(default_factory=dict)  # of a plan, which the fix sets
    is_vague: bool = False  # it says little: one that stands next to it counts before it
    in_errors: bool = False  # whether it counts in lines only that report an error
    since: str = ""
    rows: tuple[str, ...] = ()


@cache
def catalogue() -> tuple[Death, ...]:
    content = files("threefold.diagnose.deaths").joinpath("catalogue.toml").read_text(encoding="utf-8")
    return tuple(_death(entry) for entry in tomllib.loads(content)["death"])


def _death(entry: dict[str, Any]) -> Death:
    patterns = tuple(re.compile(pattern) for pattern in entry.pop("match"))
    return Death(match=patterns, rows=tuple(entry.pop("rows", ())), **entry)


@cache
def expressions_by_word() -> Mapping[str, list[tuple[int, re.Pattern[str]]]]:
    """Expressions with the places of their entries, by the words of which one is in every text that they match.

    Searching for words in lower case is cheap, and rules out nearly all expressions.
    """
    found: dict[str, list[tuple[int, re.Pattern[str]]]] = {}
    for place, death in enumerate(catalogue()):
        for pattern in death.match:
            for word in words_of(pattern.pattern):
                found.setdefault(word, []).append((place, pattern))
    return found


def deaths_in(text: str) -> list[Death]:
    """The entries that a text is, the one that says most first: causes before symptoms, then as in the catalogue.

    Of a long text the beginning and the end are searched, so that its length cannot make this slow.
    """
    if len(text) > _MOST_CHARS:
        text = f"{text[: _MOST_CHARS - _MOST_CHARS // 4]}\n{text[-_MOST_CHARS // 4 :]}"
    is_error = _ERROR.search(text) is not None
    lowered = text.lower()
    places: set[int] = set()
    for word, expressions in expressions_by_word().items():
        if word in lowered:
            places.update(place for place, pattern in expressions if place not in places and pattern.search(text))
    found = [catalogue()[place] for place in sorted(places)]
    found = [death for death in found if is_error or not death.in_errors]
    return sorted(found, key=lambda death: (ROLES.index(death.role), death.is_vague))


def death_named(slug: str) -> Death | None:
    return next((death for death in catalogue() if death.slug == slug), None)
