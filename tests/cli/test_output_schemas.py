"""JSON Schemas of what verbs print: shipped, versioned, and held by outputs of other commands than made them."""

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from command_line import run
from repository import ROOT
from scripts import load_script

from threefold.cli.main import VERBS
from threefold.report.output_schemas import output_schema, outputs, required_paths

VISION = str(ROOT / "recipes" / "qwen3-vl-235b-a22b-4k-64xgb200-bf16-3d-ep.toml")
NEXT = str(ROOT / "recipes" / "qwen3-next-80b-a3b-8k-32xgb200-bf16.toml")
GLM = str(ROOT / "recipes" / "glm-5.2-128k-192xgb200-bf16-sft.toml")
HOPPER = str(ROOT / "recipes" / "qwen3-30b-a3b-4k-16xh100-bf16-hybridep.toml")
NONE = {
    "explore": "prints its address and serves",
    "mcp": "serves until its client leaves",
    "schema": "prints a schema",
}
# Other plans, models and words than those of tools/write_schemas.py.
COMMANDS: dict[str, list[tuple[str, ...]]] = {
    "check": [("check", NEXT), ("check", VISION, "layout.etp=3"), ("check", GLM, "--unjudged")],
    "check-explain": [("check", "--explain", "peak-fits-memory")],
    "show": [("show", NEXT), ("show", GLM)],
    "estimate": [("estimate", NEXT), ("estimate", VISION), ("estimate", GLM)],
    "estimate-training": [("estimate", HOPPER, "--tokens", "10B")],
    "export": [("export", NEXT), ("export", HOPPER, "--to", "megatron-lm")],
    "sweep": [("sweep", HOPPER, "--over", "layout.ep=8,16")],
    "compare": [("compare", HOPPER, HOPPER.replace("-hybridep", "-overlap"))],
    "find": [("find", "zero bubble"), ("find", "gb200", "--kind", "run")],
    "find-name": [("find", "use_megatron_fsdp", "--kind", "name"), ("find", "USE_MNNVL", "--kind", "name")],
    "find-ab": [("find", "--ab", "recompute")],
    "plan": [
        ("plan", "--model", "olmoe-1b-7b", "--chip", "h200", "--gpus", "8", "--seq-len", "4096", "--top", "1"),
        ("plan", "--model", "deepseek-v3", "--chip", "h100", "--gpus", "8", "--seq-len", "4096"),
    ],
    "fit": [("fit", "olmoe-1b-7b", "--chip", "h200", "--gpus", "1,4")],
    "rules": [("rules",)],
    "chips-one": [("chips", "b200")],
    "models-one": [("models", "olmoe-1b-7b"), ("models", "kimi-k2")],
    "launch": [("launch", HOPPER, "--torchrun")],
    "report": [("report", HOPPER, "--out", "page.html")],
    "skills": [("skills",)],
    "contract": [("contract", HOPPER)],
}
FINDINGS = {"ok", "summary", "findings"}


def test_every_verb_has_a_schema() -> None:
    assert [verb for verb in VERBS if verb not in outputs() and verb not in NONE] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_outputs_hold_their_schema(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    schema = output_schema(name)
    for words in COMMANDS[name]:
        said = json.loads(run(words[0], "--json", *words[1:], capsys=capsys)[1])
        if name != "check" and isinstance(said, dict) and set(said) == FINDINGS:
            said, schema = said | {"not_judged": ""}, output_schema("check")
        jsonschema.validate(said, schema)


def test_a_key_that_readers_rely_on_cannot_go(capsys: pytest.CaptureFixture[str]) -> None:
    said = json.loads(run("estimate", HOPPER, "--json", capsys=capsys)[1])
    schema = output_schema("estimate")
    for damage in ("summary", "memory", "band"):
        less: dict[str, Any] = copy.deepcopy(said)
        del less[damage]
        with pytest.raises(jsonschema.ValidationError, match=damage):
            jsonschema.validate(less, schema)
    said["memory"]["peak_bytes"] = "much"
    with pytest.raises(jsonschema.ValidationError, match="much"):
        jsonschema.validate(said, schema)


@pytest.mark.parametrize("name", outputs())
def test_a_schema_is_sound_and_says_its_version(name: str) -> None:
    schema = output_schema(name)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$id"] == f"threefold/{name}/{schema['x-version']}"
    assert schema["x-relied-on"] == required_paths(schema)


def test_a_version_is_raised_where_a_key_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = load_script(ROOT / "tools" / "write_schemas.py", "write_schemas")
    monkeypatch.setattr(tool, "SCHEMAS", tmp_path)
    versions = []
    for output in (
        {"size": 1, "rows": [{"name": "x"}]},
        {"size": 1, "rows": [{"name": "x"}], "more": 2},
        {"size": 1, "rows": []},
    ):
        tool.write("x", [output])
        versions.append(json.loads((tmp_path / "x.json").read_text())["x-version"])
    assert versions == [1, 1, 2]


def test_schemas_are_printed_and_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("schema", "check", capsys=capsys)
    assert (code, json.loads(out)) == (0, output_schema("check"))
    assert "estimate-training: version 1" in run("schema", "--list", capsys=capsys)[1].splitlines()
    assert run("schema", "chek", capsys=capsys)[0] == 2
