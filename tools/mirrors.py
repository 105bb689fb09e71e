"""Prints which functions of the engine changed since the memory model that mirrors them was last looked at.

    python tools/mirrors.py             what changed, and which modules of the model to look at
    python tools/mirrors.py --looked    remember the engine as it is now

The modules of `cost/memory/threefold/` count the tensors of engine files, which their docstrings name behind the word
"Mirrors". `mirrored_engine.json` has a hash of every function of these files. `tests/cost/test_mirrors.py` compares.
"""

import ast
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "threefold"
MODEL = PACKAGE / "cost" / "memory" / "threefold"
HASHES = ROOT / "tests" / "cost" / "mirrored_engine.json"
_FILE = re.compile(r"`(engine/[\w/]+\.py)`")
Hashes = dict[str, dict[str, str]]  # by engine file and function


def mirrored_files() -> dict[str, list[str]]:
    """The engine files that each module of the memory model mirrors."""
    found = {}
    for path in [*sorted(MODEL.rglob("*.py")), PACKAGE / "cost" / "vision.py"]:
        if path.name == "__init__.py":
            continue
        _, _, behind = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\nMirrors ")
        assert behind, f"{path}: its docstring does not say which engine files it mirrors"
        found[str(path.relative_to(PACKAGE))] = _FILE.findall(behind)
    return found


def engine_hashes() -> Hashes:
    """The hashes of all functions in the mirrored files."""
    files = sorted({file for files in mirrored_files().values() for file in files})
    return {file: dict(sorted(_function_hashes((PACKAGE / file).read_text(encoding="utf-8")))) for file in files}


def _function_hashes(source: str) -> Iterator[tuple[str, str]]:
    """Functions and methods by name; what stands outside of them is the class or the `module`. Comments, docstrings and
    line breaks do not count."""

    def walk(node: ast.Module | ast.ClassDef, prefix: str) -> Iterator[tuple[str, str]]:
        rest = []
        for child in node.body:
            if isinstance(child, ast.ClassDef):
                yield from walk(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.FunctionDef):
                yield f"{prefix}{child.name}", _hash([child])
            elif not isinstance(child, ast.Import | ast.ImportFrom):
                rest.append(child)
        yield f"{prefix}(outside functions)", _hash(rest)

    return walk(ast.parse(source), "")


def _hash(nodes: list[ast.stmt]) -> str:
    for node in (each for root in nodes for each in ast.walk(root)):
        body = getattr(node, "body", None)
        if isinstance(body, list) and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            body[0].value.value = ""
    text = re.sub(r"[\s\"']", "", "\n".join(map(ast.unparse, nodes)))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def changes() -> Iterator[str]:
    """A line for each engine file that changed: its functions, and the modules that mirror the file."""
    known: Hashes = json.loads(HASHES.read_text(encoding="utf-8"))
    now, mirrored = engine_hashes(), mirrored_files()
    for file in sorted({*known, *now}):
        old, new = known.get(file, {}), now.get(file, {})
        functions = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
        if functions:
            modules = [module for module, files in mirrored.items() if file in files] or ["no module mirrors it now"]
            yield f"{file}: {', '.join(functions)}; look at {', '.join(modules)}"


def main() -> int:
    if sys.argv[1:] == ["--looked"]:
        rows = (f"{json.dumps(file)}: {json.dumps(hashes)}" for file, hashes in engine_hashes().items())
        HASHES.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")  # a line a file: few conflicts
        return 0
    found = list(changes())
    print("\n".join(found) or "nothing changed since the model was looked at")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
