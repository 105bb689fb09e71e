"""Cutting a trace into pieces: the same events come out, wherever the pieces end."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from traces import kernel, operator

from threefold.findings import FindingsError
from threefold.profile.readers.json_events import EventReader

TRICKY = [
    kernel('quote \\" } , { [ \\\\', 0, 1),
    kernel("},\n  {", 1, 1),
    operator("aten::mm", 2, 1, 1, **{"Input Dims": [[8, 4], [4, 2]], "nested": [{"a": 1}, {"b": [{}, {}]}]}),
    kernel("unicode \u00e4 \U0001f600", 3, 1),
    {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "}, {"}},
    {},
]


def pieces(text: bytes, size: int) -> Iterator[bytes]:
    return iter([text[at : at + size] for at in range(0, len(text), size)])


def names(text: bytes, size: int) -> list[str]:
    reader = EventReader(Path("trace"), pieces(text, size))
    return [event.name for events in reader.events() for event in events]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
@pytest.mark.parametrize("indent", [None, 2])
def test_any_cut_gives_the_same_events(size: int, indent: int | None) -> None:
    expected = [str(event.get("name", "")) for event in TRICKY]
    for content in (TRICKY, {"a": [{}, {"x": "]"}], "traceEvents": TRICKY, "z": {"k": [1, "}"]}}):
        assert names(json.dumps(content, indent=indent).encode(), size) == expected


def test_many_events_are_cut_by_guessing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses succeed: brackets are counted only for the last piece."""
    import threefold.profile.readers.json_events as module

    counted = []
    whole = module._last_whole
    monkeypatch.setattr(module, "_last_whole", lambda text: counted.append(len(text)) or whole(text))
    events = [kernel(f"k{number}", number, 1) for number in range(5000)]
    assert names(json.dumps({"traceEvents": events}).encode(), 100_000) == [f"k{n}" for n in range(5000)]
    assert len(counted) <= 2


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("empty", [[], {"traceEvents": []}, {"traceEvents": [], "x": 1}])
def test_traces_without_events(size: int, empty: Any) -> None:
    assert names(json.dumps(empty).encode(), size) == []


@pytest.mark.parametrize("seed", range(30))
def test_random_cuts_of_damaged_text_never_give_more_than_a_parser(seed: int) -> None:
    """What a JSON parser refuses is refused in pieces too, and what it reads is read alike."""
    draw = random.Random(seed)
    text = bytearray(json.dumps({"traceEvents": TRICKY}, indent=draw.choice([None, 1])).encode())
    for _ in range(draw.randrange(1, 3)):
        place = draw.randrange(len(text))
        text[place : place + draw.randrange(3)] = bytes(draw.choice(b'{}[]",:\\ a0') for _ in range(draw.randrange(3)))
    try:
        whole = msgspec.json.decode(bytes(text))
        expected = [str(event.get("name", "")) for event in whole["traceEvents"]]
    except (msgspec.MsgspecError, KeyError, TypeError, AttributeError):
        expected = None
    try:
        found: list[str] | None = names(bytes(text), draw.choice([1, 4, 60, 4000]))
    except FindingsError:
        found = None
    if expected is None:
        assert found is None
    elif found is not None:  # a field of a wrong kind is refused though the JSON is sound
        assert found == expected
