"""JSON Schema of a plan file, for editors."""

from typing import Any

from threefold.fields import Field
from threefold.plan.budget import PATTERN
from threefold.plan.table import AUTO, FIELDS, FILE_FIELDS, FREE, TABLES
from threefold.spec.models import MODELS


def plan_schema() -> dict[str, Any]:
    tables = {
        name: {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                path.removeprefix(f"{name}."): _property(field)
                for path, field in FIELDS.items()
                if path.startswith(f"{name}.")
            },
        }
        for name in TABLES
    }
    cut = {p.removeprefix("model."): _property(f) for p, f in FIELDS.items() if p.startswith("model.")}
    name = {"type": "string", "description": FIELDS["model"].doc, "examples": sorted(MODELS)}
    model = {
        "anyOf": [
            name,
            {
                "type": "object",
                "additionalProperties": False,
                "required": ["name"],
                "properties": {"name": name, **cut},
            },
        ]
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Threefold plan",
        "type": "object",
        "required": ["model"],
        "additionalProperties": False,
        "properties": {"model": model, "target": _property(FIELDS["target"]), **tables},
    }


def _property(field: Field) -> dict[str, Any]:
    options = [_typed(field, kind) for kind in field.types]
    if field.path == "knobs.recompute":
        options.append({"type": "string", "pattern": PATTERN, "description": "a memory budget"})
    if field.path in FILE_FIELDS:
        options.append({"type": "string", "pattern": "^file:", "description": FILE_FIELDS[field.path]})
    if field.path in FREE:
        options.append({"const": AUTO, "description": "left to the search"})
    schema: dict[str, Any] = options[0] if len(options) == 1 else {"anyOf": options}
    schema = {**schema, "description": field.doc}
    if field.default is not None:
        schema["default"] = list(field.default) if isinstance(field.default, tuple) else field.default
    return schema


def _typed(field: Field, kind: type) -> dict[str, Any]:
    names = {int: "integer", float: "number", bool: "boolean", str: "string", list: "array"}
    schema: dict[str, Any] = {"type": names[kind]}
    words = {"enum": list(field.choices)} if field.choices else {}
    if kind is list:
        schema["items"] = {"type": "string", **words}
    elif kind is str:
        schema.update(words)
    elif kind in (int, float):
        if field.at_least is not None:
            schema["minimum"] = field.at_least
        if field.at_most is not None:
            schema["maximum"] = field.at_most
    return schema
