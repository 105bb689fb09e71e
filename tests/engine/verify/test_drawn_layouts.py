"""Layouts drawn at random compute what one rank computes, or are refused by name.

The default suite runs a few fixed draws. The slow test draws anew each time, or again with THREEFOLD_SEED; a thousand
are run by hand with `benchmarks/layouts.py`.
"""

import os
import time

import pytest
import tiny_vision
from drawn_layouts import Resolved, draw_layout, resolve
from layout_runs import FAULTS, TOLERANCE, Outcome, judge_comparison, judge_roughly, run_draw, run_draws
from tiny_models import FAMILIES

from threefold.engine.verify.compare import Comparison
from threefold.layout.degrees import SCHEDULES
from threefold.plan.plan import CP_COMM, Plan

SEED = os.environ.get("THREEFOLD_SEED", str(time.time_ns() % 1_000_000))
SLOW_COUNT = 60
SAMPLE = (5, 6, 20, 24, 33)  # on two to four ranks: EP with and without overlap, TP, CP, FSDP, a pipeline


@pytest.mark.parametrize("number", SAMPLE)
def test_drawn_layout_is_one_rank(number: int) -> None:
    outcome = run_draw(draw_layout(f"default suite/{number}"))
    assert outcome.kind == "equal", str(outcome)


@pytest.mark.parametrize("number", SAMPLE[:2])
def test_drawn_layout_as_trained_is_near_one_rank(number: int) -> None:
    outcome = run_draw(draw_layout(f"default suite/{number}"), as_trained=True)
    assert outcome.kind == "near", str(outcome)


@pytest.mark.slow
def test_drawn_layouts_as_trained_are_near_one_rank() -> None:
    faults = [str(outcome) for outcome in run_draws(SEED, 0, SLOW_COUNT, as_trained=True) if outcome.kind in FAULTS]
    assert not faults, f"THREEFOLD_SEED={SEED}\n" + "\n".join(faults)


@pytest.mark.slow
def test_drawn_layouts_are_one_rank() -> None:
    faults = [str(outcome) for outcome in run_draws(SEED, 0, SLOW_COUNT) if outcome.kind in FAULTS]
    assert not faults, f"THREEFOLD_SEED={SEED}\n" + "\n".join(faults)


@pytest.fixture(scope="module")
def drawn() -> list[Resolved]:
    return [resolve(draw_layout(f"coverage/{number}")) for number in range(80)]


def test_half_of_the_draws_are_accepted(drawn: list[Resolved]) -> None:
    assert sum(one.plan is not None for one in drawn) >= len(drawn) // 2
    assert all(one.refusals or one.repaired for one in drawn if one.plan is None)
    # Odd combinations are kept: what the rules accept as it was drawn, and what they refuse, are both there.
    assert any(one.plan is not None and not one.repaired for one in drawn)
    assert any(one.plan is None for one in drawn)


def test_draws_cover_layouts_jobs_and_knobs(drawn: list[Resolved]) -> None:
    plans: list[Plan] = [one.plan for one in drawn if one.plan is not None]
    assert {plan.model.name for plan in plans} == {*FAMILIES, *tiny_vision.CONFIGS}
    assert all(2 <= plan.layout.gpus <= 8 for plan in plans)
    for axis in ("tp", "cp", "pp", "vpp", "dp", "ep", "etp", "edp", "replicate"):
        assert any(plan.layout.degree(axis) > 1 for plan in plans), axis
    piped = [plan for plan in plans if plan.layout.pp > 1]
    assert {plan.layout.pipeline_schedule for plan in piped} == set(SCHEDULES)
    assert any("||" in (plan.layout.stages or "") for plan in piped)
    assert any(plan.mtp for plan in piped)
    assert {plan.knobs.data_parallel for plan in piped} == {"zero1", "fsdp", "hsdp"}
    assert {kind for plan in plans if plan.layout.cp > 1 for kind in [plan.knobs.cp_comm]} >= set(CP_COMM)
    for name in ("ep_overlap", "delay_wgrad", "shared_expert_overlap", "tp_overlap", "recompute", "activation_offload"):
        assert any(getattr(plan.knobs, name) for plan in plans), name
    assert {plan.job.optimizer for plan in plans} == {"adamw", "muon"}
    assert any(plan.job.packing and plan.job.micro_batch > 1 for plan in plans)
    assert any(plan.job.capacity_factor for plan in plans)


def test_a_draw_is_repeated_by_its_seed() -> None:
    assert draw_layout("3/7") == draw_layout("3/7")
    assert draw_layout("3/7").fields != draw_layout("3/8").fields


def compared(**changes: object) -> Comparison:
    values: dict[str, object] = dict.fromkeys(("loss", "norm", "gradient", "weight", "state", "bias"), 0.0)
    values |= {"worst": "w", "near_ties": 0, "num_parameters": 1, "steps": (), "vanishing": (), "idle": ()}
    return Comparison(**{**values, "problems": (), **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"gradient": TOLERANCE}, "equal"),
        ({"gradient": 2 * TOLERANCE}, "DIFFERENT"),
        ({"weight": float("nan"), "problems": ("1 steps changed nothing",)}, "DIFFERENT"),
        ({"gradient": 1.0, "near_ties": 3}, "tied"),
        ({"problems": ("nothing travelled along tp",), "near_ties": 3}, "DIFFERENT"),
    ],
)
def test_a_difference_is_a_fault_unless_experts_are_tied(changes: dict[str, object], kind: str) -> None:
    assert judge_comparison(compared(**changes))[0] == kind


def test_a_rough_comparison_sees_what_rounding_is_not() -> None:
    fine: dict[str, object] = {"steps": ((4.0, 4.004), (3.9, 3.9)), "norm": 0.02, "gradient": 0.3, "loss": 0.1}
    assert judge_roughly(compared(**fine))[0] == "near"
    problem = ("gradient: missing or unknown ['w']",)
    for changes in ({"steps": ((4.0, 4.0), (3.9, 4.2))}, {"steps": ()}, {"norm": 0.3}, {"problems": problem}):
        assert judge_roughly(compared(**{**fine, **changes}))[0] == "DIFFERENT", changes


def test_a_fault_is_told_with_all_it_takes_to_repeat_it() -> None:
    drawn = draw_layout(f"default suite/{SAMPLE[0]}")
    resolved = resolve(drawn)
    told = str(Outcome(drawn, resolved, *judge_comparison(compared(gradient=2 * TOLERANCE))))
    for word in ("default suite", "DIFFERENT", "gradient 2.0e-10", '"model_type"', '"cluster.gpus"'):
        assert word in told
    assert str(Outcome(drawn, resolved, "equal")) == f"{drawn.seed}: equal"
