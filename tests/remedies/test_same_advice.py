"""One adviser: all verbs give the same first pieces of advice about a plan, from what they print as JSON."""

import json
import random
from functools import cache
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT
from traces import GEMM, NCCL, kernel, write_trace

from threefold.cli.main import main
from threefold.compare.comparison import compare_sides
from threefold.compare.sides import open_side
from threefold.cost.estimate import WALLS, estimate, wall_scores
from threefold.cost.fit import surely_fits
from threefold.explore.answer import try_fixes
from threefold.explore.request import Started
from threefold.findings import FindingsError, as_overrides
from threefold.plan.file import dump_plan, read_plan
from threefold.plan.parse import change
from threefold.plan.plan import Plan
from threefold.profile.analyze import profile_traces
from threefold.remedies.advise import Advice
from threefold.report.html.plan_view import view_plan
from threefold.rules.all import advice, blockers, judge
from threefold.search.sweep import sweep
from threefold.tune.labels import label_change
from threefold.tune.propose import propose

RECIPES = sorted((ROOT / "recipes").glob("*x[hgb]*.toml"))
MOVES: dict[str, tuple[Any, ...]] = {
    "target": ("threefold", "megatron-bridge"),
    "job.seq_len": (4096, 8192, 16384, 32768),
    "job.micro_batch": (1, 2, 4),
    "knobs.recompute": ([], ["layernorm"], ["layernorm", "moe_act"], ["full"]),
    "knobs.grad_reduce_overlap": (True, False),
    "knobs.ep_overlap": (True, False),
    "knobs.dispatcher": ("alltoall", "deepep", "hybridep"),
    "knobs.optimizer_dtype": ("fp32", "bf16"),
    "layout.ep": (1, 4, 8, 16, 32),
    "layout.tp": (1, 2, 4, 8),
}


def drawn(seed: int) -> Plan | None:
    """A recipe with a few fields changed, where rules leave something to estimate."""
    draw = random.Random(seed)
    plan = read_plan(str(draw.choice(RECIPES))).plan
    assert plan is not None
    fields = draw.sample(sorted(MOVES), draw.randint(0, 3))
    try:
        plan = change(plan, {path: draw.choice(MOVES[path]) for path in fields})
    except FindingsError:
        return None
    return None if blockers(judge(plan)) or plan.is_vlm else plan


@cache
def drawn_plans(count: int) -> list[Plan]:
    found: list[Plan] = []
    seed = 0
    while len(found) < count:
        seed += 1
        plan = drawn(seed)
        if plan is not None:
            found.append(plan)
    return found


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    main([*words, "--json"])
    return json.loads(capsys.readouterr().out)


def of_findings(findings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The one finding that carries the advice, as a list of changes."""
    carriers = ("peak-fits-memory", "peak-near-memory", "states-fit-memory", "memory-wall", "host-wall",
                "communication-wall", "compute-wall")  # fmt: skip
    found = [one for one in findings if one["rule"] in carriers and one["fix_data"]]
    assert len(found) <= 1
    return [one["fix_data"] for one in found] + [other["set"] for one in found for other in one["alternatives"]]


def of_pieces(pieces: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [piece["set"] for piece in pieces if piece["set"]][:3]


LEAST_EXPOSED = 2.5  # of 1,000: a trace without any time of an axis speaks against its remedies
GROUPS = {
    "tp": "TENSOR_MODEL_PARALLEL_GROUP",
    "cp": "CONTEXT_PARALLEL_GROUP",
    "ep": "EXPERT_MODEL_PARALLEL_GROUP",
    "dp": "DATA_PARALLEL_GROUP",
    "bubble": "PIPELINE_MODEL_PARALLEL_GROUP",
}


def profiled(folder: Path, plan: Plan) -> list[dict[str, Any]]:
    """A trace with the shares of time that the estimate sees, which says nothing against a remedy."""
    terms = estimate(plan).time.terms
    step = sum(terms.values())
    compute, gap = (1000 * sum(terms[term] for term in WALLS[wall]) / step for wall in ("compute", "host"))
    events = []
    for number in range(20):
        at = 1e4 + 1000 * number
        events.append(kernel(GEMM, at, compute))
        at += compute
        for term, group in GROUPS.items():
            is_used = plan.layout.degree("pp" if term == "bubble" else term) > 1
            exposed = max(1000 * terms[term] / step, LEAST_EXPOSED * is_used)
            events.append(kernel(NCCL, at, exposed, stream=20, operation="all_to_all", description=group))
            at += exposed
        events.append(kernel(GEMM, at + gap - 0.01, 0.01))
    found = profile_traces([write_trace(folder / "trace.json", events)], plan)
    return of_pieces(found.to_json()["fixes"])


def is_equal(plan: Plan, piece: Advice) -> bool:
    """Whether it keeps the training: `tune` tries other formats on request."""
    other = piece.trial.plan if piece.trial else None
    return other is not None and label_change(plan, other).kind == "training-equivalent"


def check_all(plan: Plan, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, found = folder / "plan.toml", estimate(plan)
    path.write_text(dump_plan(plan), encoding="utf-8")
    said: dict[str, Any] = {}
    said["check"] = of_findings(run_json(capsys, "check", str(path))["findings"])
    said["estimate"] = of_pieces(run_json(capsys, "estimate", str(path))["advice"])
    swept = sweep(plan, [{"job.micro_batch": plan.job.micro_batch}])
    said["sweep"] = of_pieces(swept.to_json()["points"][0]["advice"])
    side = open_side(str(path))
    said["compare"] = of_pieces(compare_sides(side, side).to_json()["b"]["advice"])
    first, second, *_ = wall_scores(found.time).values()
    # A trace has a little time of each axis, which turns two walls round that are as good as equal.
    if surely_fits(plan) and found.wall != "memory" and first > 1.03 * second:
        said["profile"] = profiled(folder, plan)
    assert len({json.dumps(each) for each in said.values()}) == 1, said
    if surely_fits(plan):  # tune measures speed: what only frees memory, or has no price, is not proposed
        candidates, _ = propose(plan, plan, found.wall)
        priced = [(piece, piece.gain) for piece in advice(plan) if piece.gain is not None and is_equal(plan, piece)]
        shorter = [piece for piece, gain in priced if piece.wall != "memory" or gain > 0]
        assert [dict(one.changes) for one in candidates][: len(shorter)] == [piece.changes for piece in shorter]


def test_pages_show_what_check_says() -> None:
    """The explorer's findings and those of a report."""
    for plan in drawn_plans(4):
        expected = of_findings([one.to_json() for one in view_plan(plan).findings])
        assert expected == [piece.changes for piece in advice(plan) if piece.changes]
        started = Started.of_plan(plan)
        page = unescape(try_fixes(started.fields, started)["html"])
        assert all(as_overrides(changes) in page for changes in expected)


@pytest.mark.parametrize("number", range(20))
def test_all_verbs_give_the_same_advice(number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_all(drawn_plans(20)[number], tmp_path, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(20, 200))
def test_all_verbs_give_the_same_advice_about_many(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_all(drawn_plans(200)[number], tmp_path, capsys)


def test_a_search_and_a_rehearsal_say_what_check_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", "tiny-qwen3-moe", "--chip", "h100", "--gpus", "1", "--seq-len", "256")
    path = tmp_path / "plan.toml"
    found = run_json(capsys, "plan", *words, "--target", "threefold", "--out", str(path))
    checked = of_findings(run_json(capsys, "check", str(path))["findings"])
    assert of_pieces(found["retune"]) == checked
    assert of_pieces(run_json(capsys, "dry-run", str(path))["advice"]) == checked
