"""The entries of `job.data` and `job.val_data`: a known name, or a path, each with an optional weight or epochs.

The engine opens them (`engine/data/open_sources.py`), and the rule `data-exists` looks whether they are here. Relative
paths are relative to the folder that one stands in, for both.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SYNTHETIC = ("synthetic", "synthetic-zipf")
EMBEDDED = "embedded"
SCENES = ("scenes", "scenes-held-out")  # drawn pictures with questions
EPOCHS = "x"  # behind a number: epochs of a source for each epoch of the sources without one
MEGATRON_SUFFIXES = (".bin", ".idx")
TEXT_FILES = (".txt", ".md", ".jsonl", ".json", ".parquet", ".arrow")  # the usual ones of those that a run encodes


@dataclass(frozen=True, slots=True)
class DataEntry:
    """One entry of `job.data`."""

    name: str
    weight: float | None = None  # share of the sequences; None if the entry states none
    epochs: float | None = None  # times its samples come in one epoch of the mixture; None if the entry states none

    @property
    def is_built_in(self) -> bool:
        """Whether the data comes with the engine, so that there is no file."""
        return self.name == EMBEDDED or self.name in SYNTHETIC or self.has_drawn_pictures

    @property
    def has_drawn_pictures(self) -> bool:
        return self.name in SCENES

    @property
    def exists(self) -> bool:
        """Whether the data is here: built in, a file, a folder, or the prefix of Megatron's two files."""
        return self.is_built_in or file_exists(self.name) or megatron_prefix(self.name) is not None

    @property
    def is_text(self) -> bool:
        """Whether the data is text that a run encodes when it opens it: a file of text or records, or such a folder."""
        if self.is_built_in or self.name.endswith(TEXT_FILES):
            return not self.is_built_in
        is_folder = file_exists(self.name) and Path(self.name).is_dir()
        return is_folder and not any(next(Path(self.name).glob(f"*{end}"), None) for end in (".tok", ".tar"))


def parse_entries(data: str | Sequence[str]) -> list[DataEntry]:
    """Parse entries of the form `path`, `path:weight` or `path:2x` (two epochs of it).

    If a file has the whole text as its name, it is the path.
    """
    entries = []
    for text in (data,) if isinstance(data, str) else data:
        name, colon, tail = text.rpartition(":")
        number = tail.removesuffix(EPOCHS)
        if not colon or not name or not _is_number(number) or file_exists(text):
            entries.append(DataEntry(text))
        elif tail.endswith(EPOCHS):
            entries.append(DataEntry(name, epochs=float(number)))
        else:
            entries.append(DataEntry(name, float(tail)))
    return entries


def parse_validation(data: str | Sequence[str] | None) -> dict[str, str]:
    """The validation sets of `job.val_data` by name: each is an entry of its own, `NAME=path` or `path`.

    A set without a name has that of its file or folder; where two would share one, they are numbered.
    """
    sets: dict[str, str] = {}
    for text in () if data is None else (data,) if isinstance(data, str) else data:
        given, equals, entry = text.partition("=")
        if not equals or not entry or not _is_label(given) or file_exists(text):
            [parsed] = parse_entries(text)
            given, entry = _label_of(parsed.name), text
        name, number = given, 2
        while name in sets:
            name, number = f"{given}-{number}", number + 1
        sets[name] = entry
    return sets


def file_exists(name: str) -> bool:
    """Whether a file or folder has this name. One that cannot be a name at all is not there."""
    try:
        return Path(name).exists()
    except (OSError, ValueError):  # too long, or with a null byte
        return False


def megatron_prefix(name: str) -> str | None:
    """The prefix of Megatron's PREFIX.bin and PREFIX.idx, from itself or either name; None where they are not both."""
    prefix = name[:-4] if name.endswith(MEGATRON_SUFFIXES) else name
    return prefix if prefix and all(file_exists(prefix + suffix) for suffix in MEGATRON_SUFFIXES) else None


def _label_of(path: str) -> str:
    stem = Path(path).name.partition(".")[0]
    return "".join(letter if _is_label(letter) else "-" for letter in stem) or "validation"


def _is_label(text: str) -> bool:
    """Whether a text can stand in the name of a metric."""
    return text.isascii() and bool(text) and all(letter.isalnum() or letter in "-_." for letter in text)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
