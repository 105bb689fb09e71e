"""JSON Schemas of what the verbs print with `--json`, which `tools/write_schemas.py` writes."""

import json
from pathlib import Path
from typing import Any

SCHEMAS = Path(__file__).parents[1] / "schemas"


def outputs() -> list[str]:
    """The outputs that have a schema: verbs, and forms of verbs such as `find-name`."""
    return sorted(path.stem for path in SCHEMAS.glob("*.json"))


def output_schema(name: str) -> dict[str, Any]:
    schema: dict[str, Any] = json.loads((SCHEMAS / f"{name}.json").read_text(encoding="utf-8"))
    return schema


def required_paths(schema: dict[str, Any], before: str = "") -> list[str]:
    """Keys that readers of an output can rely on, with their types, such as `findings[].rule:string`."""
    paths = []
    for name, inner in schema.get("properties", {}).items():
        path = f"{before}.{name}" if before else name
        if name in schema.get("required", []):
            kinds = inner.get("type", [])
            paths.append(f"{path}:{kinds if isinstance(kinds, str) else '|'.join(kinds)}")
            paths += required_paths(inner, path)
    if "items" in schema:
        paths += required_paths(schema["items"], f"{before}[]")
    return paths
