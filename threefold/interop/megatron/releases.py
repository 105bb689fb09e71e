"""Releases of Megatron Bridge and Megatron Core, and the names that each of them accepts.

The names come from `wheel_fields.json`, which `tools/read_wheels.py` makes from the published wheels. An
export looks every name up here before it writes it.
"""

import json
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from threefold.spec.megatron import choose_release, version

PACKING_SPECS = ("offline_packing_specs", "packed_sequence_specs")  # by their names now and until 0.5
_FACTS = Path(__file__).parent / "wheel_fields.json"


@dataclass(frozen=True)
class Argument:
    """An argument of Megatron-LM."""

    name: str
    field: str  # the field of Megatron's configuration that it sets
    kind: str  # flag: sets true; off: sets false; value; list: several words


@dataclass(frozen=True)
class Release:
    """One release of Megatron Bridge with the Megatron Core that it was published with."""

    bridge: str
    core: str
    container: str  # the NeMo container that holds both, such as 26.08
    groups: dict[str, list[str]]
    functions: dict[str, list[str]]
    recipes: dict[str, list[str]]
    precision_recipes: list[str]
    choices: dict[str, list[str]]  # by override: the texts that a field may have
    arguments: dict[str, list[str]]

    def __hash__(self) -> int:
        return hash(self.bridge)

    @property
    def number(self) -> tuple[int, ...]:
        return version(self.bridge)

    def has_field(self, path: str, model_kind: str = "gpt", dataset: str = "pretrain") -> bool:
        """Whether a dotted override names a field of a class in the wheels."""
        group, _, name = path.partition(".")
        if not name:
            return group in self.groups["container"]
        if group == "model" and model_kind == "hybrid" and name in self._names.get("model.hybrid.lacks", ()):
            return False
        if group == "model":
            return name in self._names["model.gpt"] or name in self._names.get(f"model.{model_kind}", ())
        if group == "dataset":
            outer, _, inner = name.partition(".")
            is_inside = not inner or (outer in PACKING_SPECS and inner in self._names.get("dataset.packing", ()))
            return is_inside and outer in self._names[f"dataset.{dataset}"]
        return group in self.groups["container"] and name in self._names.get(group, ())

    @cached_property
    def _names(self) -> dict[str, frozenset[str]]:
        return {group: frozenset(names) for group, names in self.groups.items()}

    @cached_property
    def by_argument(self) -> dict[str, Argument]:
        """The arguments of Megatron-LM by name. Megatron Core 0.16 was published without them."""
        found = {}
        for kind, words in self.arguments.items():
            for word in words:
                name, _, field = word.partition("=")
                found[name] = Argument(name, field or name[2:].replace("-", "_"), kind)
        return found

    @cached_property
    def by_field(self) -> dict[str, Argument]:
        """The first argument that sets a field."""
        found: dict[str, Argument] = {}
        for argument in self.by_argument.values():
            found.setdefault(argument.field, argument)
        return found


@lru_cache(maxsize=1)
def known_releases() -> tuple[Release, ...]:
    """Oldest first."""
    facts = json.loads(_FACTS.read_text(encoding="utf-8"))
    return tuple(Release(**release) for release in facts["releases"])


@lru_cache(maxsize=1)
def every_override() -> frozenset[str]:
    """Every dotted override that some release has, of any kind of model and any task."""
    return frozenset(
        f"{group.partition('.')[0]}.{name}"
        for release in known_releases()
        for group, names in release.groups.items()
        if group != "container"
        for name in names
    )


def is_override(path: str) -> bool:
    """Whether some release has the override. Groups whose fields were not read (`peft`, `profiling`) pass whole."""
    group, _, name = path.partition(".")
    if any(known.startswith(f"{group}.") for known in every_override()):
        return not name or f"{group}.{name.partition('.')[0]}" in every_override()
    return any(group in release.groups["container"] for release in known_releases())


def find_release(named: str | None, has_arguments: bool = False) -> tuple[Release, str]:
    """The release that a plan's `stack.release` names, and a remark where another one had to stand in for it.

    `has_arguments`: one whose wheel has Megatron-LM's arguments.
    """
    releases = [release for release in known_releases() if release.arguments or not has_arguments]
    return choose_release(named, releases)
