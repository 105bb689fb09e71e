"""Prints the shape of threefold/: files, lines, median file and imports that leave their folder, by package.

    python tools/tree_shape.py

Below the table stand folders of one to three modules inside packages, folders that lie deeper than three, and cycles
between a folder and the modules next to it. Joining files for a number helps nobody: this is to look at, not to pass.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent / "threefold"
DEEPEST = 3  # folders below threefold/
FEWEST = 4  # modules of a folder inside a package


def modules() -> dict[str, Path]:
    """The files by dotted name; a package has the name of its folder."""
    names = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imported(path: Path, names: dict[str, Path]) -> Iterator[str]:
    """The modules of threefold that a file imports, each import statement's once."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom) and node.module in names:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            found = {name if name in names else node.module for name in whole}
            yield from sorted(found)


def table(names: dict[str, Path], imports: dict[str, list[str]]) -> Iterator[str]:
    """One line a package: files, lines, median and largest file, and the share of imports that leave their folder."""
    by_package: dict[str, list[str]] = defaultdict(list)
    for name, path in names.items():
        parts = path.relative_to(ROOT).parts
        by_package[parts[0] if len(parts) > 1 else "top"].append(name)
    yield f"{'package':<12}{'files':>6}{'lines':>8}{'median':>8}{'largest':>9}{'imports':>9}{'leave':>7}"
    for package, members in [*sorted(by_package.items()), ("all", list(names))]:
        files = [name for name in members if names[name].name != "__init__.py"]
        sizes = [len(names[name].read_text(encoding="utf-8").splitlines()) for name in files] or [0]
        pairs = [(name, other) for name in members for other in imports[name]]
        leaving = sum(names[name].parent != names[other].parent for name, other in pairs)
        share = f"{leaving / len(pairs):.0%}" if pairs else "-"
        yield (
            f"{package:<12}{len(files):>6}{sum(sizes):>8}{median(sizes):>8.0f}{max(sizes):>9}{len(pairs):>9}{share:>7}"
        )


def small_folders() -> Iterator[str]:
    for folder in sorted({path.parent for path in ROOT.rglob("*.py")} - {ROOT}):
        count = sum(path.name != "__init__.py" for path in folder.glob("*.py"))
        is_leaf = not any(folder.glob("*/*.py"))
        if is_leaf and count < FEWEST and folder.parent != ROOT:
            yield f"{folder.relative_to(ROOT)}: {count} modules"


def deep_folders() -> Iterator[str]:
    for folder in sorted({path.parent for path in ROOT.rglob("*.py")}):
        if len(folder.relative_to(ROOT).parts) > DEEPEST:
            yield str(folder.relative_to(ROOT))


def cycles(names: dict[str, Path], imports: dict[str, list[str]]) -> Iterator[str]:
    """Folders that import a module or folder next to them and are imported by it, by way of others or not."""
    for folder in sorted({path.parent for path in names.values()}):
        prefix = ".".join(folder.relative_to(ROOT.parent).parts) + "."
        edges: dict[str, set[str]] = defaultdict(set)
        for name, others in imports.items():
            for other in others:
                if name.startswith(prefix) and other.startswith(prefix):
                    start, end = (each.removeprefix(prefix).partition(".")[0] for each in (name, other))
                    if start != end:
                        edges[start].add(end)
        for start in sorted(edges):
            reached: set[str] = set()
            new = set(edges[start])
            while new:
                reached |= new
                new = {after for each in new for after in edges.get(each, ())} - reached
            if start in reached and (folder / start).is_dir():
                yield prefix + start


def main() -> None:
    names = modules()
    imports = {name: list(imported(path, names)) for name, path in names.items()}
    print("\n".join(table(names, imports)))
    sections = {
        "inner folders of few modules": list(small_folders()),
        "folders that lie too deep": list(deep_folders()),
        "folders in a cycle with what lies next to them": list(cycles(names, imports)),
    }
    for title, lines in sections.items():
        print(f"\n{title}: {len(lines)}")
        print("".join(f"  {line}\n" for line in lines), end="")


if __name__ == "__main__":
    main()
