"""Fields of a plan, declared once: type from the annotation, the rest as metadata of a frozen dataclass.

Parsing, the JSON Schema, `threefold show` and the documentation all read the same declaration.
"""

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any

MAX_INT = 2**31  # no batch or sequence length is larger; keeps arithmetic and messages sane
MAX_RANKS = 2**20  # nor any number of ranks
MAX_LAYERS = 10_000  # nor is any model deeper


def item(
    doc: str,
    default: Any = None,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    choices: tuple[str, ...] = (),
    in_file: bool = True,
) -> Any:
    """A field of a plan table."""
    metadata = {
        "doc": doc,
        "at_least": at_least,
        "at_most": at_most,
        "choices": choices,
        "in_file": in_file,
    }
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Field:
    """One field of the plan file as parsing sees it."""

    path: str
    types: tuple[type, ...]  # of int, float, bool, str, list
    optional: bool
    default: Any
    doc: str
    at_least: float | None
    at_most: float | None
    choices: tuple[str, ...]


def fields_of(table: type, prefix: str) -> dict[str, Field]:
    """Every field of a dataclass that a plan file may hold, by dotted path."""
    hints = typing.get_type_hints(table)
    found = {}
    for f in dataclasses.fields(table):
        meta: Mapping[str, Any] = f.metadata
        if not meta.get("in_file"):
            continue
        types, optional = _plain_types(hints[f.name])
        path = f"{prefix}.{f.name}"
        found[path] = Field(
            path=path,
            types=types,
            optional=optional,
            default=f.default,
            doc=meta["doc"],
            at_least=meta["at_least"],
            at_most=meta["at_most"],
            choices=meta["choices"],
        )
    return found


def _plain_types(hint: Any) -> tuple[tuple[type, ...], bool]:
    members = typing.get_args(hint) if isinstance(hint, UnionType) else (hint,)
    plain = []
    for member in members:
        if member is type(None):
            continue
        plain.append(list if typing.get_origin(member) is tuple else member)
    return tuple(plain), type(None) in members
