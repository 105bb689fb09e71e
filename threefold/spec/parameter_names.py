"""Names of parameters: which part of a model each belongs to, and which of them a job freezes.

The names are those of the engine, such as `layers.3.mixer.q.weight` or `layers.3.ffn.experts.down`; the plan-file
reference lists them. The engine asks `is_frozen` for each parameter that it has, `cost` for each that it counts, and
the rules for the patterns that freeze nothing.
"""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

PARTS = ("vision", "projector", "language")
_PREFIXES = {"vision.": "vision", "projector.": "projector"}  # all other parameters are the language model's


def part_of(name: str) -> str:
    """The part of a model that a parameter belongs to: `vision`, `projector` or `language`."""
    return next((part for prefix, part in _PREFIXES.items() if name.startswith(prefix)), "language")


def freezes(entry: str, name: str) -> bool:
    """Whether one entry of `job.freeze`, the name of a part or a pattern of names, freezes a parameter."""
    return part_of(name) == entry if entry in PARTS else fnmatchcase(name, entry)


def is_frozen(name: str, freeze: Iterable[str]) -> bool:
    """Whether any entry of `job.freeze` freezes a parameter. Those of an indexer never train: its choice of keys has no
    gradient."""
    return ".indexer." in name or any(freezes(entry, name) for entry in freeze)


def idle_patterns(freeze: Iterable[str], names: Sequence[str]) -> list[str]:
    """The patterns of `job.freeze` that freeze none of these parameters."""
    return [entry for entry in freeze if entry not in PARTS and not any(freezes(entry, name) for name in names)]
