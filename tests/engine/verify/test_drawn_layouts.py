"""Layouts drawn at random compute what one rank computes, or are refused by name; and the draws cover all fields.

The default suite runs a few fixed draws. The slow test draws anew each time, or again with THREEFOLD_SEED; thousands
are run by hand with `benchmarks/layouts.py`, which keeps them in a ledger.
"""

import json
import os
import time
from pathlib import Path

import layout_runs
import pytest
import tiny_vision
import torch
from drawn_coverage import Coverage, fields_to_draw
from drawn_fields import NOT_DRAWN
from drawn_layouts import Drawn, Resolved, draw_layout, resolve
from drawn_themes import THEMES
from layout_ledger import engine_digest, read_ledger, run_ledger, summary
from layout_runs import FAULTS, TOLERANCE, Outcome, judge_comparison, judge_roughly, run_draw
from tiny_mixtures import MIXTURES
from tiny_models import FAMILIES

from threefold.engine.verify.compare import Comparison
from threefold.layout.degrees import SCHEDULES
from threefold.plan.parse import change
from threefold.plan.plan import CP_COMM, Plan
from threefold.plan.table import FIELDS, TABLES
from threefold.rules.all import errors, judge, promoted

SEED = os.environ.get("THREEFOLD_SEED", str(time.time_ns() % 1_000_000))
SLOW_COUNT = 60
SAMPLE = (4, 17, 21, 42)  # on two to four ranks: EP with and without overlap, TP, FSDP, a pipeline, a graph
COUNT = 250  # draws that the default suite judges
LEAST = 0.02  # of the plans turn each field: 20 in 1,000
Judged = list[tuple[Drawn, Resolved]]


@pytest.mark.parametrize("number", SAMPLE)
def test_drawn_layout_is_one_rank(number: int) -> None:
    outcome = run_draw(draw_layout(f"default suite/{number}", as_trained=False))
    assert outcome.kind == "equal", str(outcome)


@pytest.mark.parametrize("number", SAMPLE[:2])
def test_drawn_layout_as_trained_is_near_one_rank(number: int) -> None:
    outcome = run_draw(draw_layout(f"default suite/{number}", as_trained=True))
    assert outcome.kind == "near", str(outcome)


@pytest.mark.slow
def test_drawn_layouts_are_one_rank() -> None:
    outcomes = (run_draw(draw_layout(f"{SEED}/{number}")) for number in range(2 * SLOW_COUNT))
    faults = [str(outcome) for outcome in outcomes if outcome.kind in FAULTS]
    assert not faults, f"THREEFOLD_SEED={SEED}\n" + "\n".join(faults)


@pytest.fixture(scope="module")
def judged() -> Judged:
    draws = [draw_layout(f"coverage/{number}") for number in range(COUNT)]
    return [(drawn, resolve(drawn)) for drawn in draws]


def test_most_draws_are_accepted(judged: Judged) -> None:
    resolved = [one for _, one in judged]
    assert sum(one.plan is not None for one in resolved) >= 0.9 * COUNT
    assert all(one.refusals or one.repaired for one in resolved if one.plan is None)
    # Odd combinations are kept: what the rules accept as it was drawn, and what they refuse, are both there.
    assert any(one.plan is not None and not one.repaired for one in resolved)
    assert any(one.plan is None for one in resolved)


def test_every_field_is_drawn_or_named_with_a_reason() -> None:
    """A field that is new in the plan is in `fields_to_draw`, so that the coverage below fails until it is drawn."""
    assert {*fields_to_draw()} | {path for path in FIELDS if {path, path.partition(".")[0]} & NOT_DRAWN.keys()} == {
        *FIELDS
    }
    assert NOT_DRAWN.keys() <= {*FIELDS, *TABLES}
    assert all(NOT_DRAWN.values())


def test_what_is_refused_is_not_drawn(judged: Judged) -> None:
    plan = next(one.plan for _, one in judged if one.plan is not None)
    for path in (path for path, reason in NOT_DRAWN.items() if "refuses" in reason):
        refused = errors(promoted(judge(change(plan, {path: True}))))
        assert path in {finding.at for finding in refused}, path


def check_coverage(coverage: Coverage, share_of_pairs: float) -> None:
    rare = {path: coverage.fields[path] for path in fields_to_draw()}
    rare = {path: count for path, count in rare.items() if count < LEAST * coverage.num_plans}
    assert not rare, f"of {coverage.num_plans} plans"
    fields = fields_to_draw()
    missing = coverage.missing(fields)
    assert len(missing) <= (1 - share_of_pairs) * len(fields) * (len(fields) - 1) / 2, missing


def test_draws_turn_every_field_and_pairs_of_fields(judged: Judged) -> None:
    coverage = Coverage()
    for drawn, resolved in judged:
        coverage.add_draw(drawn, resolved)
    check_coverage(coverage, 0.9)
    assert {drawn.theme for drawn, resolved in judged if resolved.plan is not None} == {"", *THEMES}


@pytest.mark.slow
def test_a_thousand_draws_turn_nearly_all_pairs_of_fields() -> None:
    coverage = Coverage()
    for number in range(1000):
        drawn = draw_layout(f"pairs/{number}")
        coverage.add_draw(drawn, resolve(drawn))
    print(*coverage.lines(), sep="\n")
    check_coverage(coverage, 0.98)


def test_draws_bring_rare_combinations_together(judged: Judged) -> None:
    plans = [one.plan for _, one in judged if one.plan is not None]
    for name, combination in {
        "states on the host, MTP, stages and DP 1": lambda plan: (
            plan.knobs.optimizer_offload and plan.mtp and plan.layout.stages and plan.layout.dp == 1
        ),
        "eight bits over TP or EP": lambda plan: plan.low_precision and plan.layout.tp * plan.layout.ep > 1,
        "graphs and adapters": lambda plan: plan.knobs.graphs and plan.job.lora_rank,
        "frozen parts, FSDP and MTP": lambda plan: plan.job.freeze and plan.knobs.data_parallel == "fsdp" and plan.mtp,
        "dynamic CP, packing and router losses": lambda plan: (
            plan.shards_dynamically and plan.job.packing and (plan.job.aux_loss or plan.job.z_loss)
        ),
    }.items():
        assert sum(bool(combination(plan)) for plan in plans) >= 0.01 * COUNT, name


def test_draws_cover_layouts_jobs_and_knobs(judged: Judged) -> None:
    plans: list[Plan] = [one.plan for _, one in judged if one.plan is not None]
    assert {plan.model.name for plan in plans} == {*FAMILIES, *MIXTURES, *tiny_vision.CONFIGS}
    assert all(2 <= plan.layout.gpus <= 8 for plan in plans)
    for axis in ("tp", "cp", "pp", "vpp", "dp", "ep", "etp", "edp", "replicate"):
        assert any(plan.layout.degree(axis) > 1 for plan in plans), axis
    piped = [plan for plan in plans if plan.layout.pp > 1]
    assert {plan.layout.pipeline_schedule for plan in piped} == set(SCHEDULES)
    assert any("||" in (plan.layout.stages or "") for plan in piped)
    assert {plan.knobs.data_parallel for plan in piped} == {"zero1", "fsdp", "hsdp"}
    assert {kind for plan in plans if plan.layout.cp > 1 for kind in [plan.knobs.cp_comm]} >= set(CP_COMM)
    assert any(plan.job.packing and plan.job.micro_batch > 1 for plan in plans)


def test_what_is_never_drawn_together_is_told_with_the_rule_that_parts_it() -> None:
    coverage = Coverage()
    coverage.add(["knobs.compile", "knobs.graphs"], ["knobs.graphs"], ["compile-excludes-graphs"])
    coverage.add(["job.mtp", "knobs.graphs"], ["job.mtp", "knobs.graphs"], [])
    lines = list(coverage.lines())
    assert "  knobs.compile x knobs.graphs: compile-excludes-graphs" in lines
    assert "  job.mtp x knobs.compile: never drawn" in lines
    assert not any("job.mtp x knobs.graphs" in line for line in lines)


def test_a_ledger_continues_where_it_was_stopped(tmp_path: Path) -> None:
    """A draw is run once; one whose line was cut short, and one that hangs or crashes, do not stop the others."""
    path, draws = tmp_path / "ledger.jsonl", [draw_layout(f"ledger/{number}") for number in range(4)]
    kinds = {draws[0].seed: "equal", draws[3].seed: "refused"}

    def run(drawn: Drawn, limit: float) -> Outcome:
        if drawn is draws[1]:
            time.sleep(60)
        if drawn is draws[2]:
            raise ValueError("a rank failed")
        return Outcome(drawn, Resolved(None, (), ("a-rule",)), kinds[drawn.seed])

    first = list(run_ledger(path, draws[:1], run=run))
    path.write_text(path.read_text() + '{"seed": "ledger/1", "dra')  # a kill while the second line was written
    rest = list(run_ledger(path, draws, limit=0.2, run=run))
    assert [record["kind"] for record in first + rest] == ["equal", "HANG", "CRASH", "refused"]
    assert "a rank failed" in rest[1]["said"]
    assert rest[1]["drawn"] == json.loads(json.dumps(draws[2].fields))
    assert [record["seed"] for record in read_ledger(path)] == [drawn.seed for drawn in draws]
    again = [record["seed"] for record in run_ledger(path, draws, limit=0.1, run=run)]
    assert again == [draws[1].seed]  # a busy machine may have been the reason
    path.write_text(path.read_text().replace(engine_digest(), "another engine"))
    again = [record["seed"] for record in run_ledger(path, draws, limit=0.1, run=run)]
    assert again == [draws[1].seed, draws[2].seed]  # and a fault may be mended
    assert "4 draws" in next(summary(read_ledger(path)))


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
        ({"problems": ("nothing traveled along tp",), "near_ties": 3}, "DIFFERENT"),
    ],
)
def test_a_difference_is_a_fault_unless_experts_are_tied(changes: dict[str, object], kind: str) -> None:
    assert judge_comparison(compared(**changes))[0] == kind


@pytest.mark.parametrize(("with_large_epsilon", "kind"), [(1.4e-12, "equal"), (1.4e-10, "DIFFERENT")])
def test_rounding_that_adamw_enlarges_is_tried_with_a_larger_epsilon(
    with_large_epsilon: float, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients within 3e-14 of one rank's and weights 1.4e-10 away, as draw 39/494; a fault stays with any epsilon."""
    epsilons: list[float] = []

    def compare(plan: Plan, *args: object) -> Comparison:
        epsilons.append(plan.job.adam_eps)
        return compared(gradient=2.7e-14, weight=1.4e-10 if len(epsilons) == 1 else with_large_epsilon)

    monkeypatch.setattr(layout_runs, "compare_with_one_rank", compare)
    assert run_draw(draw_layout(f"default suite/{SAMPLE[0]}", as_trained=False)).kind == kind
    assert epsilons[1:] == [1e-4]
    for fault in ({"weight": 3e-2}, {"weight": 1e-9, "gradient": 1e-11}, {"weight": 1e-9, "problems": ("a rank",)}):
        assert not layout_runs.may_be_rounding(compared(**fault))


@pytest.mark.parametrize(
    ("exact_norm", "in_fp64", "kind"), [(8.8, 1e-14, "near"), (12.9, 1e-14, "DIFFERENT"), (8.8, 1e-3, "DIFFERENT")]
)
def test_a_norm_may_be_as_far_off_as_the_format_moves_that_of_one_rank(
    exact_norm: float, in_fp64: float, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms of draw late-users/154, Gemma 4 in fp8-cs: the layout must also equal one rank in fp64, without FP8."""

    def compare(plan: Plan, steps: int, dtype: torch.dtype, *args: object, **options: object) -> Comparison:
        if dtype is torch.float64:
            assert not plan.low_precision
            return compared(norms=((exact_norm, exact_norm),) * 2, weight=in_fp64)
        return compared(norms=((13.3, 16.7),) * 2, steps=((4.2, 4.2),) * 2, gradient=1.6)

    monkeypatch.setattr(layout_runs, "compare_with_one_rank", compare)
    assert run_draw(draw_layout(f"default suite/{SAMPLE[0]}", as_trained=True)).kind == kind


def test_a_rough_comparison_sees_what_rounding_is_not() -> None:
    norms, other = ((1.0, 1.02), (1.0, 0.98)), ((1.0, 1.02), (1.0, 1.3))
    fine: dict[str, object] = {"steps": ((4.0, 4.004), (3.9, 3.9)), "norms": norms, "gradient": 0.3, "loss": 0.1}
    assert judge_roughly(compared(**fine))[0] == "near"
    problem = ("gradient: missing or unknown ['w']",)
    nan = float("nan")
    for changes in (
        {"steps": ((4.0, 4.0), (3.9, 4.2))},
        {"steps": ((4.0, 4.0), (3.9, nan))},
        {"steps": ()},
        {"norms": other},
        {"problems": problem},
    ):
        assert judge_roughly(compared(**{**fine, **changes}))[0] == "DIFFERENT", changes
    assert judge_roughly(compared(**{**fine, "norms": other}), 1)[0] == "near"
    assert judge_roughly(compared(**{**fine, "norms": other[1:]}), 1)[0] == "DIFFERENT"
    assert judge_roughly(compared(**{**fine, "norms": other[1:]}), 0)[0] == "near"


def test_a_fault_is_told_with_all_it_takes_to_repeat_it() -> None:
    drawn = draw_layout(f"default suite/{SAMPLE[0]}")
    resolved = resolve(drawn)
    told = str(Outcome(drawn, resolved, *judge_comparison(compared(gradient=2 * TOLERANCE))))
    for word in ("default suite", "DIFFERENT", "gradient 2.0e-10", '"model_type"', '"cluster.gpus"'):
        assert word in told
    assert str(Outcome(drawn, resolved, "equal")) == f"{drawn.seed}: equal"
