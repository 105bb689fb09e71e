"""`threefold tune` on vision-language plans: the microbatch first, narrow graphs, EP before ETP, never image-free."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_measurer import FakeMeasurer
from tests.support.plans import build
from tests.support.tuned_plans import plan_to_tune, tuned
from threefold.findings import FindingsError
from threefold.plan.plan import Plan
from threefold.tune.cards import _problems
from threefold.tune.engine_measurer import EngineMeasurer
from threefold.tune.measurement import Measurement, Window
from threefold.tune.propose import Candidate, Refused, propose
from threefold.tune.result import plan_numbers

GPUS: dict[str, Any] = {
    "model": "qwen3-vl-30b-a3b",
    "target": "threefold",
    "cluster.chip": "h200",
    "cluster.gpus": 16,
    "job.seq_len": 4096,
    "job.global_batch": 128,
    "job.micro_batch": 2,
    "job.data": "scenes",
    "layout.ep": 8,
}


def seeing_plan(**changes: Any) -> Plan:
    return plan_to_tune(**{"model": "tiny-qwen3-vl-moe", "job.data": "scenes", "job.seq_len": 128, **changes})


def faster_with_larger_microbatches(plan: Plan) -> float:
    return {1: 0.81, 2: 0.9, 4: 1.0, 8: 1.1}[plan.num_microbatches]


@pytest.mark.parametrize("wall", ["memory", "communication", "host", "compute"])
def test_the_microbatch_is_swept_first_at_any_wall(wall: str) -> None:
    plan = build(GPUS)
    found, refused = propose(plan, plan, wall)
    assert found[0].variable == {"job.micro_batch"}
    swept = [each.changes["job.micro_batch"] for each in found if each.variable == {"job.micro_batch"}]
    not_fitting = [each for each in refused if dict(each.changes).keys() == {"job.micro_batch"}]
    assert {*swept, *(each.changes["job.micro_batch"] for each in not_fitting)} == {1, 4, 8}
    assert all("slower" not in each.reason for each in not_fitting)


def test_a_sweep_finds_the_microbatch(tmp_path: Path) -> None:
    measurer = FakeMeasurer(faster_with_larger_microbatches, noise=0.002, facts=lambda plan: {"images": 12.0})
    found = tuned(measurer, tmp_path, plan=seeing_plan())
    assert found.winner is not None
    assert found.winner.job.micro_batch == 8
    first_race = [row.role for row in found.trials if row.stage == "race 1"]
    assert any("job.micro_batch" in role for role in first_race)
    numbers = plan_numbers(found.winner, Measurement(steps=(2.0,), images=12.0))
    assert numbers["images_per_second"] == 6.0


def test_a_trial_with_fewer_images_leaves_work_out(tmp_path: Path) -> None:
    """The larger microbatch is faster because it drops pictures: it never wins."""

    def facts(plan: Plan) -> dict[str, Any]:
        return {"images": 12.0 if plan.job.micro_batch <= 2 else 6.0}

    measurer = FakeMeasurer(faster_with_larger_microbatches, noise=0.002, facts=facts)
    found = tuned(measurer, tmp_path, plan=seeing_plan())
    assert found.winner is None or found.winner.job.micro_batch <= 2
    said = [one["reason"] for one in found.verdicts if one.get("verdict") == "work left out"]
    assert "a step has 6 images, 12 before" in said


def test_an_image_free_baseline_is_refused(tmp_path: Path) -> None:
    measurer = FakeMeasurer(facts=lambda plan: {"images": 0.0, "is_image_free": True})
    with pytest.raises(FindingsError) as caught:
        tuned(measurer, tmp_path, plan=seeing_plan())
    [finding] = caught.value.findings
    assert (finding.rule, finding.at) == ("vlm-benchmark-has-images", "job.data")


def test_a_card_of_an_image_free_plan_is_refused() -> None:
    plan = {"model": "tiny-qwen3-vl-moe", "job.data": "synthetic", "job.images": 0, "job.seq_len": 128}
    said = [each for each in _problems({"plan": plan}) if "without images" in each]
    assert len(said) == 1
    assert not [each for each in _problems({"plan": plan | {"job.images": 1.0}}) if "without images" in each]


def proposed(plan: Plan, path: str) -> tuple[list[Candidate], list[Refused]]:
    found, refused = propose(plan, plan, "host")
    return (
        [each for each in found if path in each.changes],
        [each for each in refused if path in each.changes],
    )


def test_graph_scopes_widen_one_by_one() -> None:
    text = build({**GPUS, "model": "qwen3-30b-a3b", "job.data": "synthetic"})
    widest = max(len(each.changes["knobs.graphs"]) for each in proposed(text, "knobs.graphs")[0])
    assert widest > 1
    plan = build(GPUS)
    first, second = ["moe_router", "moe_preprocess"], ["attn", "moe_router", "moe_preprocess"]
    assert [each.changes["knobs.graphs"] for each in proposed(plan, "knobs.graphs")[0]] == [first, second]
    wider = build({**GPUS, "knobs.graphs": first})
    more = [each.changes["knobs.graphs"] for each in proposed(wider, "knobs.graphs")[0] if each.changes["knobs.graphs"]]
    assert second in more
    assert all(len(each) < len(first) for each in more if each != second)  # and fewer, as any plan is offered


def test_etp_is_not_tried_while_ep_suffices() -> None:
    tried, refused = proposed(build(GPUS), "layout.etp")
    assert tried == []
    assert all("etp-only-when-ep-insufficient" in each.reason for each in refused)


@pytest.mark.slow
def test_real_trials_count_images(tmp_path: Path) -> None:
    """Scenes are counted; a text file gives a vision-language model none, and says so."""
    text = tmp_path / "text.jsonl"
    text.write_text('{"caption": "a text without a picture"}\n' * 64, encoding="utf-8")
    measurer = EngineMeasurer(tmp_path / "processes")
    try:
        plans = [seeing_plan(**{"job.data": data}) for data in ("scenes", str(text))]
        found = [measurer.measure(plan, Window(warmup=1, steps=2)) for plan in plans]
    finally:
        measurer.close()
    assert [each.error for each in found] == ["", ""]
    assert found[0].images
    assert [each.is_image_free for each in found] == [False, True]
