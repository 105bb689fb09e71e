"""Builds HTML and SVG. Every text and every value of an attribute is escaped; only a `Markup` goes in as it is.

`tag("td", "a < b", class_="number")` is `<td class="number">a &lt; b</td>`. Names of files, models and fields come from
strangers, so no module of this folder joins strings into markup by itself.
"""

from collections.abc import Iterable, Sequence

_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#x27;"})
_VOID = frozenset(("br", "hr", "input", "link", "meta"))
# What XML forbids, and lone surrogates, which cannot be written as UTF-8.
_UNWRITABLE = dict.fromkeys((*range(9), 11, 12, *range(14, 32), 127, *range(0xD800, 0xE000)), "\ufffd")
_ESCAPES |= _UNWRITABLE

Attribute = str | int | float | bool | None


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


NOTHING = Markup("")


def escaped(text: str) -> Markup:
    return text if isinstance(text, Markup) else Markup(str(text).translate(_ESCAPES))


def tag(name: str, /, *children: str, **attributes: Attribute) -> Markup:
    """An element. `class_` is `class`, other underscores are hyphens; None and False leave an attribute out."""
    inside = "".join([escaped(child) for child in children])
    opened = name + "".join([_attribute(key, value) for key, value in attributes.items()])
    return Markup(f"<{opened}>" if name in _VOID else f"<{opened}>{inside}</{name}>")


def _attribute(key: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    text = number(value) if isinstance(value, float) else str(value).translate(_ESCAPES)
    return f' {name}="{text}"'


def number(value: float) -> str:
    """A coordinate: two digits behind the point are a hundredth of a pixel."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def join(parts: Iterable[Markup]) -> Markup:
    return Markup("".join(parts))


def html_table(header: Sequence[str], rows: Iterable[Sequence[str]], numeric_from: int = 1) -> Markup:
    """A table whose columns from `numeric_from` on are set to the right."""
    head = join(_cell("th", text, place >= numeric_from) for place, text in enumerate(header))
    body = join(
        tag("tr", join(_cell("td", text, place >= numeric_from) for place, text in enumerate(row))) for row in rows
    )
    return tag("div", tag("table", tag("thead", tag("tr", head)), tag("tbody", body)), class_="wide", tabindex=0)


def _cell(kind: str, text: str, is_number: bool) -> Markup:
    return tag(kind, text, class_="number" if is_number else None, scope="col" if kind == "th" else None)


def details(summary: str, *children: Markup) -> Markup:
    """What is folded until somebody asks for it."""
    return tag("details", tag("summary", summary), *children)
