"""The entries of `job.data`: a known name, or a path, each with an optional weight.

The engine opens them (`engine/data/open_sources.py`), and the rule `data-exists` looks whether they are here. Relative
paths are relative to the folder that one stands in, for both.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SYNTHETIC = ("synthetic", "synthetic-zipf")
EMBEDDED = "embedded"


@dataclass(frozen=True, slots=True)
class DataEntry:
    """One entry of `job.data`."""

    name: str
    weight: float | None = None  # None if the entry states no weight

    @property
    def is_built_in(self) -> bool:
        """Whether the data comes with the engine, so that there is no file."""
        return self.name == EMBEDDED or self.name in SYNTHETIC


def parse_entries(data: str | Sequence[str]) -> list[DataEntry]:
    """Parse entries of the form `path` or `path:weight`. If a file has the whole text as its name, it is the path."""
    entries = []
    for text in (data,) if isinstance(data, str) else data:
        name, colon, tail = text.rpartition(":")
        if not colon or not name or not _is_number(tail) or file_exists(text):
            entries.append(DataEntry(text))
        else:
            entries.append(DataEntry(name, float(tail)))
    return entries


def file_exists(name: str) -> bool:
    """Whether a file or folder has this name. One that cannot be a name at all is not there."""
    try:
        return Path(name).exists()
    except (OSError, ValueError):  # too long, or with a null byte
        return False


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
