"""Settings under the names of Megatron and torchtitan: what each is, its releases, and what a plan calls it.

`settings.json` is written by `tools/read_settings.py` from the published wheels: for each name its classes with file,
type, default, first and last release.
"""

import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from threefold.lookup.entries import Entry, all_entries
from threefold.plan.aliases import resolve

SYSTEMS = {"megatron": "Megatron", "torchtitan": "torchtitan"}


@dataclass(frozen=True, slots=True)
class Setting:
    """One declaration of a name. An argument of Megatron-LM has the class `argument`, and its kind as its type."""

    system: str
    name: str
    holder: str
    file: str
    type: str
    default: str
    first: str
    last: str

    def to_json(self) -> dict[str, str]:
        return {field: getattr(self, field) for field in self.__slots__}


@cache
def settings() -> dict[str, tuple[Setting, ...]]:
    """Every setting by name, of all systems."""
    found: dict[str, list[Setting]] = {}
    for system, names in json.loads((Path(__file__).parent / "settings.json").read_text(encoding="utf-8")).items():
        for name, homes in names.items():
            found.setdefault(name, []).extend(Setting(system, name, *home) for home in homes)
    return {name: tuple(homes) for name, homes in found.items()}


@cache
def releases() -> dict[str, tuple[str, str]]:
    """The oldest and the newest release of each system that was read."""
    every = [setting for homes in settings().values() for setting in homes]
    return {
        system: (min(item.first for item in every if item.system == system), _newest(every, system))
        for system in SYSTEMS
        if any(item.system == system for item in every)
    }


def _newest(every: list[Setting], system: str) -> str:
    return max(item.last for item in every if item.system == system)


def matches(name: str) -> tuple[Setting, ...]:
    """The settings that a user's spelling means: with its group before it, as an argument, or as a field."""
    bare = name.strip().partition("=")[0].rpartition(".")[2]
    spellings = (bare, bare.lstrip("-").replace("-", "_"), f"--{bare.lstrip('-').replace('_', '-')}")
    return tuple(setting for spelling in dict.fromkeys(spellings) for setting in settings().get(spelling, ()))


def near(name: str) -> list[str]:
    return difflib.get_close_matches(_bare(name), settings(), n=3, cutoff=0.75)


def plan_field(name: str) -> str | None:
    """The plan's field that takes this name, or that is exported under it."""
    renamed = resolve(name, None) if not name.startswith("model.num_layers") else None
    if renamed and renamed[0]:
        return next(iter(renamed[0]))
    return _exported_fields().get(_bare(name))


def _bare(name: str) -> str:
    return name.rpartition(".")[2].lstrip("-").replace("-", "_")


@cache
def _exported_fields() -> dict[str, str]:
    """Fields of a plan by the names that Megatron has for them."""
    fields: dict[str, str] = {}
    for entry in all_entries():
        if entry.kind == "field" and "; Megatron: " in entry.answer:
            for name in entry.answer.partition("; Megatron: ")[2].rstrip(")").split(", "):
                fields.setdefault(name.rpartition(".")[2].strip(), entry.name)
    return fields


@cache
def _rule_texts() -> dict[str, str]:
    return {
        entry.name: f"{entry.name} {entry.answer} {entry.text}".lower()
        for entry in all_entries()
        if entry.kind == "rule"
    }


def rules_about(name: str, field: str | None) -> list[str]:
    """Rules whose slug or explanation names the setting, or its field of a plan, also in words."""
    bare = (field or "").rpartition(".")[2]
    in_words = [bare.replace("_", " "), bare.replace("_", "-")] if "_" in bare else []
    wanted = [text for text in (_bare(name).lower(), field, *in_words) if text]
    return [slug for slug, text in _rule_texts().items() if any(one in text for one in wanted)]


def span(setting: Setting) -> str:
    """Since when a release has the setting, and until when, as far as releases were read."""
    oldest, newest = releases()[setting.system]
    since = f"since {setting.first}" if setting.first != oldest else f"in {setting.first} already"
    return since if setting.last == newest else f"{since}, last in {setting.last}"


@cache
def setting_entries() -> tuple[Entry, ...]:
    return tuple(_entries())


def _entries() -> Iterator[Entry]:
    for name, homes in settings().items():
        first = homes[0]
        system = "Megatron-LM argument" if first.holder == "argument" else f"{SYSTEMS[first.system]} {first.holder}"
        default = f", default {first.default}" if first.default else ""
        yield Entry(
            "name", name, f"{system}: {first.type}{default}; {span(first)}", "", f"threefold find {name} --kind name"
        )
