"""Which files a caller of the server may name: those inside the folders that the server was started with."""

import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_REFERENCE = re.compile(r"(?:hf|file):(.+)")  # values of a plan that name a file or folder
_PATH_FIELDS = ("job.data", "job.val_data", "job.tokenizer")
MOST_PLAN_BYTES = 2**20
MOST_ENTRIES = 20_000


class OutsideError(ValueError):
    """A path that the server was not started for."""


def inside(path: str, folders: Sequence[Path]) -> Path:
    """The path with links resolved, where it lies inside one of the folders. A relative path starts at the first."""
    full = (folders[0] / path).resolve()
    if not any(full.is_relative_to(folder) for folder in folders):
        shown = ", ".join(str(folder) for folder in folders)
        raise OutsideError(f"{path} is outside of {shown}: start the server with `threefold mcp --folder DIR`")
    return full


def check_tree(path: Path, folders: Sequence[Path]) -> None:
    """Refuse a folder in which a link leads outside, or that holds too many files to be looked through."""
    for number, entry in enumerate(path.rglob("*") if path.is_dir() else ()):
        if entry.is_symlink():
            inside(str(entry), folders)
        if number >= MOST_ENTRIES:
            raise OutsideError(f"{path} holds more than {MOST_ENTRIES:,} files: name the file that is meant")


def check_overrides(overrides: Sequence[str], folders: Sequence[Path]) -> None:
    """Refuse overrides that name a file outside, or that are no override of a field."""
    for text in overrides:
        path, equals, value = text.partition("=")
        if not equals or path.startswith("-"):
            raise OutsideError(f"{text!r} is no override: write field=value, such as layout.ep=16")
        for named in _paths_in(path.strip(), value):
            inside(named, folders)


def check_plan(file: Path, folders: Sequence[Path]) -> None:
    """Refuse a plan file whose values name files outside. What cannot be read is left to the verb, which says so."""
    if not file.is_file() or file.stat().st_size > MOST_PLAN_BYTES:
        return
    try:
        plan = tomllib.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError):
        return
    for path, value in _leaves(plan, ""):
        for named in _paths_in(path, str(value)):
            inside(str(file.parent / named) if not Path(named).is_absolute() else named, folders)


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item, path)
    else:
        yield path, value


def _paths_in(field: str, value: str) -> Iterator[str]:
    """Files that a value names: behind `hf:` or `file:`, or as data or a tokenizer."""
    bare = value.strip("\"' ")
    match = _REFERENCE.match(bare)
    if match:
        yield match[1]
    elif field in _PATH_FIELDS and ("/" in bare or "." in bare):
        yield bare.partition("=")[2] or bare
