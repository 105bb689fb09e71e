"""`threefold plan` as a user meets it: lines to paste, a chip file, what is written, what is said of vision models."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from command_line import run
from repository import ROOT

from threefold.plan.file import parse_overrides, read_plan
from threefold.plan.parse import change, parse
from threefold.plan.plan import Plan
from threefold.report.search import search_text
from threefold.search.search import SearchResult, search

HOST = {
    "model": "qwen3-30b-a3b",
    "target": "megatron-bridge",
    "cluster.chip": "h100",
    "cluster.gpus": 64,
    "job.seq_len": 2048,
    "job.global_batch": 1024,
    "layout.tp": 2,
    "layout.ep": 8,
    "knobs.dispatcher": "deepep",
    "knobs.recompute": ["layernorm", "moe_act"],
    "knobs.graphs": [],
    "knobs.expert_fusion": False,
}
STAGED = {path: value for path, value in HOST.items() if path != "layout.tp"} | {
    "layout.pp": 2,
    "layout.stages": "Et*24|t*24L",
}


def pasted(plan: Plan, line: str) -> Plan:
    """The plan with a line of the answer behind its file."""
    overrides, wrong = parse_overrides(shlex.split(line))
    assert not wrong
    found = parse(dict(plan.written), overrides)
    assert not found.findings
    assert found.plan is not None
    return found.plan


def offered(found: SearchResult) -> list[tuple[str, dict[str, Any]]]:
    """What the answer offers to paste, from its text, and what each line stands for."""
    text = search_text(found, details=True)
    retune = re.findall(r"^  \d\. (\S+=.*) \((?:predicted|frees|not priced)", text, re.M)
    steps = text.partition("One step in each degree:\n")[2].partition("\n\n")[0].splitlines()[2:]
    comparisons = text.partition("steps that you time choose:\n")[2].partition("\n\n")[0].splitlines()[2:]
    lines = [*retune, *(re.split(r"\s{2,}", line)[0] for line in (*steps, *comparisons))]
    trials = (*found.retune, *found.sensitivity, *(one.trial for one in found.comparisons))
    return list(zip(lines, [dict(one.changes) for one in trials], strict=True))


@pytest.mark.parametrize("draft", [HOST, STAGED], ids=["lists and switches", "a written stage layout"])
def test_what_is_offered_can_be_pasted(draft: dict[str, Any]) -> None:
    found = search(draft, top=1)
    plan = found.candidates[0].plan
    seen = offered(found)
    for line, changes in seen:
        assert pasted(plan, line) == change(plan, changes), line
    values = [value for _, changes in seen for value in changes.values()]
    assert any(isinstance(value, list) for value in values)
    assert draft is STAGED or any(value is True for value in values)
    assert draft is HOST or any(value is None for value in values)  # the stages go with a change of PP


def test_where_there_is_no_plan_the_advice_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", "qwen3-235b-a22b", "--chip", "h100", "--gpus", "8", "--seq-len", "32K", "layout.pp=1"]
    code, out, _ = run(*words, capsys=capsys)
    assert code == 1
    advice = re.findall(r"(?:fix: |or )(\S+=\S+)", out)
    assert len(advice) == 2  # more GPUs, a larger chip
    for line in advice:
        overrides, wrong = parse_overrides(shlex.split(line))
        assert not wrong
        assert not parse({"model": "qwen3-235b-a22b"}, overrides).findings


def test_an_override_with_null_leaves_a_field_free(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "tiny-qwen3-moe", "--chip", "cpu", "--gpus", "2", "--seq-len", "64", "--global-batch", "4"]
    answers = [run("plan", *words, *more, "--json", capsys=capsys)[1] for more in ([], ["layout.tp=null"])]
    plans = [[one["hash"] for one in json.loads(answer)["candidates"]] for answer in answers]
    assert plans[0] == plans[1]


def test_a_written_plan_states_what_a_reader_asks_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where it is the default: 4096 tokens, degrees of 1."""
    out = tmp_path / "plan.toml"
    words = ["--model", "tiny-qwen3-moe", "--chip", "cpu", "--gpus", "1", "--seq-len", "4096", "--global-batch", "1"]
    assert run("plan", *words, "--out", str(out), capsys=capsys)[0] == 0
    text = out.read_text()
    for line in ("seq_len = 4096", "global_batch = 1", "micro_batch = 1", 'target = "threefold"'):
        assert line in text
    for axis in ("tp", "cp", "pp", "vpp", "ep", "etp"):
        assert re.search(rf"^{axis} = \d+$", text, re.M)
    plan = read_plan(str(out)).plan
    assert plan is not None
    said = json.loads(run("plan", *words, "--json", capsys=capsys)[1])
    assert plan.hash == said["candidates"][0]["hash"]  # stated defaults change nothing


LONG = ["--model", "deepseek-v3", "--chip", "h100", "--gpus", "256", "--seq-len", "128K", "--target", "megatron-bridge"]


@pytest.mark.parametrize("columns", ["80", "100"])
def test_an_answer_is_short_and_as_wide_as_the_terminal(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    code, out, _ = run("plan", *LONG, capsys=capsys)
    assert code == 0
    lines = out.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= int(columns)
    shares = [float(share) for share in re.findall(r"(?<!\+- )\b([\d.]+)%", out)]
    assert min(shares) >= 1
    answer = out.partition("warning[")[0]
    assert not re.search(r"\b(TP|CP|EP|ETP|VPP|PP) 1\b", answer)  # no axis that is not used
    assert "cannot be told apart" in " ".join(out.split())


def test_another_candidate_is_picked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.toml"
    words = ["plan", "--model", "qwen3-30b-a3b", "--chip", "h100", "--gpus", "16", "--seq-len", "4096", "--json"]
    said = json.loads(run(*words, "--pick", "2", "--out", str(out), capsys=capsys)[1])
    plan = read_plan(str(out)).plan
    assert plan is not None
    assert [one["hash"] for one in said["candidates"]].index(plan.hash) == 1
    assert said["candidates"][1]["after"]  # why it is not the first
    code, _, err = run(*words, "--pick", "999", "layout.pp=1", "layout.ep=16", "layout.tp=1", capsys=capsys)
    assert code == 2
    assert "--pick 999 of" in err


SMALL_H100 = 'chip = "h100"\nmeasured = "2026-11-20"\n[facts]\nmemory_bytes = 40_000_000_000\n[rates]\ngemm = 0.1\n'


def test_a_chip_file_is_planned_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its memory is what a plan must fit, its rates are what a plan is priced with, and it names the chip."""
    file = tmp_path / "chip.toml"
    file.write_text(SMALL_H100)
    words = ["--model", "qwen3-30b-a3b", "--gpus", "16", "--seq-len", "4096", "--precision", "bf16"]
    words += ["--target", "megatron-bridge"]
    shipped = json.loads(run("plan", *words, "--chip", "h100", "--json", capsys=capsys)[1])["candidates"][0]
    words += ["--chip-file", str(file), "--json"]
    own = json.loads(run("plan", *words, "--out", str(tmp_path / "plan.toml"), capsys=capsys)[1])["candidates"][0]
    assert own["plan"]["cluster.chip"] == "h100"
    assert shipped["estimate"]["memory"]["device_bytes"] > 40e9 >= own["estimate"]["memory"]["device_bytes"]
    assert own["estimate"]["time"]["terms"]["gemm"] > 2 * shipped["estimate"]["time"]["terms"]["gemm"]
    assert "2026-11-20" in own["estimate"]["basis"]
    again = run("estimate", str(tmp_path / "plan.toml"), "--chip-file", str(file), "--json", capsys=capsys)[1]
    assert json.loads(again)["time"] == own["estimate"]["time"]


@pytest.mark.parametrize(
    ("text", "rule"),
    [('chip = "gb200"\n', "known-value"), ("[rates]\ngemm = 0\n", "known-value"), ("", "file-readable")],
)
def test_a_chip_file_that_does_not_go_with_the_draft_is_a_finding(
    text: str, rule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "chip.toml"
    file.write_text(text)
    words = ["--model", "qwen3-30b-a3b", "--gpus", "16", "--seq-len", "4096", "--chip", "h100"]
    code, out, _ = run("plan", *words, "--chip-file", str(file), capsys=capsys)
    assert code == 1
    assert f"error[{rule}]" in out


VISION = {"model": "qwen3-vl-30b-a3b", "target": "megatron-bridge", "cluster.chip": "gb200", "job.seq_len": 4096}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"cluster.gpus": 16, "knobs.data_parallel": "fsdp", "layout.pp": 1}, "FSDP, because the vision encoder"),
        ({"cluster.gpus": 16, "knobs.data_parallel": "zero1", "layout.pp": 2}, "3D parallelism "),
        ({"cluster.gpus": 16, "knobs.data_parallel": "zero1", "layout.pp": 1}, "PP 1, because the vision encoder"),
    ],
    ids=["fsdp", "3d", "neither"],
)
def test_a_plan_for_a_vision_model_says_why_fsdp_or_3d(fields: dict[str, Any], said: str) -> None:
    best = search({**VISION, **fields, "job.images": 1.0}, top=1).candidates[0]
    (reason,) = [line for line in best.reasons.scale if "vision encoder" in line]
    assert reason.startswith(said)
    assert "3D parallelism (TP x PP x EP) has the higher ceiling" in reason
    assert "FSDP" in reason
    assert "vlm-fsdp-before-pipeline" in reason


def test_a_plan_for_a_text_model_says_nothing_of_vision() -> None:
    best = search({**HOST, "cluster.gpus": 16}, top=1).candidates[0]
    assert not any("vision" in line for line in best.why)


def test_sequences_of_a_few_tokens_are_remarked(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "tiny-qwen3-moe", "--chip", "cpu", "--gpus", "1", "--seq-len", "3", "--global-batch", "1"]
    code, out, _ = run("plan", *words, capsys=capsys)
    assert code == 0
    assert "warning[sequence-has-context] job.seq_len: sequences of 3 tokens are too short to train on" in " ".join(
        out.split()
    )
    recipe = str(ROOT / "recipes" / "tiny-qwen3-moe-256-1xcpu-fp32.toml")
    assert "sequence-has-context" not in run("check", recipe, capsys=capsys)[1]


def test_a_plan_for_another_stack_has_a_next_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "plan.toml")
    words = ["--model", "qwen3-30b-a3b", "--chip", "h100", "--gpus", "8", "--seq-len", "4096"]
    code, text, _ = run("plan", *words, "--target", "megatron-bridge", "--out", out, capsys=capsys)
    assert (code, f"`threefold export {out} --out export`" in text) == (0, True)
    assert run("export", out, "--out", str(tmp_path / "export"), capsys=capsys)[0] == 0
