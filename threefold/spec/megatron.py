"""Releases of Megatron Bridge and what was read from their wheels: which families they train, and where they refuse a
plan.

The facts are in `megatron.json`, which `tools/read_megatron.py` makes from the published wheels. Rules ask here, and
`interop/megatron` for the release that a plan is exported for.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

_FACTS = Path(__file__).parent / "megatron.json"


class Named(Protocol):
    """A release, by the two names that people use for it."""

    @property
    def bridge(self) -> str:
        """The version of Megatron Bridge."""

    @property
    def container(self) -> str:
        """The NeMo container that holds it, such as 26.08."""


AnyRelease = TypeVar("AnyRelease", bound=Named)


@dataclass(frozen=True, slots=True)
class BridgeRelease:
    """A release of Megatron Bridge, with the Megatron Core that it was published with."""

    bridge: str
    core: str
    container: str
    architectures: tuple[str, ...]  # class names of Hugging Face that it has a bridge for
    families: frozenset[str]  # those of ours among them


@dataclass(frozen=True, slots=True)
class Place:
    """Where Megatron refuses something: a file under `megatron/`, and its line by version of Bridge."""

    file: str
    lines: dict[str, int]

    def holds_for(self, release: BridgeRelease) -> bool:
        return release.bridge in self.lines

    def __str__(self) -> str:
        """As of the newest release that has it: `megatron-core 0.19.2, core/transformer/transformer_config.py:1715`."""
        release = next(known for known in reversed(bridge_releases()) if known.bridge in self.lines)
        is_core = not self.file.startswith("bridge/")
        package = f"megatron-core {release.core}" if is_core else f"megatron-bridge {release.bridge}"
        return f"{package}, {self.file}:{self.lines[release.bridge]}"


@lru_cache(maxsize=1)
def bridge_releases() -> tuple[BridgeRelease, ...]:
    """Oldest first."""
    releases = []
    for facts in _facts()["releases"]:
        sets = {"architectures": tuple(facts["architectures"]), "families": frozenset(facts["families"])}
        releases.append(BridgeRelease(**{**facts, **sets}))
    return tuple(releases)


@lru_cache(maxsize=1)
def places() -> dict[str, Place]:
    """By the name of the rule that says so first."""
    return {name: Place(**place) for name, place in _facts()["places"].items()}


@lru_cache(maxsize=1)
def _facts() -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(_FACTS.read_text(encoding="utf-8"))
    return facts


def version(text: str) -> tuple[int, ...]:
    """Numbers of a version; a part that is no number ends it."""
    numbers = []
    for part in text.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def is_release_name(text: str) -> bool:
    """Whether a text can name a NeMo container or a version of Megatron Bridge: two numbers or more."""
    return len(version(text)) >= 2


def choose_release(named: str | None, releases: Sequence[AnyRelease]) -> tuple[AnyRelease, str]:
    """The release that a plan's `stack.release` names, and a remark where another one had to stand in for it.

    A plan names a NeMo container (26.06, 26.06.01) or a version of Megatron Bridge (0.5, 0.5.1). Without a name, or
    with one that says neither, it is the newest release.
    """
    newest = releases[-1]
    if named is None:
        return newest, ""
    numbers = version(named)
    if not is_release_name(named):
        return newest, f"no release of NeMo or Megatron Bridge is {named}: the names are those of {newest.bridge}"
    is_container = numbers[0] >= 20
    for release in reversed(releases):
        if version(release.container if is_container else release.bridge)[:2] == numbers[:2]:
            return release, ""
    older = [r for r in releases if version(r.container if is_container else r.bridge) <= numbers]
    nearest = older[-1] if older else releases[0]
    return nearest, f"no wheel of {named} was read: the names are those of {nearest.bridge}"


def release_of(named: str | None) -> BridgeRelease:
    """The release that rules judge a plan for."""
    return choose_release(named, bridge_releases())[0]
