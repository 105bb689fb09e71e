"""Reads from Megatron's wheels which families Bridge trains, and where Megatron refuses what our rules refuse.

    python tools/read_megatron.py WHEELS

`WHEELS` is a folder as for `read_wheels.py`, and may hold releases that `PAIRS` there does not
list yet. Nothing of the wheels is imported. It writes `threefold/spec/megatron.json`; `upstream.py` says what a release
moves before it is supported.
"""

import ast
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from read_wheels import PAIRS, Sources, find_pair

from threefold.interop.megatron.setting_facts import CONFLICTS
from threefold.rules.all import RULES
from threefold.spec.hf import HF_CLASSES

PAGE = Path(__file__).parents[1] / "threefold" / "spec" / "megatron.json"


def architectures(sources: Sources) -> list[str]:
    """Class names of Hugging Face that some bridge is registered for."""
    found: set[str] = set()
    for module in sources.files:
        if module.startswith("megatron.bridge.models.") and (tree := sources.tree(module)):
            found.update(_registered(tree))
    return sorted(found)


def _registered(tree: ast.Module) -> Iterator[str]:
    texts = {
        target.id: node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        source = next((word.value for word in node.keywords if word.arg == "source"), None)
        if name not in ("register_bridge", "register_bridge_implementation") or source is None:
            continue
        if isinstance(source, ast.Constant):
            yield str(source.value)
        elif isinstance(source, ast.Name) and source.id != "source":  # a class, or a constant with its name
            yield str(texts.get(source.id, source.id))


def lines_of(wheels: list[zipfile.ZipFile], file: str, words: str) -> list[int]:
    """The lines of a file under `megatron/` that hold the words."""
    name = f"megatron/{file}"
    archive = next((wheel for wheel in wheels if name in wheel.namelist()), None)
    lines = archive.read(name).decode().splitlines() if archive else []
    return [number for number, line in enumerate(lines, 1) if words in line]


def followed() -> dict[str, tuple[str, str]]:
    """The file and the words that each rule follows, and each conflict of settings (`setting:NAME`)."""
    rules = {slug: rule.refused_in for slug, rule in RULES.items() if rule.refused_in is not None}
    return rules | {f"setting:{one.name}": one.place for one in CONFLICTS if one.place is not None}


def read(folder: Path) -> dict[str, Any]:
    releases, places = [], dict[str, dict[str, Any]]()
    for bridge, (core, container) in PAIRS.items():
        paths = find_pair(folder, bridge, core)
        if len(paths) != 2:
            continue
        known = architectures(Sources(paths))
        families = sorted({family.removesuffix("_text") for family, name in HF_CLASSES.items() if name in known})
        releases.append(
            {"bridge": bridge, "core": core, "container": container, "families": families, "architectures": known}
        )
        wheels = [zipfile.ZipFile(path) for path in paths]
        for name, where in followed().items():
            if lines := lines_of(wheels, *where):
                place = places.setdefault(name, {"file": where[0], "lines": {}})
                place["lines"][bridge] = lines[0]
    return {"source": "wheels of megatron-bridge and megatron-core on PyPI", "releases": releases, "places": places}


def as_json(facts: dict[str, Any]) -> str:
    """One release or place a line."""
    rows = [f' "source": {json.dumps(facts["source"])},', ' "releases": [']
    rows.append(",\n".join(f"  {json.dumps(release)}" for release in facts["releases"]))
    places = (f"  {json.dumps(slug)}: {json.dumps(place)}" for slug, place in sorted(facts["places"].items()))
    return "\n".join(["{", *rows, " ],", ' "places": {', ",\n".join(places), " }", "}"]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(as_json(read(Path(sys.argv[1]))), encoding="utf-8")
