"""Hunts with planted culprits: one field, a pair, fields that rules keep together, no memory, noise, nothing at all."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_folders import run_plan

from threefold.compare.regress import trials as trials_module
from threefold.compare.regress.command import Command, Outcome
from threefold.compare.regress.hunt import Hunted, hunt
from threefold.compare.regress.trials import Trials
from threefold.findings import FindingsError
from threefold.plan.file import read_plan
from threefold.plan.plan import Plan
from threefold.report.compare.contract_text import hunted_text

OTHERS: dict[str, Any] = {
    "job_lr": 0.01,
    "job_steps": 7,
    "job_weight_decay": 0.2,
    "run_gc_every": 7,
    "run_keep": 5,
    "knobs_loss_fusion": False,
    "knobs_permute_fusion": False,
}
Try = Callable[[Plan], Outcome]


@pytest.fixture
def hunted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Hunted]:
    """A hunt whose command is a function of the plan, so that hundreds of trials take no time."""

    def run(act: Try, a: Plan, b: Plan, repeats: int = 6, worse_by: float = 0.02, **more: Any) -> Hunted:
        def run_command(command: Command, plan: Path, folder: Path) -> Outcome:
            folder.mkdir()
            parsed = read_plan(str(plan))
            assert parsed.plan is not None
            return act(parsed.plan)

        monkeypatch.setattr(trials_module, "run_command", run_command)
        trials = Trials(tmp_path / "hunt", Command(("x",), 1.0), {}, lambda text: None)
        return hunt(a, b, trials, repeats, worse_by, lambda text: None, **more)

    return run


def timed(seconds: Callable[[Plan], float], noise: float = 0.01, seed: int = 0, drift: float = 0.0) -> Try:
    """A command that takes a time with noise, on a machine that may get slower from trial to trial."""
    draw, count = random.Random(seed), [0]

    def act(plan: Plan) -> Outcome:
        count[0] += 1
        return Outcome("ok", seconds=seconds(plan) * draw.gauss(1, noise) * (1 + drift) ** count[0])

    return act


def fields_of(found: Hunted) -> list[set[str]]:
    return [set(culprit.fields) for culprit in found.culprits]


@pytest.mark.parametrize(("data", "label"), [("synthetic", "benchmark-only"), ("corpus.jsonl", "training-equivalent")])
@pytest.mark.parametrize("seconds", [1.0, 1.3])
def test_a_hunt_says_whether_its_times_count_for_training(
    data: str, label: str, seconds: float, hunted: Callable[..., Hunted]
) -> None:
    """With a culprit and without."""
    a, b = run_plan(job_data=data), run_plan(job_data=data, run_keep=5)
    found = hunted(timed(lambda plan: seconds if plan.run.keep == 5 else 1.0), a, b)
    assert found.to_json()["label"] == label
    assert hunted_text(found).endswith(f"; {label}")


@pytest.mark.parametrize("seed", range(5))
def test_one_field_is_found(seed: int, hunted: Callable[..., Hunted]) -> None:
    a, b = run_plan(), run_plan(**OTHERS)
    found = hunted(timed(lambda plan: 1.3 if plan.run.gc_every == 7 else 1.0, seed=seed), a, b)
    assert found.baseline.kind == "slower"
    assert fields_of(found) == [{"run.gc_every"}]
    culprit = found.culprits[0]
    assert culprit.fields == {"run.gc_every": (50, 7)}
    assert culprit.alone.ratio == pytest.approx(1.3, rel=0.03)
    assert culprit.without is not None
    assert culprit.without.answer == "good"


def test_a_pair_that_is_slow_only_together(hunted: Callable[..., Hunted]) -> None:
    a, b = run_plan(), run_plan(**OTHERS)
    found = hunted(timed(lambda plan: 1.0 + 0.5 * (plan.run.keep == 5 and not plan.knobs.loss_fusion)), a, b)
    assert fields_of(found) == [{"run.keep", "knobs.loss_fusion"}]


def test_two_fields_that_are_slow_on_their_own(hunted: Callable[..., Hunted]) -> None:
    a, b = run_plan(), run_plan(**OTHERS)

    def seconds(plan: Plan) -> float:
        return (1.5 if plan.run.keep == 5 else 1.0) * (1.15 if not plan.knobs.loss_fusion else 1.0)

    found = hunted(timed(seconds), a, b)
    assert fields_of(found) == [{"run.keep"}, {"knobs.loss_fusion"}]
    assert found.culprits[0].without is not None
    assert found.culprits[0].without.ratio == pytest.approx(1.15, rel=0.03)


def test_fields_that_rules_keep_together_stay_together(hunted: Callable[..., Hunted]) -> None:
    """Two pipeline stages with a stage string for two need two ranks: the degree never moves alone."""
    a = run_plan(**OTHERS)
    b = run_plan(cluster_gpus=2, layout_pp=2, layout_stages="Ett|ttL", job_lr=0.5)
    seen = []

    def seconds(plan: Plan) -> float:
        seen.append(plan)
        return 1.4 if plan.layout.pp == 2 else 1.0

    found = hunted(timed(seconds), a, b)
    assert {"layout.pp", "cluster.gpus"} <= fields_of(found)[0]
    assert "job.lr" not in fields_of(found)[0]
    assert all(plan.layout.pp == 1 or plan.cluster.gpus == 2 for plan in seen)


def test_a_crash_is_found_with_few_trials(hunted: Callable[..., Hunted]) -> None:
    tried = []

    def act(plan: Plan) -> Outcome:
        tried.append(plan)
        fails = plan.job.weight_decay == 0.2 and plan.run.gc_every == 7
        return Outcome("failed", "exit 1") if fails else Outcome("ok", seconds=1.0)

    found = hunted(act, run_plan(), run_plan(**OTHERS))
    assert found.baseline.kind == "fails"
    assert found.baseline.signature == "failed (exit 1)"
    assert fields_of(found) == [{"job.weight_decay", "run.gc_every"}]
    assert len(tried) <= 25


def test_no_memory_points_at_what_takes_it(hunted: Callable[..., Hunted]) -> None:
    """The cost model names the larger microbatch first, so that one trial finds it."""
    tried = []

    def act(plan: Plan) -> Outcome:
        tried.append(plan)
        return Outcome("out of memory", "exit 1") if plan.job.micro_batch == 8 else Outcome("ok", seconds=1.0)

    found = hunted(act, run_plan(), run_plan(**{**OTHERS, "job_micro_batch": 8}))
    assert fields_of(found) == [{"job.micro_batch"}]
    assert found.culprits[0].alone.failures == {"out of memory": 1}
    assert len(tried) == 4 + 1 + 1  # two rounds of A and B, the guess, and the rest without it


def test_another_failure_on_the_way_is_no_answer(hunted: Callable[..., Hunted]) -> None:
    """Without the loss fusion some plans between fail for a reason of their own; the hunt is for the missing memory."""

    def act(plan: Plan) -> Outcome:
        if plan.run.keep == 5 and plan.job.lr == 0.01:
            return Outcome("out of memory", "exit 1")
        return (
            Outcome("failed", "exit 3") if plan.run.keep == 5 and plan.run.gc_every == 7 else Outcome("ok", seconds=1.0)
        )

    found = hunted(act, run_plan(), run_plan(**OTHERS))
    assert fields_of(found) == [{"run.keep", "job.lr"}]


def test_two_causes_of_a_crash_are_both_found(hunted: Callable[..., Hunted]) -> None:
    def act(plan: Plan) -> Outcome:
        fails = plan.run.keep == 5 or plan.job.lr == 0.01
        return Outcome("time limit", "1 s") if fails else Outcome("ok", seconds=1.0)

    found = hunted(act, run_plan(), run_plan(**OTHERS))
    assert sorted(map(sorted, fields_of(found))) == [["job.lr"], ["run.keep"]]


def test_a_crash_that_comes_and_goes(hunted: Callable[..., Hunted]) -> None:
    draw = random.Random(5)

    def act(plan: Plan) -> Outcome:
        fails = plan.run.keep == 5 and draw.random() < 0.5
        return Outcome("failed", "exit 1") if fails else Outcome("ok", seconds=1.0)

    found = hunted(act, run_plan(), run_plan(**OTHERS), repeats=10)
    assert fields_of(found) == [{"run.keep"}]


@pytest.mark.parametrize("seed", range(10))
def test_noise_is_no_regression(seed: int, hunted: Callable[..., Hunted]) -> None:
    found = hunted(timed(lambda plan: 1.0, noise=0.05, seed=seed), run_plan(), run_plan(**OTHERS))
    assert found.baseline.kind == "none"
    assert found.culprits == ()


@pytest.mark.parametrize("drift", [0.01, -0.01])
def test_a_machine_that_drifts_does_not_decide(drift: float, hunted: Callable[..., Hunted]) -> None:
    """One percent slower with every trial: all of A first and then all of B would show 6 %."""
    quiet = hunted(timed(lambda plan: 1.0, noise=0.003, drift=drift), run_plan(), run_plan(**OTHERS))
    assert quiet.baseline.kind == "none"


def test_a_drifting_machine_hides_no_culprit(hunted: Callable[..., Hunted]) -> None:
    seconds = timed(lambda plan: 1.2 if plan.run.keep == 5 else 1.0, noise=0.005, drift=0.01)
    assert fields_of(hunted(seconds, run_plan(), run_plan(**OTHERS))) == [{"run.keep"}]


def test_a_larger_batch_is_no_regression(hunted: Callable[..., Hunted]) -> None:
    """Twice the sequences take twice the time; times are compared per useful token."""
    a, b = run_plan(), run_plan(job_global_batch=16, **OTHERS)
    found = hunted(timed(lambda plan: plan.job.global_batch / 8), a, b)
    assert found.unit == "useful token"
    assert found.baseline.kind == "none"


def test_other_work_is_refused_for_times_only(hunted: Callable[..., Hunted]) -> None:
    a, b = run_plan(), run_plan(job_routing="forced-balance", **OTHERS)
    slow = timed(lambda plan: 1.5 if plan.run.keep == 5 else 1.0)
    with pytest.raises(FindingsError, match="work-is-comparable"):
        hunted(slow, a, b)
    assert fields_of(hunted(slow, a, b, anyway=True)) == [{"run.keep"}]


def test_a_good_plan_that_fails_is_refused(hunted: Callable[..., Hunted]) -> None:
    with pytest.raises(FindingsError, match="good-plan-runs"):
        hunted(lambda plan: Outcome("failed", "exit 1"), run_plan(), run_plan(**OTHERS))


def test_no_time_and_no_failure_is_no_answer(hunted: Callable[..., Hunted]) -> None:
    with pytest.raises(FindingsError, match="step_seconds"):
        hunted(lambda plan: Outcome("ok"), run_plan(), run_plan(**OTHERS))


def test_a_hunt_goes_on_where_it_was_interrupted(hunted: Callable[..., Hunted], tmp_path: Path) -> None:
    """Interrupted at every trial in turn, it ends with the same answer and repeats only the round under way."""
    a, b = run_plan(), run_plan(**OTHERS)
    count, limit = [0], [0]

    def act(plan: Plan) -> Outcome:
        if count[0] >= limit[0]:
            raise KeyboardInterrupt
        count[0] += 1
        return Outcome("ok", seconds=1.3 if plan.run.keep == 5 else 1.0)

    interrupts = 0
    while True:
        limit[0] = count[0] + 3  # a round and half of the next one
        try:
            found = hunted(act, a, b)
            break
        except KeyboardInterrupt:
            interrupts += 1
    assert fields_of(found) == [{"run.keep"}]
    assert interrupts > 3
    lines = (tmp_path / "hunt" / "trials.jsonl").read_text().splitlines()
    keys = [(line["round"], line["number"]) for line in map(json.loads, lines)]
    assert len(keys) == len(set(keys))
    assert count[0] <= 2 * len(keys) + interrupts


def test_a_line_that_a_kill_cut_off_is_measured_again(hunted: Callable[..., Hunted], tmp_path: Path) -> None:
    act = timed(lambda plan: 1.3 if plan.run.keep == 5 else 1.0)
    hunted(act, run_plan(), run_plan(**OTHERS))
    path = tmp_path / "hunt" / "trials.jsonl"
    whole = path.read_text()
    path.write_text(whole[:-20])
    assert fields_of(hunted(act, run_plan(), run_plan(**OTHERS))) == [{"run.keep"}]
    assert len(path.read_text().splitlines()) == len(whole.splitlines())
