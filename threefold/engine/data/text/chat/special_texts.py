"""Finds special tokens that messages forge: those in a rendered chat whose first or last characters are a message's.

A template must see messages as they are, or it would render something else than `transformers` does. So the chat is
rendered as it is, and rendered once more with one character changed in every special token that a message spells, and
in every part of one at the edge of a text, which the text next to it could complete. Both renderings are equally long,
and a special token that differs between them is forged. `jinja_template.py` calls it.

A template may also look for special tokens in messages, to cut there for instance. Then the renderings differ
elsewhere, and those of the template itself are found the same way: by changing its own literals.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import nodes

Span = tuple[int, int]


class SpecialTexts:
    """The texts of a tokenizer's special tokens. Upper and lower case are the same, since templates change it."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = {name.lower() for name in names if name}
        self._sizes = sorted({len(name) for name in self._names}, reverse=True)
        self._first, self._last = (_one_of({name[place] for name in self._names}) for place in (0, -1))

    def places(self, text: str) -> Iterator[Span]:
        """Each place where a special token is spelled, the longest where several begin. They may overlap."""
        for found in self._first.finditer(text):
            at = found.start()
            sizes = (size for size in self._sizes if text[at : at + size].lower() in self._names)
            if (size := next(sizes, None)) is not None:
                yield at, at + size

    def change(self, text: str) -> str:
        """The text with one character changed in every special token, and in parts of one at its beginning and end."""
        pieces = [*self.places(text), *self._parts_at_edges(text)]
        if not pieces:
            return text
        changed = list(text)
        for begin, end in pieces:
            at = next((at for at in range(begin, end) if text[at].isascii() and text[at].isalnum()), begin)
            changed[at] = _neighbor(text[at])
        return "".join(changed)

    def _parts_at_edges(self, text: str) -> Iterator[Span]:
        most = max(self._sizes, default=1) - 1
        for found in self._last.finditer(text[:most]):
            head = text[: found.end()].lower()
            if any(name.endswith(head) and name != head for name in self._names):
                yield 0, found.end()
        for found in self._first.finditer(text, max(0, len(text) - most)):
            tail = text[found.start() :].lower()
            if any(name.startswith(tail) and name != tail for name in self._names):
                yield found.start(), len(text)

    def differing(self, text: str, changed: str) -> list[Span] | None:
        """The special tokens of a text that differ in its changed rendering; they may overlap.

        None where the renderings differ in more than characters of the same kind.
        """
        if len(text) != len(changed) or any(a.isalnum() != b.isalnum() for a, b in zip(text, changed, strict=True)):
            return None
        return [place for place in self.places(text) if text[slice(*place)] != changed[slice(*place)]]


def _one_of(characters: set[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(characters))) or "(?!)", re.IGNORECASE)


def _neighbor(character: str) -> str:
    """Another character of the same kind: templates that look at kinds, or escape some, do the same with it."""
    if not character.isascii():
        return chr(ord(character) ^ 1)
    if character.isalnum():
        return chr(ord(character) + (-1 if character in "zZ9" else 1))
    return {"<": ">", ">": "<", "^": "|"}.get(character, "^")


def change_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with all of its texts changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): change_texts(each, change) for key, each in value.items()}
    return [change_texts(each, change) for each in value] if isinstance(value, list) else value


def change_literals(node: "nodes.Node", change: Callable[[str], str]) -> None:
    """Change the texts that a template writes, in its syntax tree; those that it compares or looks for stay."""
    from jinja2 import nodes

    if isinstance(node, nodes.TemplateData):
        node.data = change(node.data)
    elif isinstance(node, nodes.Const) and isinstance(node.value, str):
        node.value = change(node.value)
    is_called = isinstance(node, nodes.Call | nodes.Filter | nodes.Test)
    for child in node.iter_child_nodes(exclude=("args", "kwargs") if is_called else None):
        if not isinstance(child, nodes.Compare):
            change_literals(child, change)
