"""The families of `spec/families` on several ranks: one rank's losses, gradients, weights and optimizer states."""

import os
import time

import pytest
import torch
from drawn_layouts import draw_layout
from layout_runs import FAULTS, run_draw
from mixture_layouts import MIXTURE_CASES
from oracle_layouts import Case
from tiny_mixtures import MIXTURES

from threefold.engine.models.build import build_model
from threefold.engine.verify.oracle import compare_with_one_rank
from threefold.rules.all import check, errors
from threefold.rules.stacks import ENGINE_LIMITS

FP64 = 1e-10  # as in test_oracle.py
SAMPLE = (5, 9)  # on two to four ranks
SEED = os.environ.get("THREEFOLD_SEED", str(time.time_ns() % 1_000_000))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=() if case.often else pytest.mark.slow) for case in MIXTURE_CASES],
)
def test_layout_is_one_rank(case: Case) -> None:
    plan = case.plan
    assert [str(finding) for finding in errors(check(plan)) if finding.rule not in ENGINE_LIMITS] == []
    found = compare_with_one_rank(plan)
    assert (found.problems, found.near_ties) == ((), 0)
    assert (found.idle, found.vanishing) == ((), ())
    parameters = build_model(plan.model, plan.mtp, device="meta").parameters()
    assert found.num_parameters == sum(parameter.requires_grad for parameter in parameters)
    assert found.largest <= FP64, found


def test_every_family_is_sharded_by_every_axis() -> None:
    for family in MIXTURES:
        axes = set().union(*(case.written() for case in MIXTURE_CASES if case.family == family))
        assert axes >= {"tp", "ep", "pp"}, family


@pytest.mark.parametrize("number", SAMPLE)
def test_drawn_layout_is_one_rank(number: int) -> None:
    outcome = run_draw(draw_layout(f"mixtures/{number}", MIXTURES, as_trained=False))
    assert outcome.kind == "equal", str(outcome)


@pytest.mark.slow
@pytest.mark.parametrize("as_trained", [False, True], ids=["fp64", "as trained"])
def test_drawn_layouts_are_one_rank(as_trained: bool) -> None:
    outcomes = (run_draw(draw_layout(f"{SEED}/{number}", MIXTURES, as_trained)) for number in range(30))
    faults = [str(outcome) for outcome in outcomes if outcome.kind in FAULTS]
    assert not faults, f"THREEFOLD_SEED={SEED}\n" + "\n".join(faults)
