"""The loop of `threefold tune` on a fake machine: planted gains, noise, drift, traps and failures."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_measurer import FakeMeasurer
from tests.support.tuned_plans import plan_to_tune, tuned
from threefold.findings import FindingsError
from threefold.plan.file import read_plan
from threefold.plan.plan import Plan
from threefold.tune.labels import compare_loss_curves, label_change
from threefold.tune.loop import CONFIRM
from threefold.tune.propose import propose
from threefold.tune.race import log_gains
from threefold.tune.result import NO_CHANGE, tuned_json, write_winner

DRIFT: dict[str, Any] = {"noise": 0.02, "step_noise": 0.05, "drift": 1.0, "swing": 0.05}


def planted(plan: Plan) -> float:
    """Recompute costs 12 %, each halving of the number of microbatches gains 10 %; compiled parts are slower."""
    seconds = 1.12 if plan.knobs.recompute else 1.0
    seconds *= {8: 1.1, 4: 1.0, 2: 0.9, 1: 0.81}[plan.num_microbatches]
    return seconds * (1.2 if plan.knobs.compile else 1.0)


@pytest.mark.parametrize("seed", range(3))
def test_a_planted_improvement_is_found(seed: int, tmp_path: Path) -> None:
    found = tuned(FakeMeasurer(planted, seed, **DRIFT), tmp_path)
    assert found.winner is not None
    assert found.winner.knobs.recompute == ()
    assert found.winner.job.micro_batch == 8
    result = tuned_json(found, tmp_path)
    planted_speedup = planted(plan_to_tune()) / planted(found.winner)
    low, high = result["interval"]
    assert 1 < low < high
    # Five standard errors of eight rounds with three trials each at 2 % noise.
    assert result["speedup"] == pytest.approx(planted_speedup, rel=0.05)
    assert result["winner"]["label"] == "training-equivalent"
    assert result["winner"]["num_steps"] >= 50
    assert result["confirmation"]["losses"]["agrees"]
    assert {"baseline", "winner", "speedup", "interval", "trials"} <= result.keys()


def test_certain_changes_are_adopted_together(tmp_path: Path) -> None:
    """What was better beside the leader of a race is tried on top of it at once, not one race after the other."""
    found = tuned(FakeMeasurer(planted, noise=0.001, step_noise=0.002), tmp_path)
    assert found.winner is not None
    assert (found.winner.knobs.recompute, found.winner.job.micro_batch) == ((), 8)
    second = [row.role for row in found.trials if row.stage == "race 2"]
    assert "knobs.recompute=null" in second
    whys = [one.get("why", "") for one in found.verdicts if one["stage"] == "race 2"]
    assert any("each of these was certainly better" in why for why in whys)


def test_a_change_that_gained_nothing_is_tried_again_on_a_better_plan(tmp_path: Path) -> None:
    """Compiled parts help only once the microbatch is large, and lose nothing before."""

    def later(plan: Plan) -> float:
        large = plan.job.micro_batch == 8
        return (0.8 if large else 1.0) * (0.9 if large and plan.knobs.compile else 1.0)

    found = tuned(FakeMeasurer(later, noise=0.001, step_noise=0.002), tmp_path)
    assert found.winner is not None
    assert found.winner.knobs.compile
    assert found.winner.job.micro_batch == 8


def test_kept_fields_are_left_alone(tmp_path: Path) -> None:
    found = tuned(FakeMeasurer(planted, noise=0.003), tmp_path, keep=frozenset({"job.micro_batch"}))
    assert found.winner is not None
    assert found.winner.job.micro_batch == plan_to_tune().job.micro_batch
    assert not any("job.micro_batch" in row.role for row in found.trials)


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 10))])
def test_no_change_is_certain_where_nothing_helps(seed: int, tmp_path: Path) -> None:
    found = tuned(FakeMeasurer(seed=seed, **DRIFT), tmp_path)
    assert found.winner is None
    result = tuned_json(found, tmp_path)
    assert (result["verdict"], result["winner"], result["speedup"]) == (NO_CHANGE, None, 1.0)
    assert write_winner(found, tmp_path) is None


def test_a_machine_that_slows_down_does_not_decide(tmp_path: Path) -> None:
    """The machine is three times as slow after half an hour; what is measured later must not look worse, nor the
    baseline, which is measured first, better."""
    found = tuned(FakeMeasurer(planted, drift=4.0, noise=0.003), tmp_path)
    assert found.winner is not None
    assert found.winner.job.micro_batch == 8
    for one in found.verdicts:
        if one["change"].startswith("knobs.grad_accum_fusion"):
            assert abs(one["gain"]) < 0.01


def test_the_reference_is_interpolated_between_trials_of_the_best_plan(tmp_path: Path) -> None:
    machine = FakeMeasurer(noise=0.0, step_noise=0.0, drift=10.0)
    found = tuned(machine, tmp_path)
    rows = [row for row in found.trials if row.stage == "race 1"]
    for role in {row.role for row in rows} - {"baseline"}:
        # The slowdown between two trials is nearly a straight line; without it the ratio is one.
        assert all(abs(value) < 1e-3 for value in log_gains(rows, role))


TRAPS: dict[str, dict[str, Any]] = {
    "dropped tokens": {"job.capacity_factor": 0.5},
    "shorter sequences": {"job.seq_len": 16},
    "fewer tokens": {"job.global_batch": 2},
    "frozen parts": {"job.freeze": ["language"]},
    "forced balance": {"job.routing": "forced-balance"},
    "synthetic data": {"job.data": "synthetic"},
    "another model": {"model.num_experts": 2},
    "another learning rate": {"job.lr": 0.0},
}


@pytest.mark.parametrize("trap", TRAPS.values(), ids=TRAPS)
def test_work_that_is_left_out_never_wins(trap: dict[str, Any], tmp_path: Path) -> None:
    start = plan_to_tune()

    def factor(plan: Plan) -> float:
        return 1.0 if label_change(start, plan).can_be_tried else 0.3

    machine = FakeMeasurer(factor)
    found = tuned(machine, tmp_path, extra=(trap,))
    assert found.winner is None
    refused = [one for one in found.verdicts if one["stage"] == "proposal" and one["set"].keys() == trap.keys()]
    assert refused
    assert refused[0]["verdict"] == "refused"
    assert all(row.role != refused[0]["change"] for row in found.trials)


def test_proposals_change_only_what_leaves_the_result_alone() -> None:
    start = plan_to_tune()
    for wall in ("memory", "communication", "host", "compute", "unknown"):
        candidates, _ = propose(start, start, wall)
        assert candidates
        for one in candidates:
            assert one.plan.tokens_per_step == start.tokens_per_step
            assert all(path.startswith(("knobs.", "layout.")) or path == "job.micro_batch" for path in one.changes)


def test_dropped_tokens_and_missing_ones_are_seen_in_measurements(tmp_path: Path) -> None:
    def facts(plan: Plan) -> dict[str, Any]:
        if plan.job.micro_batch == 8:
            return {"dropped": 0.2}
        return {"useful_tokens": 100.0} if plan.job.micro_batch == 4 else {}

    found = tuned(FakeMeasurer(planted, facts=facts, noise=0.003), tmp_path)
    answers = {one["change"]: one["verdict"] for one in found.verdicts}
    assert answers["job.micro_batch=8"] == "work left out"
    assert answers["job.micro_batch=4"] == "work left out"
    assert found.winner is not None
    assert found.winner.job.micro_batch == 2


def test_losses_that_differ_are_not_adopted(tmp_path: Path) -> None:
    machine = FakeMeasurer(planted, loss=lambda plan: 1.1 if plan.job.micro_batch > 2 else 1.0, noise=0.003)
    found = tuned(machine, tmp_path)
    assert found.winner is not None
    assert found.winner.job.micro_batch == 2
    assert {one["verdict"] for one in found.verdicts if "micro_batch=8" in one["change"]} == {"losses differ"}


def test_a_setting_without_effect_is_not_adopted(tmp_path: Path) -> None:
    effect = {"knob": "compile", "took_effect": False, "evidence": "compiled calls: none", "is_chosen": True}
    machine = FakeMeasurer(
        lambda plan: 0.5 if plan.knobs.compile else 1.0,
        facts=lambda plan: {"effects": (effect,)} if plan.knobs.compile else {},
    )
    found = tuned(machine, tmp_path)
    assert found.winner is None
    assert "no effect" in {one["verdict"] for one in found.verdicts}


@pytest.mark.parametrize("error", ["out of memory", "no result within 90 s", "rank 0 was killed by SIGSEGV"])
def test_a_failed_trial_is_a_result(error: str, tmp_path: Path) -> None:
    machine = FakeMeasurer(planted, error=lambda plan: error if plan.job.micro_batch == 8 else "", noise=0.003)
    found = tuned(machine, tmp_path)
    assert found.winner is not None
    assert found.winner.job.micro_batch == 4
    failed = [one for one in found.verdicts if one["verdict"] == "failed"]
    assert [one["change"] for one in failed] == ["job.micro_batch=8"]
    assert error in failed[0]["reason"]


def test_a_winner_that_fails_its_confirmation_is_not_kept(tmp_path: Path) -> None:
    """The machine is fast for one plan while it is screened, and not afterwards."""
    machine = FakeMeasurer(noise=0.003)
    start = plan_to_tune()
    is_over = []
    machine.factor = lambda plan: 0.8 if plan.hash != start.hash and not is_over else 1.0
    machine.on_measured = lambda count: is_over.append(1) if count > 12 else None
    found = tuned(machine, tmp_path, most_trials=1)
    assert found.adopted
    assert found.winner is None
    assert found.confirmed is not None
    assert "does not exclude no gain" in found.confirmed.reason


def test_a_baseline_that_fails_is_a_finding(tmp_path: Path) -> None:
    with pytest.raises(FindingsError) as raised:
        tuned(FakeMeasurer(error=lambda plan: "out of memory"), tmp_path)
    assert [finding.rule for finding in raised.value.findings] == ["baseline-runs"]


def test_the_budget_and_the_number_of_trials_are_kept(tmp_path: Path) -> None:
    machine = FakeMeasurer(noise=0.05)
    found = tuned(machine, tmp_path / "a", budget=60)
    assert machine.time <= 60
    assert "60 s" in found.ended
    found = tuned(FakeMeasurer(noise=0.05), tmp_path / "b", most_trials=2)
    assert len({row.role for row in found.trials} - {"baseline"}) == 2


def test_the_winner_says_what_was_changed_and_why(tmp_path: Path) -> None:
    found = tuned(FakeMeasurer(planted, noise=0.003), tmp_path)
    path = write_winner(found, tmp_path)
    assert path is not None
    text = path.read_text()
    assert "#   job.micro_batch=8" in text
    assert f"steps {CONFIRM.first_step} to 55" in text
    again = read_plan(str(path)).plan
    assert again is not None
    assert found.winner is not None
    assert again.hash == found.winner.hash


def test_loss_curves_that_part_late_agree_and_others_do_not() -> None:
    curve = [5.0 - 0.05 * step for step in range(50)]
    late = [loss * (1 + max(0, step - 15) * 4e-4) for step, loss in enumerate(curve)]
    assert compare_loss_curves(curve, late, []).agrees
    shifted = [loss * 1.01 for loss in curve]
    assert not compare_loss_curves(curve, shifted, ["job.micro_batch"]).agrees
    assert compare_loss_curves(curve, shifted, ["knobs.precision"]).agrees
    apart = [loss * (1.0 if step < 15 else 1.1) for step, loss in enumerate(curve)]
    assert not compare_loss_curves(curve, apart, ["knobs.precision"]).agrees
    assert not compare_loss_curves(curve, [float("nan")] * 50, []).agrees
    assert not compare_loss_curves(curve, [], []).agrees
