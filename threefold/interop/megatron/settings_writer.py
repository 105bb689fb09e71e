"""Settings of Megatron as they are collected from a plan, and their names in a release.

A setting is a dotted path, spelled as in the newest release of Megatron Bridge, with a plain value: a number, text, a
truth value, a tuple of these, or None for Megatron's null.
"""

from dataclasses import dataclass, field
from typing import Any

from threefold.interop.megatron.field_names import ARGUMENT_AGAINST, ARGUMENT_FIELDS, BRIDGE_ONLY, MOVED
from threefold.interop.megatron.inexpressible import Inexpressible
from threefold.interop.megatron.models import dataset_kind, model_kind
from threefold.interop.megatron.releases import Argument, Release
from threefold.plan.data_entries import MEGATRON_SUFFIXES, megatron_prefix, parse_entries
from threefold.plan.plan import Plan

Settings = dict[str, Any]
LARGEST_BITS = 64  # of a whole number; a larger one stays text, which no field takes for a number


@dataclass
class Writer:
    """Settings of one plan as they are collected."""

    plan: Plan
    release: Release
    to: str  # megatron-bridge or megatron-lm
    settings: Settings = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)  # the plan field behind each setting
    lost: list[Inexpressible] = field(default_factory=list)

    def put(self, source: str, path: str, value: Any) -> None:
        self.settings[path], self.sources[path] = value, source

    def lose(self, source: str, reason: str) -> None:
        """Name a field in the table, where the plan gives it another value than its default."""
        self._name(source, reason, is_said=False)

    def respell(self, source: str, reason: str) -> None:
        """Name a field that Megatron is told, but that an import reads back in another spelling."""
        self._name(source, reason, is_said=True)

    def always_lose(self, source: str, value: Any, reason: str) -> None:
        """Name a field also at its default, which Megatron does not share."""
        self.lost.append(Inexpressible(source, value, reason))

    def always_respell(self, source: str, value: Any, reason: str) -> None:
        """Name a field also at its default, which an import would take for something else."""
        self.lost.append(Inexpressible(source, value, reason, is_said=True))

    def _name(self, source: str, reason: str, is_said: bool) -> None:
        written = dict(self.plan.written)
        if source in written and source not in {item.field for item in self.lost}:
            self.lost.append(Inexpressible(source, written[source], reason, is_said))

    def is_stated(self, *paths: str) -> bool:
        """Whether an export says a field that a recipe would fill in. An argument line has no recipe behind it: it says
        the whole job."""
        if self.to == "megatron-lm" and any(path.startswith("job.") for path in paths):
            return True
        return any(path in self.plan.stated or path in dict(self.plan.written) for path in paths)


def value_of(plan: Plan, path: str) -> Any:
    table, _, name = path.rpartition(".")
    return dict(plan.written).get(path) if table == "model" else getattr(getattr(plan, table), name)


def paths_of_data(data: str | tuple[str, ...]) -> tuple[Any, ...] | None:
    """Prefixes of Megatron's datasets (PREFIX.bin and PREFIX.idx), with a weight before each where they have weights.

    None where an entry of `job.data` is something else.
    """
    entries = parse_entries(data)
    prefixes = [
        entry.name[: -len(MEGATRON_SUFFIXES[0])]
        if entry.name.endswith(MEGATRON_SUFFIXES)
        else megatron_prefix(entry.name)
        for entry in entries
    ]
    weights = [entry.weight for entry in entries]
    is_mixed = any(weight is None for weight in weights) and any(weight is not None for weight in weights)
    if is_mixed or not all(prefixes) or any(entry.is_built_in or entry.epochs for entry in entries):
        return None
    if weights[0] is None:
        return tuple(prefixes)
    return tuple(item for pair in zip(weights, prefixes, strict=True) for item in pair)


def data_of_paths(paths: Any) -> str | tuple[str, ...] | None:
    """`job.data` behind Megatron's data paths, as `paths_of_data` or a command line has them."""
    words = paths.split() if isinstance(paths, str) else list(paths) if isinstance(paths, tuple | list) else []
    if len(words) > 1 and isinstance(plain_value(str(words[0])), int | float):
        pairs = zip(words[0::2], words[1::2], strict=False)
        words = [f"{path}:{float(weight):g}" for weight, path in pairs if _is_weight(weight)]
    texts = tuple(str(word) for word in words)
    return texts[0] if len(texts) == 1 else texts or None


def _is_weight(word: Any) -> bool:
    return isinstance(plain_value(str(word)), int | float)


def plain_value(text: str) -> Any:
    """A number, a truth value or null where the text is one; else the text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.lower() in ("none", "null"):
        return None
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        return text if isinstance(number, int) and number.bit_length() > LARGEST_BITS else number
    return text


def spell(path: str, release: Release, backend: str | None = None, dataset: str = "") -> str:
    """The name of a setting in a release. `backend` is the flex dispatcher's, `dataset` a kind of dataset."""
    for moved in MOVED:
        if path.startswith(f"{moved.path}.") and release.number[:2] <= moved.until:
            return moved.older + path.removeprefix(moved.path)
        if moved.path == path and release.number[:2] <= moved.until and moved.dataset in ("", dataset):
            return moved.older.format(backend=backend or "deepep")
    return path


def argument_for(path: str, release: Release, backend: str | None = None) -> Argument | None:
    """Megatron-LM's argument for a setting."""
    if path in ARGUMENT_AGAINST:
        return release.by_argument.get(ARGUMENT_AGAINST[path])
    name = spell(path, release, backend).rpartition(".")[2]
    return release.by_field.get(ARGUMENT_FIELDS.get(path, name))


def leave_out_unknown(writer: Writer) -> None:
    """Drop settings that the release has no name for. What they would have said is named where the plan asks for it."""
    plan, release, kind = writer.plan, writer.release, model_kind(writer.plan.model)
    dataset = dataset_kind(plan)
    for path in list(writer.settings):
        name = spell(path, release, plan.knobs.dispatcher, dataset)
        if writer.to == "megatron-lm":
            is_known = path in BRIDGE_ONLY or argument_for(path, release, plan.knobs.dispatcher) is not None
            reason = f"Megatron-LM {release.core} has no argument for it"
        else:
            is_known = release.has_field(name, kind, dataset)
            reason = f"Megatron Bridge {release.bridge} has no field {name}"
        if not is_known:
            writer.lose(writer.sources.pop(path), reason)
            del writer.settings[path]
