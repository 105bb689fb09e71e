"""Families and places are read from wheels without importing them, and the facts that rules use are those."""

import os
import zipfile
from pathlib import Path

import pytest
from megatron_exports import recipe
from read_megatron import PAGE, architectures, as_json, followed, lines_of, read
from read_wheels import PAIRS, Sources

from threefold.interop.megatron.releases import known_releases
from threefold.plan.parse import change
from threefold.rules.all import RULES, check, errors
from threefold.spec.families import BY_TYPE
from threefold.spec.megatron import bridge_releases, places, release_of

MODELS = {
    "megatron/bridge/models/__init__.py": "",
    "megatron/bridge/models/a/a_bridge.py": """
from transformers import LlamaForCausalLM
NAME = "Qwen3MoeForCausalLM"
@MegatronModelBridge.register_bridge(source=LlamaForCausalLM, target=GPTModel)
class A: ...
@MegatronModelBridge.register_bridge(source=NAME, target=GPTModel)
class B: ...
register_bridge_implementation(source="OlmoeForCausalLM", target=GPTModel, bridge_class=B)
raise RuntimeError("imported")
""",
    "megatron/core/config.py": "x = 1\nraise ValueError('no pipeline with offload')\n",
}


def wheel(path: Path, files: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def test_registered_bridges_are_found_however_they_are_named(tmp_path: Path) -> None:
    found = architectures(Sources([wheel(tmp_path / "a.whl", MODELS)]))
    assert found == ["LlamaForCausalLM", "OlmoeForCausalLM", "Qwen3MoeForCausalLM"]


def test_a_place_is_the_line_with_the_words(tmp_path: Path) -> None:
    archive = zipfile.ZipFile(wheel(tmp_path / "a.whl", MODELS))
    assert lines_of([archive], "core/config.py", "no pipeline with offload") == [2]
    assert lines_of([archive], "core/config.py", "another message") == []
    assert lines_of([archive], "core/gone.py", "x") == []


def test_every_rule_that_follows_megatron_has_its_place() -> None:
    named = {slug for slug, rule in RULES.items() if rule.refused_in}
    assert set(followed()) == set(places())
    for slug in named:
        rule, place = RULES[slug], places()[slug]
        assert rule.refused_in is not None
        assert rule.refused_in[0] == place.file
        assert rule.follows.startswith(("megatron-core ", "megatron-bridge "))
        assert rule.follows.endswith(f"{place.file}:{list(place.lines.values())[-1]}")


def test_releases_are_those_whose_names_are_known() -> None:
    ours = [(release.bridge, release.core, release.container) for release in bridge_releases()]
    assert ours == [(release.bridge, release.core, release.container) for release in known_releases()]
    assert ours == [(bridge, *pair) for bridge, pair in PAIRS.items()]
    assert [release_of(name).bridge for name in (None, "26.06", "0.4", "0.4.1")] == ["0.6.2", "0.5.1", "0.4.2", "0.4.2"]


@pytest.mark.parametrize(
    ("family", "since"),
    [
        ("glm4_moe", "0.3.1"),
        ("olmoe", "0.3.1"),
        ("minimax_m2", "0.4.2"),
        ("ernie4_5_moe", "0.5.1"),
        ("glm_moe_dsa", "0.5.1"),
        ("gemma4", "0.5.1"),
        ("mixtral", None),
        ("deepseek_v32", None),
        ("qwen2_moe", None),
        ("granitemoe", None),
    ],
)
def test_families_that_bridge_trains_by_release(family: str, since: str | None) -> None:
    """Read by hand in the wheels: `register_bridge(source=...)` under megatron/bridge/models."""
    have = [release.bridge for release in bridge_releases() if family in release.families]
    assert have == ([] if since is None else [r.bridge for r in bridge_releases() if r.bridge >= since])
    assert all(release.families <= set(BY_TYPE) for release in bridge_releases())


@pytest.mark.parametrize(("release", "refused"), [("0.4.2", ["bridge-trains-family"]), ("0.5.1", [])])
def test_a_model_of_text_needs_a_bridge_of_its_own(release: str, refused: list[str]) -> None:
    """Bridge 0.4.2 registers Qwen3_5MoeForConditionalGeneration, and Qwen3_5MoeForCausalLM from 0.5.1 on."""
    plan = change(recipe("tiny-qwen3.5-moe-256-4xcpu-fp32"), {"target": "megatron-bridge", "stack.release": release})
    found = [finding.rule for finding in errors(check(plan, notes=False))]
    assert [rule for rule in found if rule == "bridge-trains-family"] == refused


@pytest.mark.skipif("MEGATRON_WHEELS" not in os.environ, reason="MEGATRON_WHEELS names no folder with wheels")
def test_the_facts_are_those_of_the_wheels() -> None:
    assert as_json(read(Path(os.environ["MEGATRON_WHEELS"]))) == PAGE.read_text(encoding="utf-8")
