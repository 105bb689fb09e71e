"""Answers as data: summaries that a person could be given, what was not judged, briefs, and parts of an export."""

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import run
from repository import ROOT

from threefold.lookup.names import settings

OVERLAP = str(ROOT / "recipes" / "qwen3-30b-a3b-4k-16xh100-bf16-overlap.toml")
DEMO = str(ROOT / "recipes" / "demo-qwen3-moe-256-1xcpu-fp32.toml")
LONG = str(ROOT / "recipes" / "deepseek-v3-128k-256xh100-fp8.toml")


def answer(*words: str, capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(run(*words, "--json", capsys=capsys)[1])


def summary(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The summary as one text, after what holds for every one."""
    lines = answer(*words, capsys=capsys)["summary"]
    assert 1 <= len(lines) <= 15
    assert all(line == line.strip() and "\n" not in line for line in lines)
    return "\n".join(lines)


def test_a_summary_of_a_check_has_each_error_with_its_fix(capsys: pytest.CaptureFixture[str]) -> None:
    text = summary("check", OVERLAP, "layout.ep=48", capsys=capsys)
    assert text.startswith("2 errors, ")
    assert "error ep-divides-experts: 48 ranks cannot share 128 experts evenly (fix: layout.ep=16)" in text


def test_a_summary_of_an_estimate_has_its_bands_and_its_basis(capsys: pytest.CaptureFixture[str]) -> None:
    told = answer("estimate", OVERLAP, capsys=capsys)
    text = summary("estimate", OVERLAP, capsys=capsys)
    for size in (told["memory"]["device_bytes"], *told["band"]["device_bytes"]):
        assert f"{size / 2**30:.2f} GiB" in text
    assert told["basis"] in text
    assert "days" in summary("estimate", OVERLAP, "--tokens", "1T", capsys=capsys)


def test_a_summary_of_a_plan_has_its_grids(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan", "--model", "qwen3-30b-a3b", "--chip", "h100", "--gpus", "16", "--seq-len", "4096")
    told = answer(*words, capsys=capsys)
    text = "\n".join(told["summary"])
    layout = told["candidates"][0]["plan"]
    assert len(told["summary"]) <= 15
    assert f"PP {layout.get('layout.pp', 1)} x DP" in text
    assert "= 16 ranks" in text
    assert summary("plan", *words[1:6], "1", *words[7:], capsys=capsys).startswith("no plan: ")


def test_a_summary_of_a_diagnosis_says_what_happened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "a.log"
    log.write_text("[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n")
    assert "cuda-out-of-memory" in summary("diagnose", str(log), capsys=capsys)


def test_a_check_ends_with_what_it_did_not_judge(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("check", OVERLAP, capsys=capsys)
    assert code == 0
    assert out.splitlines()[-1].startswith("not judged: ")
    assert "settings of Megatron" in out.splitlines()[-1]
    told = answer("check", OVERLAP, "--unjudged", capsys=capsys)
    left = told["unjudged"]
    assert set(left["settings"]) < set(settings())  # every one is a name that Megatron has
    assert "moe_paged_stash_page_size" in left["settings"]  # Megatron Core 0.19: no field of a plan sets it
    assert "context_parallel_size" not in left["settings"]  # layout.cp is
    assert "moe_permute_fusion" not in left["settings"]  # fusions-stay-on speaks of knobs.permute_fusion
    assert "GPUs and driver of this machine" in left["facts"]


def test_less_is_unjudged_for_our_engine_and_with_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    left = answer("check", DEMO, "--here", "--unjudged", capsys=capsys)["unjudged"]
    assert left["settings"] == []
    assert "GPUs and driver of this machine" not in left["facts"]
    assert "unjudged" not in answer("check", DEMO, capsys=capsys)
    assert "not judged" in answer("check", OVERLAP, "layout.ep=48", capsys=capsys)["not_judged"]  # nothing to export


def test_rules_say_their_source_and_their_releases(capsys: pytest.CaptureFixture[str]) -> None:
    rules = {one["rule"]: one for one in answer("rules", capsys=capsys)}
    assert all(one[key] for one in rules.values() for key in ("why", "confirm", "fix", "source"))
    # Megatron Bridge 0.6.2, training/comm_overlap.py asserts this before it looks at anything else of the overlap.
    assert "comm_overlap.py" in rules["ep-overlap-excludes-full-recompute"]["source"]
    assert "0.6.2" in rules["ep-overlap-excludes-full-recompute"]["release"]
    assert rules["peak-fits-memory"]["release"] == []


def test_a_brief_has_the_grids_and_no_more(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run("show", LONG, "--brief", capsys=capsys)
    assert len(out.splitlines()) <= 15
    assert "experts    PP 8 x EDP 1 x EP 32 x ETP 1  = 256 ranks" in out
    assert answer("show", LONG, "--brief", capsys=capsys)["summary"] == [
        " ".join(line.split()) for line in out.splitlines()
    ]


def test_a_part_of_an_export_is_printed_alone(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("export", LONG, "--only", "overrides", capsys=capsys)
    assert code == 0
    lines = out.splitlines()
    assert "model.expert_model_parallel_size=32" in lines
    assert all("=" in line and not line.startswith("==>") for line in lines)
    told = answer("export", LONG, "--only", "overrides", capsys=capsys)
    assert told["overrides"]["model.context_parallel_size"] == 32
    assert "environment" not in told
    _, out, _ = run("export", LONG, "--only", "overrides", "--to", "megatron-lm", capsys=capsys)
    assert "--expert-model-parallel-size 32" in out


def test_deaths_are_explained_as_rules_are(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("check", "--explain", "deepep-timeout", capsys=capsys)
    assert code == 0
    assert all(f"\n{word} " in out for word in ("cause", "confirm", "fix", "source"))
