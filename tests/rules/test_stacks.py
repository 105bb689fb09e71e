"""Rules about what a run will find: its data, and parts of a model that the chosen stack has not."""

import json
from pathlib import Path

import pytest
from hf_configs import CONFIGS

from threefold.plan.parse import parse
from threefold.plan.plan import Plan
from threefold.rules.all import check

TINY = {"model": "tiny-qwen3-moe", "cluster.chip": "cpu", "job.seq_len": 64}
VISION = {"model": "qwen3-vl-30b-a3b", "cluster.chip": "gb200", "cluster.gpus": 8}


def plan_of(fields: dict[str, object]) -> Plan:
    plan = parse(fields).plan
    assert plan is not None
    return plan


def problems(rule: str, fields: dict[str, object]) -> list[str]:
    return [finding.problem for finding in check(plan_of(fields)) if finding.rule == rule]


@pytest.mark.parametrize("target", ["threefold", "megatron-bridge"])
def test_data_that_is_not_here_is_said(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here.tok").touch()
    Path("folder").mkdir()
    Path("colon:2").touch()  # a file of this name, and no weight
    fields = {**TINY, "target": target}
    for data in ("embedded", "synthetic", "synthetic-zipf", "here.tok", str(tmp_path / "here.tok"), "folder"):
        assert problems("data-exists", {**fields, "job.data": data}) == []
    assert problems("data-exists", {**fields, "job.data": ["here.tok:0.5", "synthetic:0.5"]}) == []
    assert problems("data-exists", {**fields, "job.data": ["colon:2"]}) == []
    data = ["here.tok:0.5", "gone.tok:0.25", "no/such/folder:0.25"]
    assert problems("data-exists", {**fields, "job.data": data}) == ["not here: 'gone.tok', 'no/such/folder'"]
    assert problems("data-exists", {**fields, "job.data": "x" * 5000}) != []


def test_a_run_opens_what_the_rule_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both take relative paths from the folder that one stands in, wherever the plan file is."""
    from threefold.engine.data.open_sources import open_sources

    (tmp_path / "chats.jsonl").write_text('{"text": "one two three four"}\n')
    fields = {**TINY, "job.data": "chats.jsonl", "job.seq_len": 8}
    assert problems("data-exists", fields)
    monkeypatch.chdir(tmp_path)
    assert not problems("data-exists", fields)
    sources, _ = open_sources(plan_of(fields).job, 512, cache=tmp_path / "cache")
    assert [source.num_samples > 0 for source in sources] == [True]


@pytest.mark.parametrize(
    ("model_type", "change", "target"),
    [
        ("llama", {"hidden_act": "gelu"}, "threefold"),
        ("deepseek_v3", {"hidden_act": "gelu"}, "threefold"),
        ("qwen3_next", {"hidden_act": "gelu"}, "threefold"),
        ("llama", {"rope_scaling": {"rope_type": "xpos"}}, "threefold"),
        ("llama", {"rope_scaling": {"rope_type": "xpos"}}, "megatron-bridge"),
        ("deepseek_v3", {"rope_scaling": {"rope_type": "xpos"}}, "megatron-bridge"),
        ("qwen3_moe", {"hidden_act": "quick_gelu"}, "megatron-bridge"),
    ],
)
def test_a_configuration_that_the_stack_cannot_train_is_said(
    model_type: str, change: dict[str, object], target: str, tmp_path: Path
) -> None:
    for config, expected in ((CONFIGS[model_type], 0), ({**CONFIGS[model_type], **change}, 1)):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **config}))
        fields = {"model": f"hf:{tmp_path}", "target": target, "cluster.chip": "h100", "cluster.gpus": 8}
        assert len(problems("stack-runs-family", fields)) == expected


def test_a_sequence_of_a_few_tokens_is_no_context() -> None:
    assert problems("sequence-has-context", {**TINY, "job.seq_len": 1}) == [
        "sequences of 1 token are too short to train on"
    ]
    assert problems("sequence-has-context", {**TINY, "job.seq_len": 8}) == []


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (TINY, False),
        ({**TINY, "job.data": "synthetic"}, True),
        ({**TINY, "job.data": ["a.tok:0.5", "synthetic-zipf:0.5"]}, True),
        ({**TINY, "job.routing": "forced-balance"}, True),
        ({"model": "llama3-8b", "job.routing": "forced-balance"}, False),  # there is no router to force
        ({**VISION, "job.data": "web.jsonl"}, False),
        ({**VISION, "job.data": "web.jsonl", "job.images": 2}, False),
        ({**VISION, "job.data": "web.jsonl", "job.images": 0}, True),
        (VISION, True),  # the embedded corpus is text
        ({**VISION, "job.images": 1}, False),
        ({**TINY, "job.images": 0}, False),  # a text model needs none
    ],
)
def test_what_is_no_evidence_is_benchmark_only(fields: dict[str, object], expected: bool) -> None:
    assert plan_of(fields).is_benchmark_only is expected
