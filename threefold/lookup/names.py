"""Settings under the names of Megatron and torchtitan: what each is, its releases, and what a plan calls it.

`settings.json` is written by `tools/read_settings.py` from the published wheels: for each name its classes with file,
type, default, first and last release.
"""

import difflib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from threefold.interop.megatron.field_names import FLEX, MOVED
from threefold.interop.megatron.setting_facts import CONFLICTS, Conflict
from threefold.interop.megatron.setting_notes import NOTES
from threefold.lookup.entries import Entry, all_entries, shipped, table_rows
from threefold.plan.aliases import resolve
from threefold.spec.megatron import places

_FIELD = re.compile(r"`(?:layout|job|knobs|run|cluster|model)\.")
_HERE = "docs/reference/megatron-settings.md"
_NEVER_BOTH = ("model.cuda_graph_modules", "model.moe_flex_dispatcher_num_sms")  # Megatron Core asserts it
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
    written = name.strip().partition("=")[0].rpartition(".")[2]
    spellings = (written, bare(written), f"--{bare(written).replace('_', '-')}")
    return tuple(setting for spelling in dict.fromkeys(spellings) for setting in settings().get(spelling, ()))


def near(name: str) -> list[str]:
    return difflib.get_close_matches(bare(name), settings(), n=3, cutoff=0.75)


def plan_field(name: str) -> str | None:
    """The plan's field that takes this name, or that is exported under it."""
    renamed = resolve(name, None) if not name.startswith("model.num_layers") else None
    if renamed and renamed[0]:
        return next(iter(renamed[0]))
    return _exported_fields().get(bare(name))


def bare(name: str) -> str:
    """A name without its group, as a field is written."""
    return name.rpartition(".")[2].lstrip("-").replace("-", "_")


@cache
def _exported_fields() -> dict[str, str]:
    """Fields of a plan by the names that Megatron has for them."""
    fields: dict[str, str] = {}
    for entry in all_entries():
        if entry.kind == "field" and "; Megatron: " in entry.answer:
            for name in entry.answer.partition("; Megatron: ")[2].rstrip(")").split(", "):
                fields.setdefault(name.rpartition(".")[2].strip(), entry.name)
    for cells in _rows_of("export.md", "megatron-settings.md"):
        if _FIELD.match(cells[0]):
            for name in re.findall(r"`([\w.]+)`", cells[1]):
                fields.setdefault(bare(name), cells[0].split("`")[1])
    return fields


def _rows_of(*pages: str) -> Iterator[list[str]]:
    for name in pages:
        page = shipped("docs") / "reference" / name
        yield from table_rows(page.read_text(encoding="utf-8")) if page.exists() else ()


@cache
def variables() -> dict[str, str]:
    """Environment variables that an export sets, with value and reason."""
    return {
        name: f"{cells[1]}: {cells[2]}".replace("`", "")
        for cells in _rows_of("megatron-settings.md")
        if len(cells) == 3
        for name in re.findall(r"`([A-Z][A-Z0-9_]+)`", cells[0])
    }


@cache
def _rule_texts() -> dict[str, tuple[str, str]]:
    """What each rule holds, and all that is said of it."""
    return {
        entry.name: (entry.answer, f"{entry.name} {entry.answer} {entry.text}".lower())
        for entry in all_entries()
        if entry.kind == "rule"
    }


def rules_about(name: str, field: str | None) -> dict[str, str]:
    """Rules whose slug or explanation names the setting, or its field of a plan, also in words, with what they hold."""
    own = (field or "").rpartition(".")[2]
    in_words = [own.replace("_", " "), own.replace("_", "-")] if "_" in own else []
    wanted = [text for text in (bare(name).lower(), field, *in_words) if text]
    return {slug: what for slug, (what, text) in _rule_texts().items() if any(one in text for one in wanted)}


def _settings_read(conflict: Conflict) -> Iterator[str]:
    """The settings that decide whether the conflict is there, as its function names them."""
    code, values = conflict.holds.__code__, conflict.holds.__globals__
    for text in (*code.co_consts, *(values.get(name) for name in code.co_names)):
        if isinstance(text, str) and re.fullmatch(r"[a-z_0-9]+\.[a-z_0-9]+", text):
            yield text


@cache
def notes() -> dict[str, tuple[str, ...]]:
    """What is known of settings that no plan holds: what each does, and what must be set with it or left out."""
    found: dict[str, list[str]] = {}
    for path, note in NOTES.items():
        found.setdefault(bare(path.rstrip(".")), []).append(note)  # a group of settings has a dot at its end
    for conflict in CONFLICTS:
        place = places().get(f"setting:{conflict.name}")
        refused = f" ({place})" if place else ""
        text = f"{conflict.problem}: {conflict.advice}{refused}"
        for name in dict.fromkeys(map(bare, (conflict.at, *_settings_read(conflict)))):
            found.setdefault(name, []).append(text)
    for cells in _rows_of("megatron-settings.md"):
        for name in re.findall(r"`([\w.]+)`", cells[1] if len(cells) == 3 else cells[0]):
            found.setdefault(bare(name), []).append(f"{cells[-2]}: {cells[-1]}".replace("`", ""))
    for moved in MOVED:
        until = ".".join(map(str, moved.until))
        refused = ", and both together are refused" if moved.path in _NEVER_BOTH else ""
        for backend in FLEX if "{backend}" in moved.older else ("",):
            old, new = bare(moved.older.replace("{backend}", backend)), bare(moved.path)
            found.setdefault(old, []).append(f"up to Bridge {until}; {new} since{refused}")
            found.setdefault(new, []).append(f"{old} up to Bridge {until}{refused}")
    return {name: tuple(texts) for name, texts in found.items() if name}


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
        known = " ".join(notes().get(bare(name), ()))
        answer = f"{system}: {first.type}{default}; {span(first)}"
        yield Entry("name", name, answer, known, f"threefold find {name} --kind name")
    for name in notes().keys() - settings().keys():
        yield Entry("name", name, f"in no release that was read; {notes()[name][0]}", " ".join(notes()[name]), _HERE)
    for name, reason in variables().items():
        yield Entry(
            "name", name, f"environment variable of an export, {reason}", "", "docs/reference/megatron-settings.md"
        )
