"""A made-up release whose statements, fields and defaults moved: the watch names the rules that follow them."""

from pathlib import Path

import pytest
from test_read_megatron import wheel
from upstream import Release, find_releases, main, watch

CONFIG = """
from dataclasses import dataclass

@dataclass
class TransformerConfig:
    overlap: bool = False
    warmup: int = {warmup}
    {field}tensor_model_parallel_size: int = 1

    def __post_init__(self):
        if self.overlap:
            assert {condition}, "overlap needs experts"
{pad}            if self.warmup < 1:
                raise ValueError("warm-up is too short")
        {gone}
        {more}
"""
OLD = {
    "warmup": 3,
    "field": "old_field: bool = False\n    ",
    "condition": "self.num_experts > 1",
    "pad": "",
    "gone": 'assert self.old_field, "old field"',
    "more": "",
}
NEW = {
    "warmup": 5,
    "field": "",
    "condition": "self.num_experts > 1 and self.is_fused",
    "pad": "\n\n",
    "gone": "",
    "more": 'assert not self.overlap or self.warmup, f"overlap of {self.warmup} wants a warm-up"',
}
FILE = "core/transformer/transformer_config.py"
FOLLOWED = {
    "overlap-needs-experts": (FILE, "overlap needs experts"),
    "warm-up-is-long": (FILE, "warm-up is too short"),
    "old-field-is-set": (FILE, "old field"),
    "overlap-wants-a-warm-up": (FILE, "wants a warm-up"),
}


def release(folder: Path, name: str, fields: dict[str, object]) -> Release:
    bridges = "register_bridge_implementation(source='OlmoeForCausalLM', target=T, bridge_class=B)"
    core = {f"megatron/{FILE}": CONFIG.format(**fields)}
    bridge = {"megatron/bridge/models/olmoe.py": bridges if name == "0.6.0" else ""}
    folder.mkdir()
    wheel(folder / f"megatron_core-{name}-py3-none-any.whl", core)
    wheel(folder / f"megatron_bridge-{name}-py3-none-any.whl", bridge)
    return Release(name, find_releases(folder)[name])


def test_a_made_up_release_is_told_apart(tmp_path: Path) -> None:
    old, new = release(tmp_path / "old", "0.6.0", OLD), release(tmp_path / "new", "0.7.0", NEW)
    said = list(watch(old, new, FOLLOWED))
    text = "\n".join(said)
    assert f"old-field-is-set: gone from {FILE} (0.6.0 has it at line 16)" in text
    assert "overlap-needs-experts: " in text
    assert "was (self.overlap) and assert self.num_experts > 1\n" in text
    assert "is  (self.overlap) and assert self.num_experts > 1 and self.is_fused" in text
    assert f"overlap-wants-a-warm-up: new in 0.7.0, {FILE}:" in text
    assert "1 statements only moved" in text  # the warm-up's
    assert "TransformerConfig.warmup: default 3 is now 5 (overlap-wants-a-warm-up, warm-up-is-long)" in text
    assert "TransformerConfig.old_field: gone (old-field-is-set)" in text
    assert "no longer olmoe" in text
    fewer = {name: place for name, place in FOLLOWED.items() if name != "overlap-wants-a-warm-up"}
    assert f"{FILE}:18: overlap of wants a warm-up" in "\n".join(watch(old, new, fewer))


def test_an_unchanged_release_is_silent(tmp_path: Path) -> None:
    old, new = release(tmp_path / "old", "0.6.0", OLD), release(tmp_path / "new", "0.6.1", OLD)
    said = list(watch(old, new, {**FOLLOWED, "of-neither": (FILE, "no such words")}))
    assert [line for line in said if not line.endswith(": none")] == ["Families:", "  no longer olmoe"]


@pytest.mark.parametrize(("name", "line"), [("warm-up-is-long", "(self.overlap) and (self.warmup < 1)")])
def test_conditions_are_those_on_the_way(tmp_path: Path, name: str, line: str) -> None:
    found = release(tmp_path / "old", "0.6.0", OLD).statement(*FOLLOWED[name])
    assert found is not None
    assert (found.condition, found.names) == (line, {"overlap", "warmup"})


@pytest.mark.parametrize("words", [[], ["{folder}"], ["{folder}", "0.6.0", "0.9.0"], ["{folder}/no-such-folder"]])
def test_what_cannot_be_compared_is_said(tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    release(tmp_path / "old", "0.6.0", OLD)
    monkeypatch.setattr("sys.argv", ["upstream.py", *(word.format(folder=tmp_path) for word in words)])
    with pytest.raises(SystemExit, match=r"two releases are compared|FOLDER"):
        main()
