"""Every accepted layout gives one rank's losses, gradients, weights, optimizer states and router biases."""

import math
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from oracle_layouts import AXES, CASES, SHARDED, Case
from tiny_models import FAMILIES

from threefold.engine.build import options_of
from threefold.engine.models.build import build_model
from threefold.engine.verify.compare import Comparison, RankResults, compare_results
from threefold.engine.verify.oracle import compare_with_one_rank, run_one_rank
from threefold.layout.degrees import SCHEDULES
from threefold.plan.plan import CP_COMM, Plan
from threefold.rules.all import check, errors
from threefold.rules.stacks import ENGINE_LIMITS

# Sums in another order differ by 1e-15; AdamW divides by the gradient's size, which makes 1e-12 of that.
FP64 = 1e-10
# Rounding is 6e-8, a few thousand terms are summed; the gradient of the smallest parameters is what is left of larger
# ones that cancel.
FP32 = 1e-5


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def refused(plan: Plan) -> list[str]:
    return [str(finding) for finding in errors(check(plan)) if finding.rule not in ENGINE_LIMITS]


def marked(case: Case) -> object:
    return pytest.param(case, id=case.name, marks=() if case.often else pytest.mark.slow)


@pytest.mark.parametrize("case", [marked(case) for case in CASES])
def test_layout_is_one_rank(case: Case) -> None:
    plan = case.plan
    assert refused(plan) == []
    found = compare_with_one_rank(plan)
    assert found.problems == ()
    assert found.near_ties == 0
    assert (found.idle, found.vanishing) == ((), ())
    parameters = build_model(plan.model, plan.mtp, device="meta").parameters()
    assert found.num_parameters == sum(parameter.requires_grad for parameter in parameters)
    assert found.largest <= FP64, found


GROUPED = ("dp tp ep edp", "tp cp ep etp", "dp pp vpp ep", "fsdp cp ep", "tp pp vpp etp", "ep beyond dp")


@pytest.mark.parametrize("name", [GROUPED[0], *(pytest.param(name, marks=pytest.mark.slow) for name in GROUPED[1:])])
def test_grouped_products_are_one_rank(name: str) -> None:
    """The path that trains, in fp32. One step: AdamW makes a step's worth of the rounding of a gradient near zero."""
    [case] = [case for case in CASES if case.name == name]
    options = replace(options_of(case.plan), expert_backend="grouped")
    found = compare_with_one_rank(case.plan, steps=1, dtype=torch.float32, options=options)
    assert (found.problems, found.near_ties) == ((), 0)
    assert max(found.loss, found.norm, found.gradient) <= FP32, found


def test_set_covers_every_axis_and_pair() -> None:
    assert len(CASES) >= 60
    assert len({case.name for case in CASES}) == len(CASES)
    # The data-parallel degrees follow from the ranks, and chunks need a pipeline.
    alone = [{"pp", "vpp"} if axis == "vpp" else {axis} for axis in (*AXES, *SHARDED) if axis not in ("dp", "edp")]
    for axes in (set(), *alone):
        assert any(case.written() == axes for case in CASES), axes
    often = [case for case in CASES if case.often]
    assert 18 <= len(often) <= 26
    assert max(case.gpus for case in often) <= 8
    for cases in (CASES, often):
        for pair in combinations((*AXES, *SHARDED), 2):
            assert pair == SHARDED or any(case.active() >= set(pair) for case in cases), pair
    assert {case.family for case in CASES} == set(FAMILIES)


def test_set_covers_knobs_and_jobs() -> None:
    plans = [case.plan for case in CASES]
    assert {plan.layout.pipeline_schedule for plan in plans if plan.layout.pp > 1} == set(SCHEDULES)
    kinds = [plan.knobs.cp_comm for plan in plans if plan.layout.cp > 1]
    assert {kind for kind in kinds if isinstance(kind, str)} == set(CP_COMM)
    assert any(not isinstance(kind, str) for kind in kinds)
    assert {plan.mtp for plan in plans} == {0, 1, 2}
    assert any(plan.model.tied and plan.layout.pp > 1 for plan in plans)
    dropping = [plan for plan in plans if plan.job.capacity_factor]
    assert len(dropping) >= 3
    for plan in dropping:
        options = replace(options_of(plan), expert_backend="loop")
        assert run_one_rank(plan, 1, torch.float64, options).losses[0]["router/dropped"] > 0


# An empty comparison must not pass


def seen(**changes: object) -> RankResults:
    values = ("w", (4,), (0,), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    state = ("first.w", *values[1:])
    one = RankResults([{"ce": 2.0}], [1.0], 0, [values], [values], [state], {"bias": torch.ones(2)})
    return replace(one, **{"evaluation": {"made up": 0.0}, **changes})  # type: ignore[arg-type]


def compared(*ranks: RankResults, alone: RankResults | None = None, case: str = "dp") -> Comparison:
    [chosen] = [one for one in CASES if one.name == case]
    used = [replace(rank, calls={("dp x cp", "reduce_scatter"): 1, ("edp", "reduce_scatter"): 1}) for rank in ranks]
    return compare_results(chosen.plan, alone or seen(), used)


def half(first: int, *values: float) -> list[tuple[str, tuple[int, ...], tuple[int, ...], object]]:
    return [("w", (4,), (first,), torch.tensor(values))]


def owned(name: str, values: object) -> list[object]:
    return [(name, (4,), (0,), torch.tensor(values))]


def test_comparison_accepts_what_is_the_same() -> None:
    both = [seen(gradients=half(0, 1, 2), states=[]), seen(gradients=half(2, 3, 4))]
    found = compared(*both)
    assert (found.largest, found.problems, found.idle, found.num_parameters) == (0.0, (), (), 1)
    assert found.steps == ((2.0, 2.0),)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"gradients": []}, "gradient: missing or unknown ['w']"),
        ({"gradients": half(0, 1, 2)}, "gradient of w: elements on 0 to 1 ranks"),
        ({"gradients": [*half(0, 1, 2, 3, 4), *half(2, 3, 4)]}, "gradient of w: elements on 1 to 2 ranks"),
        ({"states": []}, "state: missing or unknown ['first.w']"),
        ({"weights": half(0, 1, 2)}, "weight of w: elements on 0 to 1 ranks"),
        ({"biases": {}}, "router biases are missing"),
        ({"skipped": 1}, "1 steps changed nothing"),
        ({"loss_scale": 0.25}, "overflows until the loss scale is 0.25, on one rank 1"),
    ],
)
def test_comparison_tells_what_is_missing(changes: dict[str, object], told: str) -> None:
    found = compared(seen(**changes))
    assert found.problems == (told,)
    assert found.largest == math.inf


def test_an_overflow_is_no_difference_where_one_rank_has_it_too() -> None:
    """fp16 begins with a loss scale that is too large here: the same step is compared with one that is not."""
    knobs, job = {"precision": "fp16", "data_parallel": "fsdp"}, {"initial_loss_scale": 2.0**20}
    plan = Case("", "qwen3_moe", {"gpus": 2}, knobs=knobs, job=job).plan
    alone = run_one_rank(plan, 1, torch.float16, options_of(plan))
    assert alone.loss_scale < 2.0**20
    assert alone.skipped == 0
    found = compare_with_one_rank(plan, 1, torch.float16, options_of(plan))
    assert found.problems == ()
    assert found.norm < 0.1  # as NORM_TOLERANCE in layout_runs.py
    assert compared(seen(loss_scale=0.5)).problems == ()


@pytest.mark.parametrize(
    ("changes", "name", "gap"),
    [
        ({"losses": [{"ce": 2.5}]}, "loss", 0.25),
        ({"losses": [{"ce": math.nan}]}, "loss", math.inf),
        ({"evaluation": {"made up": 0.25}}, "loss", 0.25),
        ({"norms": [0.5]}, "norm", 0.5),
        ({"gradients": owned("w", [1.0, 2.0, 3.0, 3.0])}, "gradient", 0.25),
        ({"gradients": owned("w", [1.0, 2.0, math.nan, 4.0])}, "gradient", math.inf),
        ({"weights": owned("w", [0.0, 2.0, 3.0, 4.0])}, "weight", 0.25),
        ({"states": owned("first.w", [1.0, 2.0, 3.0, 6.0])}, "state", 0.5),
        ({"biases": {"bias": torch.tensor([1.0, 0.0])}}, "bias", 1.0),
    ],
)
def test_comparison_sees_a_difference(changes: dict[str, object], name: str, gap: float) -> None:
    found = compared(seen(**changes))
    assert found.problems == ()
    assert (getattr(found, name), found.largest) == (gap, gap)


def test_comparison_names_what_does_not_move() -> None:
    still = {"gradients": owned("w", [0.0] * 4), "biases": {"bias": torch.zeros(2)}}
    assert compared(seen(**still), alone=seen(**still)).idle == ("bias", "w")


def test_a_gradient_that_is_zero_by_mathematics_is_compared_with_the_largest() -> None:
    """Rounding on one side and on the other: nothing is wrong, and what Adam makes of it is not compared."""

    def of(tiny: float) -> RankResults:
        both = {kind: [*owned(f"{name}w", [1.0, 2.0, 3.0, 4.0]), *owned(f"{name}a_log", [tiny] * 4)]
                for kind, name in (("gradients", ""), ("weights", ""), ("states", "first."))}  # fmt: skip
        return seen(**both)

    found = compared(of(3e-17), alone=of(1e-17))
    assert found.vanishing == ("a_log",)
    assert found.largest < 1e-15
    assert compared(of(3e-3), alone=of(1e-3)).largest == pytest.approx(
        2.0
    )  # a small one of its own size is not let pass
    assert compared(of(1e-3), alone=of(1e-17)).largest > 1e-4  # nor one that should have vanished
    small = compared(
        of(2e-6), alone=of(1e-6)
    )  # with the rounding of 4.0: compared with 1e-5 of that, and so its moments
    assert (small.gradient, small.state) == pytest.approx((1e-6 / 4e-5, 1e-6 / 4e-5))


@pytest.mark.parametrize(("case", "axis"), [("tp", "tp"), ("cp", "cp"), ("pp", "pp"), ("ep", "ep"), ("etp", "etp")])
def test_comparison_misses_an_axis_that_was_not_used(case: str, axis: str) -> None:
    assert f"nothing traveled along {axis}" in compared(seen(), case=case).problems


@pytest.mark.parametrize(("largest_cp", "misses"), [(1, False), (2, True)])
def test_dynamic_cp_sends_where_a_microbatch_has_several_ranks(largest_cp: int, misses: bool) -> None:
    [chosen] = [one for one in CASES if one.name == "cp"]
    plan = replace(chosen.plan, knobs=replace(chosen.plan.knobs, cp_dynamic=True))
    assert plan.shards_dynamically
    problems = compare_results(plan, seen(), [seen(), seen(largest_cp=largest_cp)]).problems
    assert ("nothing traveled along cp" in problems) == misses


@pytest.mark.parametrize(("trained", "axes"), [("layers.0.ffn.experts.up_lora_a", {"ep"}), ("w", {"ep", "dp"})])
def test_dp_carries_gradients_of_all_but_experts(trained: str, axes: set[str]) -> None:
    """EP over DP: adapters of experts alone leave nothing that data-parallel ranks would reduce."""
    [chosen] = [one for one in CASES if one.name == "ep"]
    one = seen(gradients=owned(trained, [1.0] * 4), weights=owned(trained, [1.0] * 4), states=[])
    problems = compare_results(chosen.plan, one, [one]).problems
    assert {problem.rpartition(" ")[2] for problem in problems if "traveled" in problem} == axes
