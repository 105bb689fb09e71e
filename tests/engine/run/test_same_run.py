"""A run folder is gone on with by the model that it was started with, by its content and not by its path."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import config_of
from tiny_runs import tiny_plan, tiny_shard

from threefold.engine.run.folder import CONTRACT, read_run_plan
from threefold.engine.train import train
from threefold.findings import FindingsError
from threefold.plan.plan import Plan
from threefold.plan.same_run import model_differences, model_facts

pytestmark = pytest.mark.usefixtures("one_thread")


def quiet(text: str) -> None:
    pass


def write_config(folder: Path, **changes: Any) -> dict[str, Any]:
    config = {**config_of("qwen3_moe"), "vocab_size": 512, "rope_theta": 10000.0, **changes}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return config


@pytest.fixture
def fields(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "model").mkdir()
    write_config(tmp_path / "model")
    model = {"model": f"hf:{tmp_path / 'model'}", "model.num_layers": None, "model.num_experts": None}
    return {**model, "job.data": tiny_shard(tmp_path / "counting.tok"), "job.steps": 1, "run.save_every": 1}


def plan_of(fields: dict[str, Any]) -> Plan:
    return tiny_plan({name: value for name, value in fields.items() if value is not None})


def refusal(call: Any) -> str:
    with pytest.raises(FindingsError) as caught:
        call()
    [finding] = caught.value.findings
    assert finding.rule == "run-is-this-plan"
    assert finding.advice
    return finding.problem


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_theta": 500000.0}, "model.attention.rope_theta was 10000.0, now 500000.0"),
        ({"num_experts_per_tok": 2}, "model.moe.top_k was 3, now 2"),
        ({"norm_topk_prob": False}, "model.moe.norm_topk was True, now False"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "model.attention.rope_scaling was None, now there"),
    ],
    ids=["rope_theta", "top_k", "norm_topk", "rope_scaling"],
)
def test_another_model_at_the_same_path_is_named(
    changes: dict[str, Any], said: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train(plan_of(fields), run, quiet)
    before = sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*"))
    write_config(tmp_path / "model", **changes)
    changed = plan_of({**fields, "job.steps": 2})
    assert said in refusal(lambda: train(changed, run, quiet))
    assert said in refusal(lambda: read_run_plan(run))  # sample and export-hf
    assert sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*")) == before

    write_config(tmp_path / "model", transformers_version="5.0", use_cache=False)  # another file, the same model
    train(plan_of({**fields, "job.steps": 2}), run, quiet)


def test_a_field_of_the_plan_is_named(fields: dict[str, Any], tmp_path: Path) -> None:
    train(plan_of(fields), tmp_path / "run", quiet)
    changed = plan_of({**fields, "job.lr": 0.5, "job.global_batch": 2})
    problem = refusal(lambda: train(changed, tmp_path / "run", quiet))
    assert "job.lr was not stated, now 0.5" in problem
    assert "job.global_batch was 4, now 2" in problem


def test_a_contract_of_an_older_version_has_no_model_to_compare(fields: dict[str, Any], tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(plan_of(fields), run, quiet)
    contract = json.loads((run / CONTRACT).read_text(encoding="utf-8"))
    del contract["model"]
    (run / CONTRACT).write_text(json.dumps(contract), encoding="utf-8")
    train(plan_of({**fields, "job.steps": 2}), run, quiet)


@pytest.mark.parametrize("facts", [None, [], 3, {}, {"moe": 3}, {"attention": {"a": {"b": {"c": {"d": {"e": {}}}}}}}])
def test_facts_of_a_stranger_are_compared_without_fault(facts: Any, fields: dict[str, Any]) -> None:
    differences = model_differences(facts, plan_of(fields))
    assert differences == (["model.moe was 3, now there"] if facts == {"moe": 3} else [])


def test_facts_know_the_content_and_not_the_place(fields: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    write_config(tmp_path / "elsewhere", initializer_range=0.1)
    here, there = plan_of(fields), plan_of({**fields, "model": f"hf:{tmp_path / 'elsewhere'}"})
    assert model_facts(here) == model_facts(there)
