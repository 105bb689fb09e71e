"""Damaged and hostile files through every verb that opens them: one finding each, and bounded time and memory.

`benchmarks/drawn_cases.py hostile` draws more of them.
"""

import os
import time
from collections import Counter
from pathlib import Path

import pytest
from hostile_files import MAKERS
from hostile_runs import faults, kind_of, make_sound

SEED = int(os.environ.get("THREEFOLD_SEED", time.time_ns() % 1_000_000))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sound(tmp_path_factory.mktemp("sound"))


@pytest.mark.parametrize("number", range(2 * len(MAKERS)))
def test_hostile_files(number: int, sound: Path, tmp_path: Path) -> None:
    assert faults(number, "fixed", tmp_path, sound) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", range(504))
def test_hostile_files_drawn_anew(number: int, sound: Path, tmp_path: Path) -> None:
    print(f"THREEFOLD_SEED={SEED}")
    assert faults(number, str(SEED), tmp_path, sound) == []


def test_every_kind_of_file_is_drawn_as_often() -> None:
    drawn = Counter(map(kind_of, range(504)))
    assert set(drawn.values()) == {504 // len(MAKERS)}
