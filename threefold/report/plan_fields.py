"""The page of every plan field (docs/reference/plan-fields.md), made from the declarations in `plan/plan.py`."""

from threefold.fields import MAX_RANKS, Field
from threefold.interop.megatron.field_names import PLAIN
from threefold.plan.aliases import names_of
from threefold.plan.table import AUTO, FIELDS, FREE, TABLES

PAGE = "docs/reference/plan-fields.md"
_TYPES = {int: "integer", float: "number", bool: "boolean", str: "text", list: "list"}
_INTRODUCTION = f"""# Reference: every field of a plan

`threefold schema --markdown` writes this page from the declarations of the fields, and a test holds that it is current.
What the tables mean together is in [plan-file.md](plan-file.md).

Megatron's name is the setting of Megatron Bridge that takes the field's value as it is, or else the names that a plan
accepts in the field's place. A dash means that there is none: `threefold export` then writes several settings for the
field, or says that it has none. A field with a star may be `"{AUTO}"` in a draft, which `threefold plan` fills in.
"""
_ABOUT = {
    "": "Model and target",
    "cluster": "`cluster`: the machine",
    "job": "`job`: what is trained",
    "layout": "`layout`: the degrees of both grids",
    "knobs": "`knobs`: time against memory",
    "run": "`run`: how a run is kept",
    "stack": "`stack`: versions of the software",
}


def plan_fields_page() -> str:
    """The page as Markdown."""
    parts = [_INTRODUCTION]
    for table in ("", *TABLES):
        rows = [_row(field) for path, field in FIELDS.items() if _table_of(path) == table]
        head = "| field | type | default | range | meaning | Megatron's name |\n|---|---|---|---|---|---|"
        parts.append("\n".join([f"## {_ABOUT[table]}\n", head, *rows]) + "\n")
    return "\n".join(parts)


def _table_of(path: str) -> str:
    table = path.partition(".")[0]
    return table if table in TABLES else ""


def _row(field: Field) -> str:
    star = "*" if field.path in FREE else ""
    types = " or ".join(_TYPES[kind] for kind in field.types)
    choices = f": {', '.join(f'`{choice}`' for choice in field.choices)}" if field.choices else ""
    names = ", ".join(f"`{name}`" for name in megatron_names(field.path)) or "-"
    cells = [f"`{field.path}`{star}", types, _default(field), _range(field), _escaped(field.doc) + choices, names]
    return f"| {' | '.join(cells)} |"


def field_page(field: Field) -> str:
    """A page about one field: what it is, what it can be, and how it is written."""
    types = " or ".join(_TYPES[kind] for kind in field.types)
    facts = {"Type": types, "Default": _default(field), "Range": _range(field)}
    facts["Choices"] = ", ".join(f"`{choice}`" for choice in field.choices)
    facts["Megatron's name"] = ", ".join(f"`{name}`" for name in megatron_names(field.path))
    facts["In a draft"] = f'may be `"{AUTO}"`, which `threefold plan` fills in' if field.path in FREE else ""
    rows = [f"| {name} | {text} |" for name, text in facts.items() if text and text != "-"]
    doc = field.doc[:1].upper() + field.doc[1:]
    example = field.choices[0] if field.choices else {bool: "true", int: "8", float: "0.5"}.get(field.types[0], "VALUE")
    head = [f"# {field.path}", "", f"{doc}.", "", "| | |", "|---|---|", *rows, ""]
    return "\n".join([*head, f"    threefold check plan.toml {field.path}={example}", ""])


def megatron_names(path: str) -> list[str]:
    """The settings of Megatron Bridge that take a field's value as it is; else the names that set it with others."""
    exported = [name for row in PLAIN if row.field == path for name in (row.path, *row.also)]
    return exported or names_of(path)


def _default(field: Field) -> str:
    if field.default is None:
        return "-"
    value = list(field.default) if isinstance(field.default, tuple) else field.default
    text = str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)
    return f"`{text}`"


def _range(field: Field) -> str:
    low, high = field.at_least, field.at_most
    if low is None:
        return "-"
    return f"{low:g} or more" if high is None or high >= MAX_RANKS else f"{low:g} to {high:,g}"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")
