"""Estimates that start from a measured run: what is carried over, and the band that is left."""

import json
import math
from dataclasses import replace

import pytest
from repository import ROOT

from threefold.api.anchors import read_anchor
from threefold.cli.main import main
from threefold.cost.anchor import Anchor, anchored
from threefold.cost.estimate import estimate
from threefold.findings import FindingsError
from threefold.interop.published import plan_from_row
from threefold.plan.parse import change
from threefold.plan.plan import Plan

ROWS = {row["id"]: row for row in json.loads((ROOT / "data" / "published_runs.json").read_text())}
QWEN = "qwen3-30b-a3b-gb300-8-mxfp8-pretrain-26-04-1"


def plan_of(name: str) -> Plan:
    plan = plan_from_row(ROWS[name]).plan
    assert plan is not None
    return plan


def test_a_row_gives_the_seconds_of_its_own_throughput() -> None:
    """From the tokens per second that the row states; both columns agree within 1.2 % (data/README.md)."""
    row = ROWS[QWEN]
    stated = row["gbs"] * row["seq_len"] / row["tokens_per_s_per_gpu_from_tflops"] / row["gpus"]
    assert read_anchor(QWEN).seconds == pytest.approx(stated, rel=0.012)


def test_equal_settings_are_predicted_as_measured() -> None:
    """Runs of equal settings share 93 % of their error (docs/log/estimate.md): 7 % of 20 % is 1.4 %."""
    plan = plan_of(QWEN)
    guess = estimate(plan)
    anchor = Anchor("run", plan, 1.2 * guess.time.step_seconds)
    found = anchored(guess, plan, anchor)
    assert found.time.step_seconds == pytest.approx(anchor.seconds, rel=0.014)
    assert sum(found.time.terms.values()) == pytest.approx(found.time.step_seconds)
    assert found.model_tflops_per_gpu * found.time.step_seconds == pytest.approx(
        guess.model_tflops_per_gpu * guess.time.step_seconds
    )
    assert found.seconds_band[1] / found.seconds_band[0] < guess.seconds_band[1] / guess.seconds_band[0]


def test_the_nearer_the_run_the_more_is_carried_over() -> None:
    plan = plan_of(QWEN)
    near, far = change(plan, {"knobs.recompute": ["layernorm"]}), change(plan, {"model": "deepseek-v3"})
    moved = []
    for other in (plan, near, far):
        guess = estimate(plan)
        anchor = Anchor("run", other, 1.2 * estimate(other).time.step_seconds)
        moved.append(math.log(anchored(guess, plan, anchor).time.step_seconds / guess.time.step_seconds))
    assert moved[0] > moved[1] > moved[2] >= 0


def test_a_plan_that_shares_nothing_keeps_its_estimate() -> None:
    plan = plan_of(QWEN)
    other = plan_of("qwen3-235b-a22b-h100-256-fp8-cs-pretrain-26-04-1")
    assert anchored(estimate(plan), plan, Anchor("run", other, 1.0)) == estimate(plan)


def test_a_plan_far_from_all_runs_keeps_a_wider_band() -> None:
    plan = plan_of(QWEN)
    long = replace(plan, job=replace(plan.job, seq_len=262_144))
    bands = []
    for one in (plan, long):
        found = anchored(estimate(one), one, Anchor("run", one, estimate(one).time.step_seconds))
        bands.append(found.seconds_band[1] / found.time.step_seconds)
    assert bands[1] > bands[0]


@pytest.mark.parametrize(
    ("source", "target", "word"),
    [
        ("no-such-run", None, "no published run"),
        (QWEN, "threefold", "megatron-bridge"),
        ("gemma-4-26b-a4b", None, "no published run"),
    ],
)
def test_what_cannot_be_an_anchor_is_a_finding(source: str, target: str | None, word: str) -> None:
    with pytest.raises(FindingsError) as raised:
        read_anchor(source, target)
    [finding] = raised.value.findings
    assert word in finding.problem
    assert finding.advice


def test_the_command_says_what_was_carried_over(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = "recipes/qwen3-235b-a22b-4k-256xgb200-mxfp8.toml"
    if not (ROOT / recipe).exists():
        recipe = str(next((ROOT / "recipes").glob("qwen3-235b*gb200*.toml")))
    main(
        [
            "estimate",
            str(ROOT / recipe),
            "target=megatron-bridge",
            "--like",
            "qwen3-235b-a22b-gb200-256-mxfp8-pretrain-26-04-1",
        ]
    )
    text = capsys.readouterr().out
    assert "like qwen3-235b-a22b-gb200-256-mxfp8-pretrain-26-04-1" in text
    assert "carried over" in text
