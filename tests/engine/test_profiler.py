"""Profiles of a run: ranges have names, nothing changes, and what was wrapped is put back."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import TINY, tiny_plan

from threefold.engine.build import Parts, build
from threefold.engine.moe.layer import MoeLayer
from threefold.engine.profiler import PROFILE, StepProfiler, annotations_of
from threefold.engine.train import train
from threefold.findings import FindingsError

pytestmark = pytest.mark.usefixtures("one_thread")
FIELDS = {**TINY, "job.data": "synthetic", "job.steps": 8}


def ranges_of(path: Path) -> Counter[str]:
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    return Counter(event["name"] for event in events if event.get("cat") == "user_annotation")


def say_nothing(text: str) -> None:
    pass


@pytest.mark.parametrize("more", [{}, {"knobs.recompute": ["moe", "layernorm"]}, {"model": "tiny-deepseek-v3"}])
def test_a_profiled_run_is_the_same_run(more: dict[str, Any], tmp_path: Path) -> None:
    plan = tiny_plan({**FIELDS, **more})
    plain = train(plan, tmp_path / "plain", say_nothing)
    profiled = train(plan, tmp_path / "profiled", say_nothing, profile="torch")
    assert plain.last["loss"] == profiled.last["loss"]
    found = ranges_of(tmp_path / "profiled" / PROFILE / "rank-0.json.gz")
    names = {"attention", "router", "dispatch", "experts", "combine", "loss", "optimizer", "step"}
    assert {f"threefold.{name}" for name in names} <= set(found)
    assert found["threefold.step"] == found["threefold.optimizer"] == 3
    assert [path.name for path in (tmp_path / "profiled" / PROFILE).iterdir()] == ["rank-0.json.gz"]


def methods_of(parts: Parts) -> list[Any]:
    layers = [m for chunk in parts.chunks.values() for m in chunk.modules() if isinstance(m, MoeLayer)]
    wrapped = [vars(layer.dispatcher).get("token_dispatch") for layer in layers]
    return [*wrapped, *(vars(layer).get("run_experts") for layer in layers), vars(parts.optimizer).get("step")]


def test_ranges_are_taken_away_again() -> None:
    parts = build(tiny_plan(FIELDS))
    before = methods_of(parts)
    with annotations_of(parts):
        assert all(method is not None for method in methods_of(parts))
    assert methods_of(parts) == before
    parts.close()


def test_a_run_that_ends_inside_the_window_leaves_its_trace(tmp_path: Path) -> None:
    train(tiny_plan({**FIELDS, "job.steps": 5}), tmp_path, say_nothing, profile="torch")
    assert ranges_of(tmp_path / PROFILE / "rank-0.json.gz")["threefold.step"] == 2


@pytest.mark.parametrize(("steps", "first"), [(1, 1), (3, 3), (4, 4)])
def test_a_short_run_profiles_its_last_step(steps: int, first: int, tmp_path: Path) -> None:
    said: list[str] = []
    train(tiny_plan({**FIELDS, "job.steps": steps}), tmp_path, said.append, profile="torch")
    assert ranges_of(tmp_path / PROFILE / "rank-0.json.gz")["threefold.step"] == 1
    assert any(f"profiling steps {first} to {steps} " in line for line in said)


def test_a_finished_run_has_no_step_to_profile(tmp_path: Path) -> None:
    plan = tiny_plan({**FIELDS, "job.steps": 2})
    train(plan, tmp_path, say_nothing)
    with pytest.raises(FindingsError, match=r"raise job.steps .* to 8") as caught:
        train(plan, tmp_path, say_nothing, profile="torch")
    assert [finding.rule for finding in caught.value.findings] == ["profile-has-steps"]
    assert not (tmp_path / PROFILE).exists()


def test_nsight_gets_ranges_and_no_second_trace(tmp_path: Path) -> None:
    parts = build(tiny_plan(FIELDS))
    profiler = StepProfiler(tmp_path, parts, 0, first=1, count=1, by_nsys=True)
    with profiler.step(1):
        assert vars(parts.optimizer).get("step") is not None
    profiler.finish(1)
    assert list((tmp_path / PROFILE).iterdir()) == []
    parts.close()
