"""Plan files: TOML in, TOML out, `path=value` overrides on top."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from threefold.findings import Finding
from threefold.plan.parse import Fields, Parsed, parse
from threefold.plan.plan import Plan
from threefold.plan.table import FIELDS
from threefold.toml_file import load_toml


def read_plan(path: str, overrides: Sequence[str] = (), changes: Mapping[str, Any] | None = None) -> Parsed:
    """Read a plan file and apply overrides, and then changes by field; problems come back as findings, never as
    exceptions."""
    raw, findings = load_toml(Path(path))
    overridden, more = parse_overrides(overrides)
    findings.extend(more)
    if findings:
        return Parsed(None, {}, (), findings)
    return parse(raw, {**overridden, **(changes or {})}, folder=Path(path).parent)


def parse_overrides(overrides: Sequence[str]) -> tuple[Fields, list[Finding]]:
    """`layout.ep=16`: the value is TOML or JSON where it parses as such, else plain text; null takes a field back."""
    fields: Fields = {}
    findings = []
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not path.strip():
            problem = f"{override!r} is not path=value"
            findings.append(
                Finding(rule="unknown-field", at=path or "override", problem=problem, advice="write it as layout.ep=16")
            )
            continue
        fields[path.strip()] = _value(path.strip(), text.strip())
    return fields, findings


def dump_plan(plan: Plan, complete: bool = False, stating: Sequence[str] = ()) -> str:
    """The plan as TOML: what differs from the defaults, also the fields in `stating`, or everything."""
    fields = dict(plan.written)
    defaults = {p: f.default for p, f in FIELDS.items() if f.default is not None and (complete or p in stating)}
    return dump_fields(defaults | fields)


def dump_fields(fields: Fields) -> str:
    doc: dict[str, Any] = {}
    for path in FIELDS:
        if path not in fields or path.startswith("model."):
            continue
        table, _, name = path.rpartition(".")
        value = fields[path]
        home = doc.setdefault(table, {}) if table else doc
        home[name] = list(value) if isinstance(value, tuple) else value
    cut = {p.removeprefix("model."): v for p, v in fields.items() if p.startswith("model.")}
    if cut:
        doc["model"] = {"name": doc["model"], **cut}
    return tomli_w.dumps(doc)


_WORDS = {"true": True, "false": False, "null": None, "none": None}  # also as Python spells them


def _value(path: str, text: str) -> Any:
    if text.lower() in _WORDS and text in (text.lower(), text.capitalize()):
        return _WORDS[text.lower()]
    try:
        value = tomllib.loads(f"value = {text}")["value"] if "\n" not in text else text
    except (tomllib.TOMLDecodeError, RecursionError, ValueError):
        return text
    # A release 26.10 typed as a number would turn into 26.1.
    wants_text = path in FIELDS and FIELDS[path].types == (str,)
    return text if wants_text and isinstance(value, int | float) else value
