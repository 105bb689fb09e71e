"""FSDP or 3D for a vision-language model: by the stage of work, the cut of its stages and the memory of the cluster."""

from typing import Any

import pytest
from plans import build
from repository import ROOT

from threefold.plan.file import read_plan
from threefold.plan.plan import Plan
from threefold.rules.all import check
from threefold.rules.vision import fsdp_or_3d, stage_of_work

SMALL: dict[str, Any] = {
    "model": "qwen3-vl-30b-a3b",
    "cluster.chip": "gb200",
    "cluster.gpus": 16,
    "job.seq_len": 4096,
    "job.global_batch": 64,
    "job.images": 1.0,
    "job.data": "/data/chats",
    "layout.ep": 16,
}
FSDP = {"knobs.data_parallel": "fsdp"}
LARGE = {**SMALL, "model": "qwen3-vl-235b-a22b", "cluster.chip": "h100"}  # whose weights and states need more than 16

# Fields of a plan, the stage of work, what is advised, and a word of the reason.
CASES: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "bring-up": ({**SMALL, "knobs.recompute": ["full"]}, "bring-up", "FSDP", "simplest path"),
    "answers": ({**SMALL, "job.task": "sft"}, "finetuning", "FSDP", "frozen encoder"),
    "frozen": ({**SMALL, "job.freeze": ["vision"]}, "finetuning", "FSDP", "frozen encoder"),
    "stable": ({**SMALL, "job.task": "pretrain"}, "pretraining", "3D parallel", "higher ceiling"),
    "stable, on FSDP": ({**SMALL, "job.task": "pretrain", **FSDP}, "pretraining", "3D parallel", "higher ceiling"),
    "uncut pipeline": ({**SMALL, "layout.pp": 2, "layout.ep": 8}, "pretraining", "FSDP", "uneven"),
    "written pipeline": (
        {**SMALL, "layout.pp": 2, "layout.ep": 8, "layout.stages": "Et*22|t*26L"},
        "pretraining",
        "3D parallel",
        "a written pipeline layout",
    ),
    "answers, written pipeline": (
        {**SMALL, "job.task": "sft", "layout.pp": 2, "layout.ep": 8, "layout.stages": "Et*22|t*26L"},
        "finetuning",
        "3D parallel",
        "a written pipeline layout",
    ),
    "no room": ({**LARGE, "job.task": "pretrain", **FSDP}, "pretraining", "FSDP", "would need"),
}


def note_of(plan: Plan) -> tuple[str, str | None]:
    [found] = [each for each in check(plan) if each.rule == "vlm-fsdp-or-3d"]
    assert found.severity == "note"
    return found.problem, found.advice


@pytest.mark.parametrize("name", CASES)
def test_the_advice(name: str) -> None:
    fields, stage, advised, reason = CASES[name]
    plan = build(fields)
    assert stage_of_work(plan) == stage
    assert fsdp_or_3d(plan)[0] == advised
    assert reason in fsdp_or_3d(plan)[1]
    problem, advice = note_of(plan)
    assert problem.startswith(
        f"{advised} for {stage} of {plan.model.name} on 16 x {plan.chip.name}, EP {plan.layout.ep} "
    )
    assert reason in problem
    has = "3D parallel" if plan.knobs.data_parallel == "zero1" else "FSDP"
    assert problem.endswith(f"this plan is {has}")
    assert advice is not None
    assert ("knobs.data_parallel=" in advice) == (has != advised)


def test_text_models_and_single_gpus_have_no_such_note() -> None:
    for fields in ({**SMALL, "model": "qwen3-30b-a3b"}, {**SMALL, "cluster.gpus": 1, "layout.ep": 1}):
        assert "vlm-fsdp-or-3d" not in {finding.rule for finding in check(build(fields))}


@pytest.mark.parametrize("path", sorted(ROOT.glob("recipes/qwen3-vl-*.toml")), ids=lambda path: path.stem)
def test_recipes_say_which_they_are(path: Any) -> None:
    plan = read_plan(str(path)).plan
    assert plan is not None
    assert "this plan is FSDP" in note_of(plan)[0] if "fsdp" in path.stem else "this plan is 3D" in note_of(plan)[0]
