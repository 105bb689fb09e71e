"""Comparisons whose answers are known: planted slowdowns, unequal work, losses, and what explains a change."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plans import make
from repository import ROOT
from run_folders import noisy_seconds, run_plan, write_run
from traces import GEMM, NCCL, kernel, write_trace

from threefold.compare.comparison import Comparison, compare_sides
from threefold.compare.sides import Side, open_side
from threefold.compare.work import plan_differences
from threefold.cost.estimate import estimate
from threefold.findings import FindingsError
from threefold.plan.file import dump_plan
from threefold.plan.parse import change
from threefold.plan.plan import Plan
from threefold.profile.analyze import profile_traces
from threefold.report.compare.comparison_text import comparison_text, seconds_text


def plan_side(tmp_path: Path, name: str, plan: Plan) -> Side:
    (tmp_path / f"{name}.toml").write_text(dump_plan(plan))
    return open_side(str(tmp_path / f"{name}.toml"))


def run_side(folder: Path, plan: Plan, seconds: list[float], **more: Any) -> Side:
    return open_side(str(write_run(folder, plan, seconds, **more)))


def compared(a: Side, b: Side, **more: Any) -> Comparison:
    found = compare_sides(a, b, **more)
    json.dumps(found.to_json(), allow_nan=False)  # what --json prints is valid JSON
    return found


def refusals(a: Side, b: Side) -> dict[str, str]:
    with pytest.raises(FindingsError) as caught:
        compare_sides(a, b)
    assert {finding.rule for finding in caught.value.findings} == {"work-is-comparable"}
    return {finding.at: finding.problem for finding in caught.value.findings}


def test_a_planted_slowdown_is_measured(tmp_path: Path) -> None:
    a = run_side(tmp_path / "a", run_plan(), noisy_seconds(0.1, 60, 1))
    b = run_side(tmp_path / "b", run_plan(knobs_recompute=["full"]), noisy_seconds(0.12, 60, 2))
    found = compared(a, b)
    assert found.speed is not None
    assert found.speed.verdict == "slower"
    assert found.speed.ratio == pytest.approx(1.2, rel=0.02)
    assert found.speed.interval is not None
    assert found.speed.interval[0] < 1.2 < found.speed.interval[1]
    assert found.speed.is_slower_by(15)
    assert not found.speed.is_slower_by(20)
    assert [(each.part, each.field) for each in found.differences] == [("knobs", "knobs.recompute")]
    assert found.seconds is not None
    total = sum(part.amount for part in found.seconds.parts) + (found.seconds.unexplained or 0)
    assert total == pytest.approx(found.seconds.change)
    assert [list(part.fields) for part in found.seconds.parts] == [["knobs.recompute"]]
    assert found.seconds.parts[0].amount > 0


def test_noise_is_no_slowdown(tmp_path: Path) -> None:
    a = run_side(tmp_path / "a", run_plan(), noisy_seconds(0.1, 40, 3, noise=0.1))
    b = run_side(tmp_path / "b", run_plan(), noisy_seconds(0.1, 40, 4, noise=0.1))
    found = compared(a, b)
    assert found.speed is not None
    assert found.speed.verdict == "no certain difference"
    assert not found.speed.is_slower_by(0)


def test_a_comparison_agrees_with_itself(tmp_path: Path) -> None:
    """A few steps that take five times as long: time and throughput of the median step say the same change."""
    slow = [seconds * (5 if number % 9 == 8 else 1) for number, seconds in enumerate(noisy_seconds(0.11, 60, 8))]
    a = run_side(tmp_path / "a", run_plan(), noisy_seconds(0.1, 60, 7))
    found = compared(a, run_side(tmp_path / "b", run_plan(), slow))
    assert found.speed is not None
    ratio = found.speed.b.median / found.speed.a.median
    assert found.speed.ratio == pytest.approx(ratio)
    [tokens] = [each for each in found.metrics if each.name == "useful tokens"]
    assert tokens.a is not None
    assert tokens.b is not None
    assert tokens.b / tokens.a == pytest.approx(1 / ratio)
    assert ratio == pytest.approx(1.1, rel=0.03)


def test_warm_up_does_not_count(tmp_path: Path) -> None:
    slow_start = [5.0] * 5 + noisy_seconds(0.1, 40, 5)
    found = compared(
        run_side(tmp_path / "a", run_plan(), noisy_seconds(0.1, 45, 6)),
        run_side(tmp_path / "b", run_plan(), slow_start),
    )
    assert found.speed is not None
    assert found.speed.ratio == pytest.approx(1.0, abs=0.02)
    assert found.speed.b.window == (7, 45)


def test_a_larger_batch_is_compared_per_useful_token(tmp_path: Path) -> None:
    """Twice the batch in twice the time is the same speed, and half of it is padding in neither."""
    a = run_side(tmp_path / "a", run_plan(), noisy_seconds(0.1, 40, 7))
    b = run_side(tmp_path / "b", run_plan(job_global_batch=16), noisy_seconds(0.2, 40, 8))
    found = compared(a, b)
    assert found.unit == "useful token"
    assert found.speed is not None
    assert found.speed.ratio == pytest.approx(1.0, abs=0.02)
    assert any("per useful token" in finding.problem for finding in found.findings)


def test_padding_is_no_work(tmp_path: Path) -> None:
    """The same steps, but half of B's tokens are padding: B is half as fast."""
    a = run_side(tmp_path / "a", run_plan(), noisy_seconds(0.1, 40, 9))
    b = run_side(tmp_path / "b", run_plan(), noisy_seconds(0.1, 40, 10), useful=0.5)
    found = compared(a, b)
    assert found.unit == "useful token"
    assert found.speed is not None
    assert found.speed.ratio == pytest.approx(2.0, rel=0.02)


def test_longer_sequences_are_compared_per_flop(tmp_path: Path) -> None:
    a, b = make(), make(job_seq_len=32_768, job_global_batch=1024, knobs_recompute=["full"], knobs_ep_overlap=None,
                        knobs_delay_wgrad=None)  # fmt: skip
    found = compared(plan_side(tmp_path, "a", a), plan_side(tmp_path, "b", b))
    assert found.unit == "model FLOP"
    assert found.speed is not None
    guesses = [estimate(plan) for plan in (a, b)]
    assert found.speed.ratio == pytest.approx(
        guesses[0].model_tflops_per_gpu / guesses[1].model_tflops_per_gpu, rel=0.01
    )


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "model": ({}, {"model": "tiny-deepseek-v3"}),
    "job.routing": ({}, {"job_routing": "forced-balance"}),
    "job.capacity_factor": ({}, {"job_capacity_factor": 1.0}),
    "job.data": ({}, {"job_data": "synthetic"}),
    "job.mtp": ({"model": "tiny-deepseek-v3"}, {"model": "tiny-deepseek-v3", "job_mtp": 0}),
}


@pytest.mark.parametrize("field", CASES)
def test_other_work_is_refused(field: str, tmp_path: Path) -> None:
    old, new = CASES[field]
    a, b = plan_side(tmp_path, "a", run_plan(**old)), plan_side(tmp_path, "b", run_plan(**new))
    assert field in refusals(a, b)
    found = compared(a, b, anyway=True)
    assert any(finding.rule == "work-is-comparable" and finding.severity == "warning" for finding in found.findings)


def test_images_and_frozen_parts_are_work(tmp_path: Path) -> None:
    side = open_side(str(ROOT / "recipes" / "qwen3-vl-235b-a22b-4k-64xgb200-bf16-3d.toml"))
    assert side.plan is not None
    for path, value in (("job.freeze", ["vision"]), ("job.images", 7)):
        other = plan_side(tmp_path, "other", change(side.plan, {path: value}))
        assert path in refusals(side, other)
    assert "job.images" in dict(plan_differences(side.plan, change(side.plan, {"job.images": 0})))


def test_dropped_tokens_are_left_out_work(tmp_path: Path) -> None:
    capacity = run_plan(job_capacity_factor=1.0)
    a = run_side(tmp_path / "a", run_plan(), [0.1] * 20, **{"router/dropped": 0.0})
    b = run_side(tmp_path / "b", capacity, [0.1] * 20, **{"router/dropped": 0.2})
    assert "20.00% in B" in refusals(a, b)["metrics.jsonl"]
    none = run_side(tmp_path / "c", capacity, [0.1] * 20, **{"router/dropped": 0.0})
    assert compared(a, none).speed is not None


def test_a_plan_against_a_run_is_predicted_against_measured(tmp_path: Path) -> None:
    plan = run_plan()
    side = plan_side(tmp_path, "plan", plan)
    step = estimate(plan).time.step_seconds
    near = compared(side, run_side(tmp_path / "near", plan, noisy_seconds(step, 40, 11)))
    assert near.speed is not None
    assert near.speed.verdict == "no certain difference"
    far = compared(side, run_side(tmp_path / "far", plan, noisy_seconds(20 * step, 40, 12)))
    assert far.speed is not None
    assert far.speed.verdict == "slower"
    assert far.seconds is not None
    assert far.seconds.parts == ()
    assert far.seconds.unexplained == pytest.approx(far.seconds.change)
    assert far.seconds.change == pytest.approx(19 * step, rel=0.05)


def test_two_plans_are_explained_without_a_rest(tmp_path: Path) -> None:
    a, b = make(knobs_ep_overlap=None, knobs_delay_wgrad=None), make(knobs_dispatcher="alltoall")
    found = compared(plan_side(tmp_path, "a", a), plan_side(tmp_path, "b", b))
    assert found.seconds is not None
    assert found.seconds.unexplained is None
    change = estimate(b).time.step_seconds - estimate(a).time.step_seconds
    assert sum(part.amount for part in found.seconds.parts) == pytest.approx(change)
    named = {path for part in found.seconds.parts for path in part.fields}
    assert {"knobs.ep_overlap", "knobs.dispatcher"} <= named
    assert found.peak_bytes is not None
    bytes_change = estimate(b).memory.worst.peak_bytes - estimate(a).memory.worst.peak_bytes
    assert sum(part.amount for part in found.peak_bytes.parts) == pytest.approx(bytes_change)


def test_measured_expert_loads_explain_their_share(tmp_path: Path) -> None:
    """Run B is one of the same plan, with all tokens on the experts of one rank."""
    plan = run_plan(cluster_gpus=2, layout_ep=2)
    sides = []
    for name, loads in (("a", [100] * 16), ("b", [200] * 8 + [0] * 8)):
        folder = write_run(tmp_path / name, plan, noisy_seconds(0.1 if name == "a" else 0.15, 40, 13))
        (folder / "loads.json").write_text(json.dumps([loads] * 4))
        sides.append(open_side(str(folder)))
    assert [side.skew for side in sides] == [1.0, 2.0]
    found = compared(*sides)
    assert found.seconds is not None
    assert [list(part.fields) for part in found.seconds.parts] == [["expert load"]]
    assert found.seconds.parts[0].amount > 0


def test_contract_facts_of_runs_are_compared(tmp_path: Path) -> None:
    a = run_side(tmp_path / "a", run_plan(), [0.1] * 20, contract={"torch": "2.12.0", "effective": {"graphs": "off"}})
    b = run_side(tmp_path / "b", run_plan(), [0.1] * 20, contract={"torch": "2.13.0", "effective": {"graphs": "attn"}})
    found = {each.field: (each.a, each.b) for each in compared(a, b).differences}
    assert found == {"software.torch": ("2.12.0", "2.13.0"), "effective.graphs": ("off", "attn")}


def loss_curve(count: int, seed: int, shift: float = 0.0) -> list[float | None]:
    draw = np.random.default_rng(seed)
    return [float(6 - 0.02 * step + shift + 0.05 * draw.standard_normal()) for step in range(count)]


@pytest.mark.parametrize(
    ("seeds", "shift", "verdict"),
    [
        ((1, 1), 0.0, "same to the bit"),
        ((1, 2), 0.0, "no certain difference"),
        ((1, 2), 0.3, "higher"),
        ((1, 2), -0.3, "lower"),
    ],
)
def test_losses(seeds: tuple[int, int], shift: float, verdict: str, tmp_path: Path) -> None:
    a = run_side(tmp_path / "a", run_plan(), [0.1] * 100, losses=loss_curve(100, seeds[0]))
    b = run_side(tmp_path / "b", run_plan(), [0.1] * 100, losses=loss_curve(100, seeds[1], shift))
    losses = compared(a, b).losses
    assert losses is not None
    assert losses.verdict == verdict
    assert losses.is_same_order
    assert losses.difference == pytest.approx(shift, abs=0.05)


def test_losses_are_aligned_by_tokens(tmp_path: Path) -> None:
    """B takes twice as many sequences a step: after half as many steps it has seen the same tokens."""
    losses: list[float | None] = [6 - 0.02 * step for step in range(100)]
    a = run_side(tmp_path / "a", run_plan(), [0.1] * 100, losses=losses)
    b = run_side(tmp_path / "b", run_plan(job_global_batch=16), [0.2] * 50, losses=losses[1::2])
    found = compared(a, b).losses
    assert found is not None
    assert found.common_tokens == 100 * 8 * 128
    assert found.difference == pytest.approx(0.0, abs=1e-9)
    assert not found.is_same_order


def test_losses_that_are_not_finite(tmp_path: Path) -> None:
    a = run_side(tmp_path / "a", run_plan(), [0.1] * 40, losses=loss_curve(40, 1))
    gone = run_side(tmp_path / "b", run_plan(), [0.1] * 40, losses=[*loss_curve(20, 2), *[None] * 20])
    skipped = run_side(tmp_path / "c", run_plan(), [0.1] * 40, losses=[None, *loss_curve(40, 2)[1:]])
    nothing = run_side(tmp_path / "d", run_plan(), [0.1] * 40, losses=[None] * 40)
    assert (found := compared(a, gone).losses) is not None
    assert found.verdict == "not finite"
    assert (found := compared(a, skipped).losses) is not None
    assert found.verdict == "no certain difference"
    assert compared(a, nothing).losses is None


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_short_runs_are_never_certain(count: int, tmp_path: Path) -> None:
    a = run_side(tmp_path / "a", run_plan(), [0.1] * count)
    b = run_side(tmp_path / "b", run_plan(), [0.9] * count)
    found = compared(a, b)
    assert found.speed is not None
    assert not found.speed.is_slower_by(0)
    assert any(finding.rule == "enough-steps" for finding in found.findings)


def profile(
    span: float, compute: float, exposed: float, idle: float, steps: int | None = 2, **axes: float
) -> dict[str, Any]:
    walls = {
        "communication": {
            "total_seconds": 2 * exposed,
            "exposed_seconds": exposed,
            "by_axis": {axis: {"exposed_seconds": seconds} for axis, seconds in axes.items()},
        },
        "host": {"idle_seconds": idle},
        "compute": {"total_seconds": compute, "by_kind": {"gemm": compute}},
        "unknown": {"total_seconds": 0.0},
    }
    devices = [{"span_seconds": span, "num_steps": steps}]
    return {"span_seconds": span, "walls": walls, "dominant": "compute", "devices": devices}


def test_traces_are_compared_by_where_the_seconds_went(tmp_path: Path) -> None:
    for name, content in (
        ("a", profile(10.0, 6.0, 2.0, 1.0, ep=1.5, tp=0.5)),
        ("b", profile(24.0, 12.0, 8.0, 2.0, steps=4, ep=7.5, tp=0.5)),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    found = compared(open_side(str(tmp_path / "a.json")), open_side(str(tmp_path / "b.json")))
    assert found.traced is not None
    assert found.traced.per == "step"
    changes = {row.name: row.b - row.a for row in found.traced.parts}
    assert changes == pytest.approx(
        {"compute": 0.0, "exposed communication": 1.0, "idle": 0.0, "copies and unknown kernels": 0.0}
    )
    assert sum(changes.values()) == pytest.approx(found.traced.span.b - found.traced.span.a)
    details = {row.name: row.b - row.a for row in found.traced.details}
    assert details["communication axis ep"] == pytest.approx(1.125)


def remarks(tmp_path: Path, a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    for name, content in (("a", a), ("b", b)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    found = compared(open_side(str(tmp_path / "a.json")), open_side(str(tmp_path / "b.json")))
    return [finding.at for finding in found.findings if finding.severity == "note"]


def test_compare_says_what_overlap_costs_its_kernels(tmp_path: Path) -> None:
    """The unions shrink while the kernels beneath them take longer."""
    plain, overlapped = profile(10.0, 6.0, 3.0, 1.0), profile(9.0, 6.6, 1.4, 1.0)
    assert remarks(tmp_path, plain, overlapped) == ["span_seconds"]
    assert remarks(tmp_path, overlapped, plain) == []
    assert remarks(tmp_path, plain, profile(9.0, 6.0, 2.0, 1.0)) == []


def test_profiles_with_other_kernels_are_no_matched_pair(tmp_path: Path) -> None:
    sides = [profile(10.0, 6.0, 3.0, 1.0), profile(20.0, 12.0, 6.0, 2.0, steps=4)]
    for side, events in zip(sides, (1000, 2000), strict=True):  # of two and of four steps
        side["devices"][0]["num_events"] = events
    assert remarks(tmp_path, *sides) == []
    sides[1]["devices"][0]["num_events"] = 2200
    assert remarks(tmp_path, *sides) == ["num_events"]


@pytest.mark.parametrize("walls", [None, [], {"compute": 7}, {"compute": {"total_seconds": "x", "by_kind": [1]}}])
def test_profiles_of_strangers_are_read_with_care(walls: Any, tmp_path: Path) -> None:
    content = {"span_seconds": 10**400, "walls": walls, "devices": 3}
    good = {**content, "span_seconds": 3.0}
    (tmp_path / "bad.json").write_text(json.dumps(content))
    (tmp_path / "good.json").write_text(json.dumps(good))
    sides = [open_side(str(tmp_path / name)) for name in ("good.json", "bad.json")]
    assert compared(sides[0], sides[0]).traced is not None
    with pytest.raises(FindingsError):
        compare_sides(sides[0], sides[1])


def test_a_folder_of_traces_is_a_trace(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_trace(tmp_path / name / "rank-0.json", [kernel(GEMM, 0, 100), kernel(NCCL, 100, 50, stream=20)])
    sides = [open_side(str(tmp_path / name), read_trace=lambda path: profile_traces([path]).to_json()) for name in "ab"]
    assert [side.kind for side in sides] == ["trace", "trace"]
    found = compared(*sides)
    assert found.traced is not None
    assert found.traced.span.a == pytest.approx(150e-6)
    text = comparison_text(found)
    assert "copies and unknown kernels" not in text  # there are none in either
    assert "-0" not in text
    (tmp_path / "empty").mkdir()
    with pytest.raises(FindingsError, match="neither a run nor traces"):
        open_side(str(tmp_path / "empty"))


def test_differences_of_rounding_are_nothing() -> None:
    assert [seconds_text(value) for value in (-2.39e-17, 0.0, 2e-9)] == ["0 s", "0 s", "2e-09 s"]


def test_a_trace_needs_a_trace(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(profile(10.0, 6.0, 2.0, 1.0)))
    with pytest.raises(FindingsError):
        compare_sides(open_side(str(tmp_path / "a.json")), plan_side(tmp_path, "p", run_plan()))
