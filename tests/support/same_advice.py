"""The first pieces of advice of every verb about drawn plans, from what the verbs print as JSON.

`tests/remedies/test_same_advice.py` compares them over some plans, `benchmarks/drawn_cases.py advice` over many.
"""

import json
import random
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from html import unescape
from io import StringIO
from pathlib import Path
from typing import Any

from repository import ROOT
from traces import GEMM, NCCL, kernel, write_trace

from threefold.api.rehearsals import as_the_engine_runs
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

Pieces = list[dict[str, Any]]  # what each piece sets, the first first
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
LEAST_EXPOSED = 2.5  # of 1,000: a trace without any time of an axis speaks against its remedies
GROUPS = {
    "tp": "TENSOR_MODEL_PARALLEL_GROUP",
    "cp": "CONTEXT_PARALLEL_GROUP",
    "ep": "EXPERT_MODEL_PARALLEL_GROUP",
    "dp": "DATA_PARALLEL_GROUP",
    "bubble": "PIPELINE_MODEL_PARALLEL_GROUP",
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


def run_json(*words: str) -> Any:
    out = StringIO()
    with redirect_stdout(out), redirect_stderr(StringIO()):
        main([*words, "--json"])
    return json.loads(out.getvalue())


def of_findings(findings: list[dict[str, Any]]) -> Pieces:
    """The one finding that carries the advice, as a list of changes."""
    carriers = ("peak-fits-memory", "peak-near-memory", "states-fit-memory", "memory-wall", "host-wall",
                "communication-wall", "compute-wall")  # fmt: skip
    found = [one for one in findings if one["rule"] in carriers and one["fix_data"]]
    assert len(found) <= 1
    return [one["fix_data"] for one in found] + [other["set"] for one in found for other in one["alternatives"]]


def of_pieces(pieces: list[dict[str, Any]]) -> Pieces:
    return [piece["set"] for piece in pieces if piece["set"]][:3]


def said_by_verbs(plan: Plan, folder: Path) -> dict[str, Pieces]:
    """What each verb says of a plan that it can be asked about; all of it is to be equal."""
    path, found = folder / "plan.toml", estimate(plan)
    path.write_text(dump_plan(plan), encoding="utf-8")
    said = {"check": of_findings(run_json("check", str(path))["findings"])}
    said["estimate"] = of_pieces(run_json("estimate", str(path))["advice"])
    swept = sweep(plan, [{"job.micro_batch": plan.job.micro_batch}])
    said["sweep"] = of_pieces(swept.to_json()["points"][0]["advice"])
    side = open_side(str(path))
    said["compare"] = of_pieces(compare_sides(side, side).to_json()["b"]["advice"])
    said["report"] = of_findings([one.to_json() for one in view_plan(plan).findings])
    first, second, *_ = wall_scores(found.time).values()
    # A trace has a little time of each axis, which turns two walls round that are as good as equal.
    if surely_fits(plan) and found.wall != "memory" and first > 1.03 * second:
        said["profile"] = profiled(folder, plan)
    return said


def faults(plan: Plan, folder: Path) -> Iterator[str]:
    """Where the verbs do not say the same of a plan."""
    said = said_by_verbs(plan, folder)
    if len({json.dumps(each) for each in said.values()}) > 1:
        yield f"verbs differ: {said}"
    started = Started.of_plan(plan)
    page = unescape(try_fixes(started.fields, started)["html"])
    if missing := [changes for changes in said["check"] if as_overrides(changes) not in page]:
        yield f"the explorer lacks {missing}"
    if surely_fits(plan):  # tune measures speed: what only frees memory, or has no price, is not proposed
        tried = [dict(one.changes) for one in propose(plan, plan, estimate(plan).wall)[0]]
        priced = [(piece, piece.gain) for piece in advice(plan) if piece.gain is not None and is_equal(plan, piece)]
        shorter = [piece.changes for piece, gain in priced if piece.wall != "memory" or gain > 0]
        if tried[: len(shorter)] != shorter:
            yield f"tune proposes {tried}, and the advice is {shorter}"


def searched_faults(plan: Plan, folder: Path) -> Iterator[str]:
    """Where `plan` does not say of its answer what `check` says of it."""
    draft, best = folder / "draft.toml", folder / "best.toml"
    draft.write_text(dump_plan(plan), encoding="utf-8")
    found = run_json("plan", str(draft), "--out", str(best), "--top", "1")
    if found["candidates"]:
        searched, checked = of_pieces(found["retune"]), of_findings(run_json("check", str(best))["findings"])
        if searched != checked:
            yield f"plan says {searched}, check {checked}"


def rehearsed_faults(plan: Plan, folder: Path) -> Iterator[str]:
    """Where `dry-run` does not say what `check` says, although what it rehearsed fits where the estimate does."""
    try:
        runs, _ = as_the_engine_runs(plan)
    except FindingsError:
        return
    path = folder / "runs.toml"
    path.write_text(dump_plan(runs), encoding="utf-8")
    found = run_json("dry-run", str(path), "--ranks", "0", "--jobs", "1")
    if (found["ranks"][0]["device_bytes"] <= runs.chip.memory_bytes) == surely_fits(runs):
        rehearsed, checked = of_pieces(found["advice"]), of_findings(run_json("check", str(path))["findings"])
        if rehearsed != checked:
            yield f"dry-run says {rehearsed}, check {checked}"


def profiled(folder: Path, plan: Plan) -> Pieces:
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
