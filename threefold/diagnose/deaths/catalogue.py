"""The catalogue of deaths (`catalogue.toml`), and which of them a text of a log is."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Literal

Role = Literal["cause", "symptom", "aftermath", "notice"]
ROLES: tuple[Role, ...] = ("cause", "symptom", "aftermath", "notice")
# A line that reports an error. Entries that say so match in such lines only: their words stand in other lines too.
_ERROR = re.compile(r"Error|error\b|Exception|[Aa]ssert|FATAL|[Ff]atal|[Ff]ailed|cannot|can't|denied|exceeded")


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

    def is_in(self, text: str, is_error: bool) -> bool:
        return (is_error or not self.in_errors) and any(pattern.search(text) for pattern in self.match)


@cache
def catalogue() -> tuple[Death, ...]:
    content = files("threefold.diagnose.deaths").joinpath("catalogue.toml").read_text(encoding="utf-8")
    return tuple(_death(entry) for entry in tomllib.loads(content)["death"])


def _death(entry: dict[str, Any]) -> Death:
    patterns = tuple(re.compile(pattern) for pattern in entry.pop("match"))
    return Death(match=patterns, rows=tuple(entry.pop("rows", ())), **entry)


def deaths_in(text: str) -> list[Death]:
    """The entries that a text is, the one that says most first: causes before symptoms, then as in the catalogue."""
    is_error = _ERROR.search(text) is not None
    found = [death for death in catalogue() if death.is_in(text, is_error)]
    return sorted(found, key=lambda death: (ROLES.index(death.role), death.is_vague))


def death_named(slug: str) -> Death | None:
    return next((death for death in catalogue() if death.slug == slug), None)
